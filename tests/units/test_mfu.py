"""The peak speed of GPUs."""

import pytest
import torch
from harness import fakes

from utils.report import mfu


def test_the_peak_is_that_of_all_gpus_in_half_precision(monkeypatch):
    cpus = fakes.accelerator(4, mixed_precision="bf16")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    for precision, peak in (("no", None), ("fp16", 8 * 989e12), ("bf16", 8 * 989e12)):
        gpus = fakes.accelerator(8, device="cuda", mixed_precision=precision)
        assert mfu.peak_flops(gpus) == peak
    assert mfu.peak_flops(cpus) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA RTX A1000")
    assert mfu.peak_flops(gpus) is None


@pytest.mark.parametrize(
    ("names", "peak"),
    [
        ("Tesla V100-SXM2-16GB, NVIDIA A10", 125),
        ("NVIDIA A100-PCIE-40GB, NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3, NVIDIA H200, NVIDIA H800", 989),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA H20-3e", 148),
        ("NVIDIA L4", 121),
        ("NVIDIA T400 4GB, Tesla V100-PCIE-16GB, NVIDIA A10G, NVIDIA A10-24Q", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb, NVIDIA H100 PCIe, NVIDIA H100 NVL", None),
        ("NVIDIA H800 PCIe, NVIDIA GB200, NVIDIA L40, NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 3090 Ti, NVIDIA GeForce RTX 4090 D, NVIDIA RTX 4090 LAPTOP GPU", None),
    ],
)
def test_other_variants_of_a_gpu_have_another_peak_or_none(names, peak):
    """Tera floating-point operations per second in half precision; another variant may differ."""
    assert {mfu.known_tflops(name) for name in names.split(", ")} == {peak}
