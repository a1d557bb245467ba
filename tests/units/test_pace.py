"""Which process is slow: what is measured, and when a line names a process."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness.launches import GPT, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.run import pace as module
from utils.run.pace import Pace


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Layer(nn.Linear):
    """Its forward pass takes a second of the clock `now`."""

    now = 0.0

    def forward(self, x):
        Layer.now += 1.0
        return {"ids": torch.arange(2), "logits": [super().forward(x)]}


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: Layer.now))


def forward(model):
    return model(torch.ones(1, 2))["logits"][0].sum()


def test_own_time_is_that_of_batches_and_passes(alone, clock):
    pace, model = Pace(), DistributedDataParallel(Layer(2, 2))
    pace.watch(model)
    for waited in (0.25, 0.5):
        pace.waited(waited / 2)
        pace.waited(waited / 2)  # for the next micro-batch
        for _ in range(3):  # micro-batches
            forward(model).backward()
            with torch.no_grad():
                forward(model)
        Layer.now += 10.0
        forward(model)  # without a backward pass
        pace.end_step()
        if waited == 0.25:
            assert pace.microseconds() == 0  # its events may not have happened
    assert pace.microseconds() == 3_250_000
    assert pace.microseconds() == 0  # a save votes again after the same step
    pace.end_step()
    assert pace.microseconds() == 3_500_000
    pace.end_step()
    assert pace.microseconds() == 0


def test_on_a_gpu_times_are_those_between_events(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Layer.now += 1.0
            self.at = Layer.now

        def elapsed_time(self, end):
            return 1000 * (end.at - self.at)  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert module._seconds(module._event(), module._event()) == 1.0


def test_only_waits_for_batches_are_measured_elsewhere():
    pace, model = Pace(), nn.Linear(2, 2)
    pace.watch(model)
    pace.waited(2.0)
    model(torch.ones(1, 2)).sum().backward()
    pace.end_step()
    pace.end_step()
    assert pace.microseconds() == 2_000_000


def test_the_spread_is_that_of_all_steps_since_the_last_line():
    pace = Pace()
    assert pace.read() == {}
    for times in ([0, 0, 0], [10, 20, 30], [10, 40, 30]):
        pace.add(times)
    assert pace.read() == {"slowest_behind": 0.0}  # 20, 60 and 60
    assert pace.read() == {}
    pace.add([10, 15])
    assert pace.read() == {"slowest_behind": 0.5}  # of two processes, behind the faster one


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
    pace = Pace()
    for times in steps:
        pace.add(times)
    assert pace.read().get("slow_rank") == (2 if named else None)


def test_short_intervals_name_a_process_after_some_steps():
    pace, named = Pace(), []
    for _ in range(6):
        pace.add([10, 10, 12])
        named.append(pace.read().get("slow_rank"))
    assert named == [None] * 4 + [2, 2]


def test_a_slow_process_is_named_in_the_log_line(tmp_path):
    """The loader of rank 1 is late, and rank 0 waits for it in each backward pass."""
    arguments = (
        "--dataset synthetic --n_layer 1 --n_head 1 --n_embd 16 --block_size 16 --batch_size 4 "
        "--num_workers 0 --max_train_steps 8 --log_every 8 --eval_every 100"
    )
    done = run(
        "2cpu",
        "tests/harness/wrapped.py",
        ["slow_loader@0:1", GPT, *arguments.split()],
        output_dir=tmp_path,
    )
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (line,) = (json.loads(line) for line in lines if '"split": "train"' in line)
    assert line["slow_rank"] == 1 and line["slowest_behind"] > 0.5
    assert f"left 0:00:00  rank 1 is {line['slowest_behind']:.0%} slower\n" in done.stdout
