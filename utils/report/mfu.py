"""The peak speed of GPUs, for MFU: which part of it a training run uses."""

import re

import torch

# Dense bf16 (before Ampere: fp16) TFLOPS of the tensor cores, summed in float32, of SXM modules and
# cards. From NVIDIA's data sheets, which often show twice as much, for sparse matrices. Of GeForce
# cards, which sum in float32 at half the speed, from the white paper of Ada (4090) and, of the
# 3090, from tables of other projects.
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100": 989,
    "A100": 312,
    "A10": 125,
    "L40S": 362,
    "L4": 121,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
}
# What the names of variants have, and of partitions, whose peak is another one.
VARIANTS = r"MIG|NVL|Laptop|Max-Q|[34]090 (D|Ti)\b|[HV]100.PCIe|-\d+[ABCQ]\b"


def peak_flops(accelerator):
    """Peak floating-point operations per second of all GPUs together, for MFU.

    Returns:
        float | None: None on a CPU, in float32, or for a GPU that the table lacks, another variant
        or a partition of one: by MIG, or a virtual GPU.
    """
    if accelerator.device.type != "cuda" or accelerator.mixed_precision not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name()
    for gpu, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{gpu}\b", name) and not re.search(VARIANTS, name, re.IGNORECASE):
            return tflops * 1e12 * accelerator.num_processes
    return None
