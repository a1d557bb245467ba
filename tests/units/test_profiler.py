"""Which steps are profiled, and what is written about them."""

import torch
from harness import fakes

from utils.report import profiler


def test_the_profiler_records_three_steps_on_one_process(tmp_path):
    for accelerator, wanted in (
        (fakes.accelerator(), False),
        (fakes.accelerator(2, rank=1), True),
        (fakes.accelerator(), True),
        (fakes.accelerator(), True),  # the second run of the same command
    ):
        profile = profiler.start_profiler(accelerator, tmp_path, wanted)
        for _ in range(12):
            torch.ones(2, 3) @ torch.ones(3, 5)
            profile.step()
        profile.stop()
        assert (wanted and accelerator.is_main_process) == bool(list(tmp_path.iterdir()))
    trace = (tmp_path / "profile" / "trace.json").read_text()
    steps = {f"ProfilerStep#{step}" for step in range(9) if f'"ProfilerStep#{step}"' in trace}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"}
    assert "[2, 3], [3, 5]" in trace.replace("\n", "")  # the shapes
    table = (tmp_path / "profile" / "operators.txt").read_text()
    assert "Self CPU" in table and "aten::mm" in table
