"""What GPUs could do at most: the measure of model FLOPs utilisation (MFU)."""

import torch

# Dense bf16 (before Ampere: fp16) tensor operations, 10^12 a second: NVIDIA's data sheets, SXM where there are several.
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "RTX 4090": 165, "V100": 125, "T4": 65}


def peak_flops(accelerator, tflops=None):
    """The operations a second of all devices together; None where nobody says: on a CPU, in float32, on an unknown GPU.

    Args:
        tflops (float | None): of one device, 10^12 a second; wins over the table.
    """
    if tflops is None and accelerator.device.type == "cuda" and accelerator.mixed_precision in ("bf16", "fp16"):
        tflops = next((peak for name, peak in PEAK_TFLOPS.items() if name in torch.cuda.get_device_name()), None)
    return tflops and tflops * 1e12 * accelerator.num_processes
