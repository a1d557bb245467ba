"""Peak throughput of GPUs, for model FLOPs utilization (MFU)."""

import re

import torch

# Dense bf16 (before Ampere: fp16) TFLOPS of the tensor cores, of SXM modules and cards, from NVIDIA's data sheets.
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "RTX 4090": 165, "V100": 125, "T4": 65}


def peak_flops(accelerator, tflops=None):
    """Peak floating-point operations per second of all GPUs together; None on a CPU, in float32, or for an unknown GPU.

    Args:
        tflops (float | None): TFLOPS of one GPU; overrides the table.
    """
    if tflops is None and accelerator.device.type == "cuda" and accelerator.mixed_precision in ("bf16", "fp16"):
        tflops = known_tflops(torch.cuda.get_device_name())
    return tflops and tflops * 1e12 * accelerator.num_processes


def known_tflops(device_name):
    """Looks up a GPU by its CUDA name; None if it is not in the table, or is a slower variant or a MIG partition of one."""
    if re.search("MIG|NVL|Laptop|Max-Q|4090 D|[HV]100.PCIe", device_name, re.IGNORECASE):
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)
