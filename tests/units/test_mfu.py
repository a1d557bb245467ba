"""The peak speed of GPUs."""

import pytest
import torch
from harness import fakes

from utils.report import mfu


@pytest.mark.parametrize(
    ("names", "peak"),
    [
        ("Tesla V100-SXM2-16GB, NVIDIA A10", 125),
        ("NVIDIA A100-PCIE-40GB, NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3, NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla T4", 65),
        ("NVIDIA T400 4GB, Tesla V100-PCIE-16GB, NVIDIA A10G, NVIDIA A10-24Q", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb, NVIDIA H100 PCIe, NVIDIA H100 NVL", None),
        ("NVIDIA GB200, NVIDIA L40, NVIDIA RTX A1000, NVIDIA RTX 4090 LAPTOP GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti, NVIDIA GeForce RTX 4090 D", None),
    ],
)
def test_the_peak_is_that_of_all_gpus_in_half_precision(names, peak, monkeypatch):
    """Another variant may have another peak."""
    for name in names.split(", "):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        for device, precision in (
            ("cuda", "bf16"),
            ("cuda", "fp16"),
            ("cuda", "no"),
            ("cpu", "bf16"),
        ):
            made = fakes.accelerator(8, device=device, mixed_precision=precision)
            known = peak and device == "cuda" and precision != "no"
            assert mfu.peak_flops(made) == (8e12 * peak if known else None)
