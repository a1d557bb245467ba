"""All processes stop after the same step: here threads, whose collectives are exchanges of values."""

# ruff: noqa: F811 (fixtures of other files)
import contextlib
import math
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from test_batches import mesh  # noqa: F401 (a fixture)
from test_collectives import World
from torch import nn
from torch.distributed.tensor import DTensor

from utils.run import guard
from utils.run.failures import LostContact, RunFailed
from utils.run.guard import Guard


class Reducing(World):
    """A World that can also reduce, at once or in the background."""

    ReduceOp = SimpleNamespace(MAX="max")

    def __init__(self, size):
        super().__init__(size)
        self.in_background = []

    def get_world_size(self):
        return self.size

    def all_reduce(self, tensor, op, group, async_op=False):
        self.in_background.append(async_op)
        assert op == "max" and group == "the host group" and tensor.dtype == torch.int64

        def wait():
            values = [None] * self.size
            self.all_gather_object(values, tensor.clone(), group)
            tensor.copy_(torch.stack(values).max(0).values)

        if not async_op:
            wait()
            return None
        return SimpleNamespace(wait=wait)


class Process:
    """Stands for `utils.run.process`: each thread has signals of its own."""

    class Interrupted(Exception):
        pass

    def __init__(self):
        self.started, self.stopping = [], []
        self._signals, self._lock = {}, threading.Lock()

    def training_starts(self):
        self.started.append(threading.get_ident())

    def stopping_starts(self):
        self.stopping.append(threading.get_ident())

    def waiting_for(self, what):
        assert what == "the other processes"
        return contextlib.nullcontext()

    def signal(self):
        self._signals[threading.get_ident()] = "SIGTERM"

    def signal_name(self):
        return self._signals.get(threading.get_ident())

    def wait_for_each(self, batches, what):
        assert what == "a batch"
        return iter(batches)


@pytest.fixture
def processes(monkeypatch):
    """`run(size, function)` calls `function(guard, rank, process)` on each of so many processes."""
    process = Process()
    monkeypatch.setattr(guard, "process", process)

    def run(size, function, timeout=600, scaler=None):
        world = Reducing(size)
        process._signals.clear()  # the number of a thread is used again
        monkeypatch.setattr(guard, "dist", world)

        def each(accelerator):
            accelerator.scaler = scaler
            return function(Guard(accelerator, timeout), accelerator.process_index, process)

        results = world.run(each)
        run.groups, run.world = world.groups, world
        return results

    run.process = process
    return run


def ids_of(step, rank=0):
    return [torch.tensor([100 * step + 10 * rank, 100 * step + 10 * rank + 1])]


def walk(losses, signal_at=None, norms=(), signaled=0):
    """Returns a function that trains with these losses; it returns the step after which it stops."""

    def train(watched, rank, process):
        for step, loss in enumerate(losses, 1):
            if step == signal_at and rank == signaled:
                process.signal()
            norm = torch.tensor(norms[step - 1]) if norms else None
            loss = loss if isinstance(loss, list) else [loss]
            if watched.should_stop(step, [torch.tensor(x) for x in loss], ids_of(step, rank), norm):
                return step
        return None

    return train


@pytest.mark.parametrize(("size", "delay"), [(1, 0), (2, 1), (3, 1)])
def test_a_signal_to_any_process_stops_all_after_the_same_step(size, delay, processes):
    last = size - 1
    assert processes(size, walk([0.5] * 9, signal_at=4, signaled=last)) == [4 + delay] * size
    assert len(processes.process.stopping) == size == len(processes.process.started)
    assert processes(size, walk([0.5] * 9)) == [None] * size
    assert len(processes.process.stopping) == size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_save_after_the_same_step_if_one_is_asked(size, processes, monkeypatch):
    monkeypatch.setattr(guard.place, "save_asked", False)

    def train(watched, rank, process):
        saved = []
        for step in range(1, 9):
            if rank == 0 and step == 3:
                guard.place.save_asked = True
            watched.should_stop(step, [torch.tensor(0.5)], ids_of(step, rank))
            saved += [step] * watched.save_asked
        return saved

    first, *others = processes(size, train)
    assert len(first) == 1 and 3 <= first[0] <= 5 and others == [first] * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_who_asks_while_a_save_begins_gets_that_one_only(size, processes, monkeypatch):
    monkeypatch.setattr(guard.place, "save_asked", False)
    together = threading.Barrier(size)

    def train(watched, rank, process):
        watched.should_stop(1, [torch.tensor(0.5)], ids_of(1, rank))
        together.wait()  # all have voted
        if rank == 0:
            guard.place.save_asked = True
        together.wait()
        watched.check(torch.nn.Linear(1, 1))
        asked = []
        for step in (2, 3):
            watched.should_stop(step, [torch.tensor(0.5)], ids_of(step, rank))
            asked.append(watched.save_asked)
        return asked

    assert processes(size, train) == [[False, False]] * size


