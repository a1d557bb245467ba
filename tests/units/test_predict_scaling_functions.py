"""The formulas of predict_scaling.py for cases with known results, and its advice."""

from types import SimpleNamespace

import pytest
from harness.launches import load_script

script = load_script("predict_scaling")
Link, step_seconds = script.Link, script.step_seconds


@pytest.mark.parametrize("processes", [2, 3, 8, 64])
def test_the_fitted_link_predicts_what_it_was_fitted_to(processes):
    link, rows = Link(2e-5, 3e9), []
    for size in (4, 2**30):
        seconds = script.all_reduce_seconds(processes, size, link)
        bandwidth = size / seconds * 2 * (processes - 1) / processes
        rows.append({"seconds": seconds, "bus_bandwidth": bandwidth})
    assert script.fit_link(rows, processes) == pytest.approx(link, rel=0.02)


def test_hidden_communication_takes_no_time():
    fast, slow = Link(0.0, 1e15), Link(0.0, 1e8)
    assert step_seconds(8, 1.0, 10**8, fast) == pytest.approx(1.0)
    # The first bucket is sent before the second is computed; from then on the link is never idle.
    made = 1 / 3 + 2 / 3 * 26 * 2**20 / 10**8
    rest = (10**8 - 2**20) * 2 * 7 / 8 / 1e8
    assert step_seconds(8, 1.0, 10**8, slow) == pytest.approx(made + rest, rel=1e-6)


def test_says_how_far_ddp_scales_and_whether_its_memory_is_enough():
    args = SimpleNamespace(parameters=2 * 2**30, memory_gib=40.01 / script.ROOM)
    few = dict(processes=8, weak_efficiency=0.8, strong_efficiency=0.125)
    many = dict(processes=4096, weak_efficiency=0.4, strong_efficiency=0.125)
    weak, strong, memory = script.summarize(args, [few, many]).splitlines()
    assert "up to 8 processes. Beyond that, use a larger batch per process" in weak
    assert "for fewer than 8 processes only. Beyond that, use a larger global batch" in strong
    assert memory.endswith("states take 40.0 of 57.1571 GiB: no need for FSDP.")
    args.memory_gib = 39.99 / script.ROOM
    assert script.summarize(args, [few]).endswith("use FSDP (accelerate_configs/4gpu_fsdp.yaml).")
