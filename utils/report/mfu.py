"""The peak speed of GPUs, for MFU: which part of it a training run uses."""

import re

import torch

# Dense bf16 (before Ampere: fp16) TFLOPS of the tensor cores, summed in float32, of SXM modules and
# cards. From NVIDIA's data sheets, which often show twice as much, for sparse matrices (that of the
# RTX 6000 Ada four times as much: 1457, for sparse fp8). Of GeForce cards, which sum in float32 at
# half the speed, from "Peak BF16 Tensor TFLOPS with FP32 Accumulate" of the white papers of their
# architectures, as other projects quote them: Ada (4090), RTX Blackwell (5090). That of the 3090 is
# in tables of other projects only.
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100": 989,
    "H800": 989,  # an H100 with fewer NVLinks
    "H20": 148,
    "A100": 312,
    "A40": 149.7,
    "A10": 125,
    "L40S": 362,
    "L4": 121,
    "RTX 6000 Ada": 364,
    "RTX 5090": 209.5,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
}
# What the names of variants have, and of partitions, whose peak is another one.
VARIANTS = r"MIG|NVL|Laptop|Max-Q|[345]090 (D|Ti)\b|[HV][18]00.PCIe|-\d+[ABCQ]\b"


def peak_flops(accelerator):
    """Peak floating-point operations per second of all GPUs together, for MFU.

    Returns:
        float | None: None on a CPU, in float32, or for an unknown GPU.
    """
    precise = accelerator.mixed_precision in ("bf16", "fp16")
    if accelerator.device.type != "cuda" or not precise:
        return None
    tflops = known_tflops(torch.cuda.get_device_name())
    return tflops and tflops * 1e12 * accelerator.num_processes


def known_tflops(device_name):
    """Looks up a GPU by its CUDA name.

    Returns:
        float | None: None if the table lacks it, or for another variant or a partition of one: by
        MIG, or a virtual GPU.
    """
    if re.search(VARIANTS, device_name, re.IGNORECASE):
        return None
    peaks = PEAK_TFLOPS.items()
    return next((peak for name, peak in peaks if re.search(rf"\b{name}\b", device_name)), None)