def test_the_group_is_of_the_host_and_waits_as_long_as_asked(processes):
    processes(2, walk([0.5]), timeout=77)
    assert processes.groups == [{"backend": "gloo", "timeout": timedelta(seconds=77)}] * 2
    processes(1, walk([0.5]))
    assert processes.groups == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("size", "noticed"), [(1, 4), (2, 5)])
def test_a_loss_that_is_not_finite_names_its_step_and_samples(size, noticed, bad, processes):
    losses = [0.5, 0.5, bad, 0.5, 0.5, 0.5]
    seen = []

    def train(watched, rank, process):
        for step, loss in enumerate(losses, 1):
            seen.append(step)
            watched.should_stop(step, [torch.tensor(loss)], ids_of(step, rank))

    errors = processes(size, train)
    assert max(seen) == noticed and all(isinstance(error, RunFailed) for error in errors)
    samples = [300, 301] if size == 1 else [300, 301, 310, 311]
    assert "non-finite loss at step 3; no checkpoint includes it" in str(errors[0])
    assert str(errors[0]).endswith(f"Samples of that step: {samples}")
    assert not errors[0].retry and len({str(error) for error in errors}) == 1


@pytest.mark.parametrize(("count", "more"), [(20, ""), (21, "[20]"), (1500, None)])
def test_of_many_samples_the_first_are_shown(count, more, processes):
    def train(watched, rank, process):
        for step in (1, 2, 3):
            watched.should_stop(step, [torch.tensor(math.nan)], [torch.arange(count).flip(0)])

    (error,) = processes(1, train)
    line, shown = str(error), str(list(range(20)))
    if count == 20:
        assert line.endswith(f"Samples of that step: {shown}") and error.more == ""
    else:
        says = f"{shown} and {count - 20:,} more, listed in status.json"
        assert line.endswith(f"Samples of that step: {says}")
        assert error.more == f": {more or list(range(20, count))}"


def test_every_micro_batch_counts(processes):
    """The sum of the losses is not finite if one of them is not."""
    for losses in (
        [[1.0, math.nan], [1.0, 1.0]],
        [[math.nan, 1.0], [1.0, 1.0]],
        [[1.0, 1.0, math.inf], [1.0]],
    ):
        (error,) = processes(1, walk(losses))
        assert "non-finite loss at step 1" in str(error)
    assert processes(1, walk([[1.0, 2.0], [3.0]])) == [None]


def test_a_gradient_norm_counts_unless_the_scaler_skips_its_step(processes):
    norms = [1.0, math.inf, 1.0, 1.0]
    (error,) = processes(1, walk([0.5] * 4, norms=norms))
    assert "non-finite gradient norm at step 2" in str(error)
    assert "Samples of that step: [200, 201]" in str(error)
    assert processes(1, walk([0.5] * 4, norms=norms), scaler="fp16") == [None]


def test_the_norm_of_shards(mesh, processes):
    norm = DTensor.from_local(torch.tensor(math.inf), mesh)

    def train(watched, rank, process):
        for step in (1, 2):
            watched.should_stop(step, [torch.tensor(0.5)], ids_of(step), norm)

    (error,) = processes(1, train)
    assert "non-finite gradient norm at step 1" in str(error)


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_that_diverged_is_saved(size, processes):
    """`check` looks at the newest loss, and at the weights."""

    def saves(watched, rank, process, loss=0.5, weight=1.0):
        model = nn.Linear(1, 2)
        watched.check(model)  # before the first step
        watched.should_stop(1, [torch.tensor(0.5)], ids_of(1))
        watched.should_stop(2, [torch.tensor(loss)], ids_of(2))
        with torch.no_grad():
            model.bias[1] = weight if rank == size - 1 else 1.0
        watched.check(model)
        return "saved"

    assert processes(size, saves) == ["saved"] * size
    for error in processes(size, lambda *a: saves(*a, loss=math.nan)):
        assert "non-finite loss at step 2" in str(error)
    for error in processes(size, lambda *a: saves(*a, weight=math.inf)):
        assert "non-finite weights after step 2" in str(error)


