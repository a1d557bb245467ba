"""Where every process is, and which one is slow or differs: watched, and asked for by files.

promises/test_hangs.py starts commands.
"""

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from harness.fakes import accelerator
from harness.worlds import group_of_one, run_guards
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.scale import watchdog
from utils.scale.watchdog import Passes, Watchdog, describe, main_thread


def test_one_line_says_which_processes_are_where():
    states = {}
    for rank, does, step, seconds in (
        (3, "waits in all_reduce, train (train_gpt.py:1)", 3, 3),
        (0, "waits in all_reduce, train (train_gpt.py:1)", 3, 0),
        (2, "is in load (data.py:7)", 4, 40),
        (4, "is in load (data.py:7)", 4, 40),
    ):
        states[rank] = {"does": does, "last_step": step, "seconds_without_progress": seconds}
    assert describe(states, 5) == (
        "ranks 0, 3 wait in all_reduce, train (train_gpt.py:1) after step 3, 3 s without "
        "progress; ranks 2, 4 are in load (data.py:7) after step 4, 40 s without progress; "
        "rank 1 did not answer: stopped, or lost"
    )


@pytest.mark.parametrize(
    ("file", "function", "does"),
    [
        ("torch/distributed_c10d", "all_reduce", "waits in all_reduce,"),
        ("torch/graph", "backward", "is in the backward pass,"),
        ("mine/graph", "draw", "is in"),
    ],
)
def test_what_the_main_thread_does(file, function, does):
    """Seen from another thread: the innermost function that is not of a library."""
    names = {}
    exec(compile(f"def {function}(inside): return inside()", f"/x/{file}.py", "exec"), names)
    with ThreadPoolExecutor(1) as pool:

        def here():
            return pool.submit(main_thread).result()

        assert re.fullmatch(rf"{does} here \(test_watchdog.py:\d+\)", names[function](here))


def run_in(path):
    """A run in a folder."""
    meter = SimpleNamespace(waited_seconds=0.0)
    return SimpleNamespace(path=path, results=None, save_asked=False, hang="", meter=meter)


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """`watch(rank, seconds)`: the watchdog of one of two processes, which did nothing for 100 s.

    It asks after so many seconds. Its thread does not start: tests call `look`.
    """
    thread = SimpleNamespace(start=lambda: None)
    without = SimpleNamespace(main_thread=threading.main_thread, Thread=lambda **_: thread)
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 20.0)
    monkeypatch.setattr(watchdog, "threading", without)

    def make(rank, seconds=500, path=tmp_path, processes=2):
        guard = SimpleNamespace(step=7, agreed=6, moved_at=watchdog.time.monotonic() - 100)
        guard.attach, run = lambda voter: None, run_in(path)
        dog = Watchdog(run, guard, accelerator(processes, rank), nn.Linear(1, 1), 2 * seconds)
        dog.test = SimpleNamespace(run=run, guard=guard)
        return dog

    return make


def test_a_process_without_progress_asks_all_and_once(watch, tmp_path, monkeypatch, capsys):
    watch(0).look()
    assert list(tmp_path.iterdir()) == []  # it has not waited for long enough
    dogs = [watch(0, 50), watch(1)]
    threads = [threading.Thread(target=dog.look) for dog in dogs]
    threads[0].start()
    while not dogs[0].request.is_symlink():
        threads[0].join(0.01)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    line, where = capsys.readouterr().err.splitlines()
    assert re.match(r"no progress for 10\d s: ranks? 0.* 1 (is|are) in .* after step 7", line), line
    assert where == f"all stacks: {tmp_path}/stacks"
    assert all(dog.test.run.hang.startswith(line.partition(":")[0]) for dog in dogs)
    dogs[1].votes()  # after another step
    assert dogs[1].test.run.hang == ""
    for rank in (0, 1):
        head, _, rest = (tmp_path / "stacks" / f"rank_{rank}.txt").read_text().partition("\n")
        wrote = json.loads(head)
        assert (wrote["last_step"], wrote["last_step_agreed"]) == (7, 6)
        assert wrote["seconds_without_progress"] in range(100, 110)
        assert "test_watchdog.py" in rest
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.05)
    for moved, says in ((0, None), (45, "no progress for 5"), (45, None)):
        dogs[0].test.guard.moved_at += moved  # a step, then nothing for 55 s; and one 10 s ago
        dogs[0].look()
        said = capsys.readouterr().err
        assert said.startswith(says) if says else said == ""
    assert not os.path.lexists(tmp_path / "dump_stacks")


