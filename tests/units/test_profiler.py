"""Which steps are profiled, and what is written about them."""

import os
from types import SimpleNamespace

from harness import fakes

from utils.report import profiler

ALONE = fakes.accelerator()


class Profile:
    """Stands for `torch.profiler.profile`."""

    def start(self):
        self.started = True

    def export_chrome_trace(self, path):
        self.trace = path

    def key_averages(self):
        return SimpleNamespace(table=lambda **options: f"the table {options}")


def test_the_profiler_records_three_steps(tmp_path, monkeypatch):
    made, profile = [], Profile()

    def options(**options):
        made.append(options)
        return SimpleNamespace(build=lambda: profile)

    monkeypatch.setattr(profiler, "ProfileKwargs", options)
    assert profiler.start_profiler(ALONE, tmp_path, True) is profile and profile.started
    write = made[0].pop("on_trace_ready")
    assert made == [
        {"schedule_option": dict(wait=1, warmup=1, active=3, repeat=1), "record_shapes": True}
    ]
    for _ in range(2):  # the second run of the same command
        write(profile)
    assert profile.trace == str(tmp_path / "profile" / "trace.json")
    expected = f"the table {dict(sort_by='self_cpu_time_total', row_limit=30)}"
    assert (tmp_path / "profile" / "operators.txt").read_text() == expected


def test_without_a_profiler_its_calls_do_nothing(tmp_path):
    for accelerator, wanted in ((ALONE, False), (fakes.accelerator(2, rank=1), True)):
        profile = profiler.start_profiler(accelerator, tmp_path, wanted)
        assert profile.step() is None and profile.stop() is None
    assert os.listdir(tmp_path) == []