@pytest.mark.parametrize("size", [1, 2])
def test_a_check_waits_for_the_votes_on_the_step_before(size, processes):
    def saves(watched, rank, process):
        watched.should_stop(1, [torch.tensor(math.nan)], ids_of(1, rank))
        if size > 1:
            watched.should_stop(2, [torch.tensor(0.5)], ids_of(2, rank))
        watched.check(nn.Linear(1, 1))

    for error in processes(size, saves):
        assert "non-finite loss at step 1" in str(error)


def test_votes_are_exchanged_in_the_background(processes):
    processes(2, walk([0.5] * 9))
    assert processes.world.in_background == [True] * 18


def test_few_steps_are_remembered(processes):
    def train(watched, rank, process):
        for step in range(1, 10):
            watched.should_stop(step, [torch.tensor(0.5)], ids_of(step))
        return [step for step, *_ in watched._recent]

    assert processes(1, train) == [[6, 7, 8, 9]]


def test_the_parts_of_a_model_may_be_on_several_devices(monkeypatch):
    model, moved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    real_to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, d: moved.append(d) or real_to(x, d))
    guard.checksum(model)
    assert moved == [torch.device("cpu")] * 4  # the sum of each part is moved to the first


@pytest.mark.parametrize(
    ("integers", "dtype"),
    [
        (torch.int8, torch.float8_e4m3fn),
        (torch.int16, torch.bfloat16),
        (torch.int32, torch.float32),
        (torch.int64, torch.float64),
    ],
)
def test_the_checksum_of_a_single_parameter_is_the_sum_of_its_bits(integers, dtype):
    weight = torch.tensor([3, 5], dtype=integers).view(dtype)
    model = nn.ParameterList([nn.Parameter(weight, requires_grad=False)])
    assert guard.checksum(model) == 8


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("signal_at", [1, 2, 3, 4])
@pytest.mark.parametrize("save_every", [1, 2])
def test_a_check_does_not_swallow_a_signal(size, signal_at, save_every, processes):
    """It exchanges votes, too: those of a signal during the step in which it saves."""

    def train(watched, rank, process):
        for step in range(1, 20):
            if step == signal_at and rank == size - 1:
                process.signal()
            stop = watched.should_stop(step, [torch.tensor(0.5)], ids_of(step))
            assert stop == (threading.get_ident() in process.stopping)  # not before it stops
            if stop or step % save_every == 0:
                watched.check(nn.Linear(1, 1))
            if stop:
                return step

    expected = signal_at if size == 1 else signal_at + 1
    assert processes(size, train) == [expected] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_processes_with_different_weights_are_told_once(dtype, processes, monkeypatch, capsys):
    monkeypatch.setattr(guard, "DistributedDataParallel", nn.Linear)

    ranks, tellers = {}, []
    real_notice = guard.notice

    def notice(line):
        tellers.append(ranks[threading.get_ident()])
        real_notice(line)

    monkeypatch.setattr(guard, "notice", notice)

    def train(watched, rank, process):
        ranks[threading.get_ident()] = rank
        model, last_bit = nn.Linear(2, 2).to(dtype), torch.finfo(dtype).eps
        for change in (0, rank * last_bit, rank * last_bit):
            for weight in model.parameters():
                weight.data.fill_(1.0).add_(change)
            watched.should_stop(1, [torch.tensor(1.0)], ids_of(1))
            watched.check(model)
            said.append((rank, bool(change), bool(watched._told)))

    said = []
    processes(2, train)
    assert (1, True, True) in said and (0, False, False) in said
    assert capsys.readouterr().err.count("the processes have different weights") == 1
    assert tellers == [0]
    monkeypatch.setattr(guard, "DistributedDataParallel", nn.Conv2d)
    processes(2, train)  # parts of a model differ
    assert "different" not in capsys.readouterr().err


def test_a_signal_between_two_steps_is_not_lost_by_a_check(processes):
    def train(watched, rank, process):
        watched.should_stop(1, [torch.tensor(0.5)], ids_of(1))
        watched.check(nn.Linear(1, 1))
        process.signal()
        return [watched.should_stop(step, [torch.tensor(0.5)], ids_of(step)) for step in (2, 3)]

    assert processes(1, train) == [[True, True]]
    assert processes(2, train) == [[False, True]] * 2


