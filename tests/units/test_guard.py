"""What `utils.run.guard` reads from the device, compares and shows; how an evaluation ends.

tests/properties/test_guard_properties.py has when all processes stop and save. Here they are
threads, too.
"""

import math
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from harness.worlds import Process, run_guards

from utils.run import guard
from utils.run.failures import LostContact


def steps(count, loss=0.5, norm=None):
    """Trains for so many steps, with a loss (a number or a tensor)."""

    def train(watched, _rank):
        losses = [torch.as_tensor(loss)]
        return [
            watched.should_stop(step, losses, [torch.tensor([0])], norm)
            for step in range(1, count + 1)
        ]

    return train


def test_the_group_is_of_the_host_and_votes_in_the_background():
    world = run_guards(2, steps(9), timeout=77)
    assert world.results == [[False] * 9] * 2 and world.in_background == [True] * 18
    assert world.groups == [{"backend": "gloo", "timeout": timedelta(seconds=77)}] * 2
    assert run_guards(1, steps(9)).groups == []
    assert run_guards(2, lambda *_: guard.process.started).results == [True] * 2


def test_only_in_fp16_the_host_decides_about_a_step_whose_gradients_overflow():
    for scaler, on_device in ((None, True), ("fp16", False)):
        optimizer = SimpleNamespace(_step_supports_amp_scaling=True)
        wrapped = SimpleNamespace(optimizer=optimizer)
        run_guards(1, steps(1), scaler=scaler, optimizers=[wrapped])
        assert optimizer._step_supports_amp_scaling is on_device


# ------------------------------------------------------------------------------------ evaluations


class Clock(threading.local):
    """Each process's own clock, which moves by `step` seconds with each batch and sleep."""

    now, step, slept = 0.0, 0.25, ()  # the fixture `clock` sets a list

    def moves(self):
        self.now += self.step

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.moves()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(Clock, "step", 0.25)
    monkeypatch.setattr(Clock, "slept", [])
    clock = Clock()
    # Not in the module `time` itself: the thread of an earlier run in this process may sleep, too.
    stub = SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep)
    monkeypatch.setattr(guard, "time", stub)
    return clock


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_to_any_process_ends_an_evaluation_on_all_after_the_same_batch(size, clock):
    """They ask each other after the first batch, and of four batches a second after each fifth."""
    counts, stopping = {}, []

    def evaluate(watched, rank):
        try:
            for count, _ in enumerate(watched.watch(range(50)), 1):
                counts[rank] = count
                assert watched.moved_at == clock.now  # it makes progress with each batch
                clock.moves()
                guard.process.signaled |= count == 3 and rank == size - 1
        finally:
            stopping.append(guard.process.stopping)

    errors = run_guards(size, evaluate).results
    assert all(isinstance(error, Process.Interrupted) for error in errors), errors
    assert counts == dict.fromkeys(range(size), 6) and stopping == [True] * size
    Clock.step = 0.0  # an instant batch does not divide by zero
    assert run_guards(1, lambda watched, _: len(list(watched.watch(range(9))))).results == [9]


# ---------------------------------------------------------------------------------------- devices


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU. It notes how it is copied to the host."""

    device = torch.device("cuda", 1)
    copies = ()  # the fixture `gpu` sets a list

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in (torch.empty_like, torch.Tensor.copy_):
            OnGpu.copies.append((function.__name__, *sorted(kwargs.items())))
            kwargs.pop("pin_memory", None)
        return super().__torch_function__(function, types, args, kwargs)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose events are done when `.answers` says so: by default at once."""
    state = SimpleNamespace(answers=iter([True] * 99), recorded=[])

    class Event:
        def record(self, stream):
            state.recorded.append(stream)

        def query(self):
            return next(state.answers)

    monkeypatch.setattr(OnGpu, "copies", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    return state


def test_values_on_a_gpu_are_copied_while_it_computes_and_waited_for(gpu, clock):
    """Into pinned memory, and with an event of the stream that computes them."""
    gpu.answers = iter([False, False, True, True])
    loss = torch.tensor(0.5).as_subclass(OnGpu)
    assert run_guards(1, steps(3, loss)).results == [[False] * 3]
    assert gpu.recorded == ["stream of cuda:1"] * 3 and clock.slept == [0.0005] * 2
    memory = ("empty_like", ("device", "cpu"), ("pin_memory", True))
    assert OnGpu.copies == [memory, ("copy_", ("non_blocking", True))] * 3
    gpu.answers = iter([True])
    (error,) = run_guards(1, steps(3, torch.tensor(math.nan).as_subclass(OnGpu))).results
    assert "non-finite loss at step 1" in str(error)


def test_a_device_that_does_not_answer_is_lost_contact(gpu, clock):
    """In nine tenths of the time after which NCCL would end the process without a word."""
    gpu.answers, Clock.step = iter([False] * 99), 0.5
    errors = run_guards(2, steps(3, torch.tensor(0.5).as_subclass(OnGpu)), timeout=10).results
    assert all(isinstance(e, LostContact) and "to finish step 1" in str(e) for e in errors)
    assert clock.slept == [0.0005] * 2 * 19  # up to more than 9 s, on each of two processes
