"""Which process is slow: how long each computes in a step before it waits for the others."""

import statistics
import time
from collections import deque

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

BEHIND = 0.1  # part of the median by which a process must be slower to be named
STEPS = 5  # in a row, in which it must have been the slowest


class Pace:
    """Compares the time that each process takes for its batches, forward and backward passes.

    DDP makes every process wait for the slowest one at the end of the backward pass, so that all
    steps take the same time. What a process does before that is its own time. In a sharded model
    each layer waits: there, only the wait for batches is measured.

    On a GPU these times are those of its kernels, between CUDA events, which nothing waits for.
    """

    def __init__(self, model):
        """Args: model: as `prepare` returned it."""
        self._spans, self._laps = [], deque(maxlen=2)
        self._sums, self._steps = [], 0
        self._slowest, self._in_a_row = None, 0
        if isinstance(model, DistributedDataParallel):
            on_gpu = next(model.parameters()).device.type == "cuda"
            self._now = _event if on_gpu else time.perf_counter
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._follow)

    def end_step(self, waited):
        """Call it after each optimizer step; `waited`: seconds of waiting for batches in it."""
        self._laps.append((waited, self._spans))
        self._spans = []

    def microseconds(self):
        """The own time of this process in the step before the last one (int); 0: unknown, or told.

        The events of that step have happened.
        """
        if len(self._laps) < 2:
            return 0
        waited, spans = self._laps.popleft()
        return round(1e6 * (waited + sum(_seconds(*span) for span in spans)))

    def add(self, times):
        """Adds the own times of all processes in one step.

        Args: times (list): by rank; all 0: unknown.
        """
        if not any(times):
            return
        self._sums = [a + b for a, b in zip(self._sums or [0] * len(times), times, strict=True)]
        self._steps += 1
        behind, slowest = _compare(times)
        self._in_a_row = self._in_a_row + 1 if slowest == self._slowest else 1
        if behind <= BEHIND:
            slowest, self._in_a_row = None, 0
        self._slowest = slowest

    def read(self):
        """What was measured since the last call.

        Returns:
            dict: `slowest_behind`, the part of the median by which the slowest process was slower;
            `slow_rank`, only if this was the same process in all these steps, by more than `BEHIND`
            in each. Empty: nothing was measured.
        """
        sums, steps, self._sums, self._steps = self._sums, self._steps, [], 0
        if not sums:
            return {}
        figures = {"slowest_behind": _compare(sums)[0]}
        if self._in_a_row >= max(steps, STEPS):
            figures["slow_rank"] = self._slowest
        return figures

    def _begin(self, *_):
        self._start = self._now()

    def _follow(self, module, _, output):
        tensors = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
        tensor = next((tensor for tensor in tensors if tensor.requires_grad), None)
        if tensor is not None:
            start = self._start

            def end():
                self._spans.append((start, self._now()))

            # What is queued when the backward pass begins runs at its end, before DDP's wait.
            tensor.register_hook(lambda _: Variable._execution_engine.queue_callback(end))


def _compare(times):
    """By which part of the median the slowest is slower, and its rank."""
    slowest = max(times)
    return slowest / max(statistics.median_low(times), 1e-9) - 1, times.index(slowest)


def _event():
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start, end):
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