def test_weights_on_several_kinds_of_tensors(mesh):
    model = nn.Module()
    model.whole = nn.Parameter(torch.ones(2))
    model.shards = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh))
    model.register_buffer("count", torch.tensor(3))
    assert guard.all_finite(model) is True
    model.register_buffer("bad", torch.tensor([1.0, math.nan]))
    assert guard.all_finite(model) is False
    model.bad[1] = 1
    with torch.no_grad():
        model.shards.to_local().fill_(math.inf)
    assert guard.all_finite(model) is False


# ------------------------------------------------------------------------------------- evaluations


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by `.step` seconds with each batch."""
    state = SimpleNamespace(now=0.0, step=0.25)
    monkeypatch.setattr(guard.time, "monotonic", lambda: state.now)
    return state


def evaluate(watched, batches, clock, asked=None):
    """Consumes the batches under `watch`; their number."""
    count = 0
    for _ in watched.watch(batches):
        count += 1
        clock.now += clock.step
    return count


def test_an_evaluation_asks_after_the_first_batch_and_then_once_a_second(processes, clock):
    asked = []

    def run(watched, rank, process):
        process.signal_name = lambda: asked.append(clock.now) or None
        return evaluate(watched, range(20), clock)

    assert processes(1, run) == [20]
    # 4 batches a second: after each fifth of them, so at most once a second.
    assert asked == [0.25, 1.5, 2.75, 4.0]
    asked.clear()
    clock.now, clock.step = 0.0, 3.0  # slow batches: after each
    processes(1, run)
    assert asked == [3.0 * (count + 1) for count in range(20)]


def test_an_instant_batch_does_not_divide_by_zero(processes, clock):
    clock.step = 0.0
    assert processes(1, lambda watched, *_: evaluate(watched, range(5), clock)) == [5]


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_to_any_process_ends_an_evaluation_on_all_after_the_same_batch(
    size, processes, monkeypatch
):
    monkeypatch.setattr(guard.time, "monotonic", lambda: float(len(ticks)))
    ticks, counts = [], {}

    def run(watched, rank, process):
        for count, _ in enumerate(watched.watch(range(50)), 1):
            counts[rank] = count
            ticks.append(count)
            if count == 3 and rank == size - 1:
                process.signal()

    errors = processes(size, run)
    assert all(isinstance(error, Process.Interrupted) for error in errors), errors
    assert len(set(counts.values())) == 1 and 3 <= counts[0] <= 5
    assert len(processes.process.stopping) == size


# -------------------------------------------------------------------------------------------- devices


def test_a_device_that_does_not_answer_is_lost_contact(processes, clock, monkeypatch):
    """In nine tenths of the time after which NCCL would end the process without a word."""
    event, slept = SimpleNamespace(query=lambda: False), []

    def sleep(seconds):
        slept.append(seconds)
        clock.now += 1

    monkeypatch.setattr(guard.time, "sleep", sleep)
    monkeypatch.setattr(guard, "_to_host", lambda values: (values, event))

    def train(watched, rank, process):
        for step in (1, 2, 3):
            watched.should_stop(step, [torch.tensor(0.5)], ids_of(step))

    errors = processes(2, train, timeout=10)
    assert all(isinstance(e, LostContact) and "to finish step 1" in str(e) for e in errors)
    assert slept[0] == 0.0005 and 10 <= len(slept) <= 20


def test_a_device_that_finishes_late_is_waited_for(processes, monkeypatch):
    answers, slept = iter([False, False, True] + [True] * 9), []
    event = SimpleNamespace(query=lambda: next(answers))
    monkeypatch.setattr(guard.time, "sleep", slept.append)
    monkeypatch.setattr(guard, "_to_host", lambda values: (values, event))
    assert processes(1, walk([0.5] * 3)) == [None] and slept == [0.0005] * 2


def test_values_on_a_gpu_are_copied_while_it_computes(monkeypatch):
    """Into pinned memory, and with an event of the stream that computes them."""
    calls = []

    class Event:
        def record(self, stream):
            calls.append(("record", stream))

    class Copy:
        def copy_(self, values, non_blocking):
            calls.append(("copy", values, non_blocking))
            return self

    def empty_like(values, device, pin_memory):
        calls.append(("empty", values, device, pin_memory))
        return Copy()

    values = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    copy, event = guard._to_host(values)
    assert isinstance(copy, Copy) and isinstance(event, Event)
    assert calls == [
        ("empty", values, "cpu", True),
        ("copy", values, True),
        ("record", "stream of cuda:1"),
    ]


def test_values_on_the_host_are_read_as_they_are():
    values = torch.tensor([1.0, 2.0])
    copy, event = guard._to_host(values)
    assert copy is values and event is None
