"""Which process is slow: what is measured, and when one is named. (promises/test_hangs.py has the
line of the log.)
"""

from types import SimpleNamespace

import pytest
import torch
from harness.worlds import group_of_one
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.scale import pace as module
from utils.scale.pace import Pace


class Clock:
    now = 0.0


class Layer(nn.Linear):
    """Its forward pass takes a second of the clock."""

    def forward(self, x):
        Clock.now += 1.0
        return {"ids": torch.arange(2), "logits": [super().forward(x)]}


class Event:
    """Stands for an event of a GPU, which tells milliseconds."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Clock.now

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_own_time_is_that_of_batches_and_passes(device, monkeypatch):
    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "Event", Event)
    else:
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: Clock.now))

    def forward():
        return model(torch.ones(1, 2))["logits"][0].sum()

    with group_of_one():
        model = DistributedDataParallel(Layer(2, 2))
        if device == "cuda":
            there = SimpleNamespace(device=torch.device(device))
            model.parameters = lambda: iter([there])
        pace = Pace(model)
        for waited in (0.25, 0.5):
            for _ in range(3):  # micro-batches
                forward().backward()
                with torch.no_grad():
                    forward()
            Clock.now += 10.0
            forward()  # without a backward pass
            pace.end_step(waited)
            if waited == 0.25:
                assert pace.microseconds() == 0  # its events may not have happened
    assert pace.microseconds() == 3_250_000
    assert pace.microseconds() == 0  # a save votes again after the same step
    pace.end_step(0.0)
    assert pace.microseconds() == 3_500_000
    pace.end_step(0.0)
    assert pace.microseconds() == 0
    model = nn.Linear(2, 2)  # there only waits for batches are measured
    pace = Pace(model)
    model(torch.ones(1, 2)).sum().backward()
    for waited in (2.0, 0.0):
        pace.end_step(waited)
    assert pace.microseconds() == 2_000_000


def test_the_spread_is_that_of_all_steps_since_the_last_line():
    pace = Pace(nn.Linear(1, 1))
    assert pace.read() == {}
    for times in ([0, 0, 0], [10, 20, 30], [10, 40, 30]):
        pace.add(times)
    assert pace.read() == {"slowest_behind": 0.0}  # 20, 60 and 60
    assert pace.read() == {}
    pace.add([10, 15])
    assert pace.read() == {"slowest_behind": 0.5}  # of two processes, behind the faster one
    pace, named = Pace(nn.Linear(1, 1)), []
    for _ in range(6):  # short intervals name a process after some steps
        pace.add([10, 10, 12])
        named.append(pace.read().get("slow_rank"))
    assert named == [None] * 4 + [2, 2]


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([[10, 10, 12]] * 5, True),
        ([[10, 10, 12]] * 4, False),  # too few
        ([[100, 100, 109]] * 9, False),  # not more than 10 %
        ([[10, 10, 12]] * 7 + [[10, 10, 10]], False),
        ([[10, 10, 12]] * 7 + [[12, 10, 10]], False),
        ([[12, 10, 10]] + [[10, 10, 12]] * 7, False),
        ([[10, 10, 12]] * 3 + [[10, 10, 10]] + [[10, 10, 12]] * 6, False),
        ([[10, 10, 99], [0, 0, 0]] * 5, True),
    ],
)
def test_a_process_that_is_the_slowest_in_every_step_is_named(steps, named):
    pace = Pace(nn.Linear(1, 1))
    for times in steps:
        pace.add(times)
    assert pace.read().get("slow_rank") == (2 if named else None)
