"""To be merged into the tests of its modules."""

import json

import pytest
import torch
from safetensors.torch import save_file

from utils.run import (
    manifest,
    metrics,
    record,
    weights,
)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_peaks_are_of_exactly_that_gpu(name, peak):
    assert record.known_tflops(name) == peak


def test_a_slow_step_shows_its_seconds():
    assert metrics.speed(1_234.5, 0.1) == "1,234 samples/s"
    assert metrics.speed(2.5, 0.4) == "2.5 samples/s"
    assert metrics.speed(0.04, 50.0) == "50.0 s/step"
    figures = dict(step=1, epoch=0.5, loss=1.0, lr=0.1, samples_per_second=0.04, step_seconds=50.0)
    figures |= dict(data_share=0.0, memory_bytes=0, seconds_left=0)
    assert "  50.0 s/step  " in metrics.train_line(figures, 2)


def test_a_run_without_final_weights_has_those_of_its_newest_checkpoint(tmp_path):
    for step in (3, 12):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        manifest_of = {"progress": {"step": step, "config": {"width": step}}, "arguments": {}}
        (folder / manifest.MANIFEST).write_text(json.dumps(manifest_of))
        save_file({"module.bias": torch.full((2,), float(step))}, folder / "model.safetensors")
    saved = weights.read(tmp_path)
    assert saved.state["bias"].tolist() == [12, 12] and saved.config == {"width": 12}
    assert saved.run == tmp_path


def test_only_paths_of_data_may_move():
    earlier, now = {"track": "/gone/a"}, {"track": "/elsewhere/a"}
    assert record.differences(earlier, now, ()) == ["--track /elsewhere/a (was /gone/a)"]
    assert not record.differences({"dataset": "/gone/a"}, {"dataset": "/elsewhere/a"}, ())
    assert not record.differences(earlier, now, {"track"})