def test_a_process_that_does_not_answer_is_named(watch, tmp_path, monkeypatch, capsys):
    """Folders are listed first: NFS may not know for a minute what another machine made."""
    listed = []
    # The thread of an earlier run in this process may list its folder, too.
    ours = [tmp_path, tmp_path / "stacks"]
    look = lambda folder: listed.append(folder) if folder in ours else None  # noqa: E731
    monkeypatch.setattr(os, "listdir", look)
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.05)
    (tmp_path / "dump_stacks").touch()
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank_0.txt").write_text("half a line")  # of a crash
    dog = watch(1)
    dog.look()
    assert listed == ours
    said = capsys.readouterr().err
    assert said.startswith("asked by the file dump_stacks: rank 1 is in ")
    assert "rank 0 did not answer: stopped, or lost" in said
    assert not os.path.lexists(tmp_path / "dump_stacks")
    dog.look()  # nothing to do
    assert capsys.readouterr().err == "" and listed[2:] == [tmp_path]


# ------------------------------------------------------------------------------------- who differs


def test_processes_with_different_weights_are_told(tmp_path, monkeypatch, capsys):
    def train(changes):
        def each(watched, rank):
            model = nn.Linear(2, 2).to(torch.bfloat16)
            run = run_in(tmp_path)
            run.results = {}  # its thread ends at once
            Watchdog(run, watched, accelerator(2, rank), model, 600)
            for change in changes:
                for weight in model.parameters():
                    weight.data.fill_(1.0).add_(rank * change)
                watched.should_stop(1, [torch.tensor(1.0)], [torch.arange(2)])
                watched.check(model)

        assert run_guards(2, each).results == [None] * 2
        return capsys.readouterr().err.count("the processes have different weights")

    last_bit = torch.finfo(torch.bfloat16).eps
    monkeypatch.setattr(watchdog, "DistributedDataParallel", nn.Linear)
    assert train([0]) == 0 and train([0, last_bit, 0]) == 1
    monkeypatch.setattr(watchdog, "DistributedDataParallel", nn.Conv2d)
    assert train([last_bit]) == 0  # parts of a model differ


# ----------------------------------------------------------------------------------- who is slow


class Layer(nn.Linear):
    """Its forward pass takes a second of the clock."""

    now = 0.0

    def forward(self, x):
        Layer.now += 1.0
        return {"ids": torch.arange(2), "logits": [super().forward(x)]}


class Event:
    """Stands for an event of a GPU, which tells milliseconds."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Layer.now

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_own_time_is_that_of_passes(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    if device == "cpu":
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(perf_counter=lambda: Layer.now))

    def forward():
        return model(torch.ones(1, 2))["logits"][0].sum()

    with group_of_one():
        model = DistributedDataParallel(Layer(2, 2))
        there = SimpleNamespace(device=torch.device(device))
        monkeypatch.setattr(model, "parameters", lambda: iter([there]))
        passes, seconds = Passes(model), []
        for micro_batches in (3, 2):
            for _ in range(micro_batches):
                forward().backward()
                with torch.no_grad():
                    forward()
            Layer.now += 10.0
            forward()  # without a backward pass
            seconds.append(passes.seconds())  # the events of a step may not have happened
    assert [*seconds, passes.seconds(), passes.seconds()] == [0, 3.0, 2.0, 0]
    model = nn.Linear(2, 2)  # there only waits for batches are measured
    passes = Passes(model)
    model(torch.ones(1, 2)).sum().backward()
    assert [passes.seconds(), passes.seconds()] == [0, 0]


def test_a_vote_has_the_time_of_batches_and_of_passes(watch, monkeypatch):
    monkeypatch.setattr(Passes, "seconds", lambda _: 0.25)
    dog = watch(1)
    dog.test.run.meter.waited_seconds = 0.5
    assert [dog.votes(), dog.votes()] == [[0, 0, 750_000], [0, 0, 250_000]]


@pytest.mark.parametrize(
    ("steps", "figures"),
    [
        ([], {"slowest_behind": 0.0}),
        ([(20, 10, 10), (0, 0, 0), (0, 30, 10)], {"slowest_behind": 0.2}),  # 20, 40 and 20
        ([(10, 10, 20)] * 5, {"slowest_behind": 0.5, "slow_rank": 2}),
        ([(10, 10, 20)] * 4, {"slowest_behind": 0.4}),  # too few
        ([(10, 10, 12)] * 5, {"slowest_behind": 0.1}),  # not more than 10 % of the time
        ([(90, 10, 10)] + [(10, 10, 20)] * 5, {"slowest_behind": 0.3}),  # in all: another one
    ],
)
def test_a_process_that_all_others_wait_for_is_named(steps, figures, watch, monkeypatch):
    """Each votes how long it took for a step: here, it waited for its batches."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock.now))
    dogs = [watch(rank, processes=3) for rank in range(3)]
    for waits in steps:
        votes = []
        for dog, wait in zip(dogs, waits, strict=True):
            dog.test.run.meter.waited_seconds += wait
            votes.append(dog.votes())
        summed = [sum(column) for column in zip(*votes, strict=True)]
        assert summed == [0, *(1e6 * wait for wait in waits)]
        for dog in dogs:
            dog.hear(summed)
    for expected in (figures, {"slowest_behind": 0.0}):  # since the last line
        clock.now += 100
        assert [dog.figures() for dog in dogs] == [pytest.approx(expected)] * 3
    assert watch(0, processes=1).figures() == {}
