"""Watches a run: says who hangs and who is slow, and does what a person asks by a file.

A thread in each process looks into the folder of the run once a second: a main thread that waits
inside C++ runs nothing. A process that makes no progress creates the file `dump_stacks`, as a
person may do. Every process then writes `stacks/rank_N.txt`, and one says where all of them are.
With the file `save_now`, all processes save after the same step, and go on.
"""

import contextlib
import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections import deque

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from utils.run import process
from utils.run.output import notice

BEHIND = 0.1  # part of the time that a process must cost the others to be named
STEPS = 5  # in a row, in which it must have been the slowest
STILL = "no progress for"
ANSWER_SECONDS = 5.0  # for the other processes to write their files
# What the innermost frame of a file does, where its function does not say it.
WAITS = {"distributed_c10d.py": "waits in {name},", "graph.py": "is in the backward pass,"}


class Watchdog:
    """Watches the progress of all processes; one per process, made after the guard.

    It also compares how long they take for their batches and passes, and before each save whether
    DDP has kept their weights the same: a notice says if not.

    Attributes:
        request (Path): the file by which a process or a person asks for stacks.
        save_request (Path): that by which a person asks for a save.
    """

    def __init__(self, run, guard, accelerator, model, timeout):
        """Starts to watch.

        Args:
            run (RunFolder): after `start`.
            guard (Guard): all processes vote through it.
            model: as `prepare` returned it.
            timeout (float): `--timeout`; half of it without progress counts as hanging.
        """
        self._run, self._guard = run, guard
        self._rank, self._ranks = accelerator.process_index, accelerator.num_processes
        self._seconds, self.request = timeout / 2, run.path / "dump_stacks"
        self.save_request = run.path / "save_now"
        self._answered = self._reported = self._save_seen = None
        self._save_asked, self._awaited = False, None  # the step of a save that a person waits for
        self._passes, self._waited = Passes(model), 0.0
        self._times, self._since = [0] * self._ranks, time.monotonic()
        self._slowest = deque(maxlen=STEPS)
        guard.attach(self)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    # ------------------------------------------------------------------ with the votes of the guard

    def votes(self):
        """For the guard: whether a person asks for a save, and the own time of each process.

        It is in microseconds, for the batches of this step and the passes of the one before.
        """
        asked, self._save_asked = self._save_asked, False
        waited, times = self._run.meter.waited_seconds, [0] * self._ranks
        times[self._rank] = round(1e6 * (waited - self._waited + self._passes.seconds()))
        self._waited, self._run.hang = waited, ""
        return [int(asked), *times]

    def hear(self, votes):
        """For the guard: the votes of all processes."""
        asked, *times = votes
        if asked:
            self._run.save_asked = True
        if any(times):
            self._times = [a + b for a, b in zip(self._times, times, strict=True)]
            self._slowest.append(times.index(max(times)))

    def figures(self):
        """For the log line of the training: which process all others wait for, since the last line.

        Returns:
            dict: `slowest_behind`, the part of the time by which one process took longer than the
            median one; `slow_rank`, only if that is more than `BEHIND`, and it took longest in each
            of the last `STEPS`. Empty for a process alone.
        """
        if self._ranks == 1:
            return {}
        longest, passed = max(self._times), time.monotonic() - self._since
        rank, behind = self._times.index(longest), longest - statistics.median_low(self._times)
        figures = {"slowest_behind": behind / 1e6 / passed}
        if figures["slowest_behind"] > BEHIND and self._slowest.count(rank) == STEPS:
            figures["slow_rank"] = rank
        self._times, self._since = [0] * self._ranks, time.monotonic()
        return figures

    def check(self, model):
        """For the guard: prints a notice if the processes of DDP have different weights."""
        with contextlib.suppress(OSError):
            if self._rank == 0:
                self.save_request.unlink()
                self._awaited = self._guard.step
        if self._ranks == 1 or not isinstance(model, DistributedDataParallel):
            return
        total = checksum(model)
        bounds = torch.tensor([total, -total])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._guard.group)
        if self._rank == 0 and bounds[0] != -bounds[1]:
            notice(
                "the processes have different weights, so their gradients were not averaged: "
                "compute the loss with the model that `prepare` returned, not with the one inside"
            )

    # --------------------------------------------------------------------------------- the thread

    def ask(self, reason):
        """Asks every process for its stacks.

        The request is a link whose target is the reason: it is made at once with its text, and only
        if no other process was first.
        """
        with contextlib.suppress(OSError):
            os.symlink(reason, self.request)

    def _watch(self):
        while self._run.results is None:  # after `finish`, nothing can be saved
            time.sleep(1)
            self.look()

    def look(self):
        """Asks if there was no progress, and answers a new request."""
        _refresh(self._run.path)
        moved_at = self._guard.moved_at
        passed = time.monotonic() - moved_at
        if passed > self._seconds and moved_at != self._reported:
            self._reported = moved_at
            self.ask(f"{STILL} {passed:.0f} s")
        with contextlib.suppress(OSError):
            request = self.request.lstat().st_mtime_ns
            if request != self._answered:
                self._answered = request
                self._answer(request)
        if self._rank != 0:
            return
        with contextlib.suppress(OSError):
            request = self.save_request.stat().st_mtime_ns
            if request != self._save_seen:
                self._save_seen, self._save_asked = request, True
        if self._awaited is not None and self._run.saves.newest_step >= self._awaited:
            self._run.print(f"asked by the file save_now: checkpoint of step {self._awaited}")
            self._awaited = None

    def _answer(self, request):
        is_link = self.request.is_symlink()  # made by `ask`
        reason = os.readlink(self.request) if is_link else "asked by the file dump_stacks"
        self._write(request)
        states = self._others(request)
        line = f"{reason}: {describe(states, self._ranks)}"
        if reason.startswith(STILL):
            self._run.hang = line  # the last line, if the processes lose contact
        if min(states) == self._rank:
            self.request.unlink(missing_ok=True)
            print(line, file=sys.stderr, flush=True)
            print(f"all stacks: {self._run.path}/stacks", file=sys.stderr, flush=True)

    def _write(self, request):
        """Writes the file of this process: a line of JSON, then the stacks of all its threads."""
        path = self._path(self._rank)
        path.parent.mkdir(exist_ok=True)
        state = {"request": request, "does": main_thread(), "last_step": self._guard.step}
        state["last_step_agreed"] = self._guard.agreed
        state["seconds_without_progress"] = round(time.monotonic() - self._guard.moved_at)
        writing = path.with_suffix(".writing")
        with open(writing, "w") as file:
            print(json.dumps(state), file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        os.replace(writing, path)

    def _others(self, request):
        """The states of all processes that answer in time: rank -> dict."""
        deadline, states = time.monotonic() + ANSWER_SECONDS, {}
        while len(states) < self._ranks and time.monotonic() < deadline:
            _refresh(self._run.path / "stacks")
            for rank in range(self._ranks):
                with contextlib.suppress(OSError, ValueError):
                    state = json.loads(self._path(rank).read_text().partition("\n")[0])
                    if state["request"] == request:
                        states[rank] = state
            time.sleep(0.1)
        return states

    def _path(self, rank):
        return self._run.path / "stacks" / f"rank_{rank}.txt"


def _refresh(folder):
    """Lists a folder: until then, NFS may remember for a minute that a file in it did not exist."""
    with contextlib.suppress(OSError):
        os.listdir(folder)


@torch.no_grad()
def checksum(model):
    """The sum of the bits of all parameters, read as integers (int): in any order the same."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    views = [weight.view(integers[weight.element_size()]) for weight in model.parameters()]
    device = views[0].device  # a model can be on several
    return torch.stack([view.sum().to(device) for view in views]).sum().item()


def main_thread():
    """What the main thread does, in words: what it waits for, and the function it is in."""
    frame, does = sys._current_frames().get(threading.main_thread().ident), "is in"
    while frame:
        path = frame.f_code.co_filename
        wait = WAITS.get(os.path.basename(path))
        if wait and "torch" in path:
            does = wait.format(name=frame.f_code.co_name)
            break
        frame = frame.f_back
    return f"{does} {process.main_thread_place()}"


def describe(states, ranks):
    """One line: which processes are where.

    Args:
        states (dict): rank -> what it wrote.
        ranks (int): how many processes there are.
    """
    groups = {}
    for rank, state in sorted(states.items()):
        groups.setdefault((state["does"], state["last_step"]), []).append(rank)
    parts = []
    for (does, step), members in groups.items():
        seconds = max(states[rank]["seconds_without_progress"] for rank in members)
        if len(members) > 1:
            does = does.replace("is in", "are in", 1).replace("waits", "wait", 1)
        where = f"{does} after step {step}, {seconds} s without progress"
        parts.append(f"{_named(members)} {where}")
    silent = [rank for rank in range(ranks) if rank not in states]
    if silent:
        parts.append(f"{_named(silent)} did not answer: stopped, or lost")
    return "; ".join(parts)


def _named(ranks):
    """`rank 2`, or `ranks 0, 1, 3`."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


class Passes:
    """Measures the time that this process takes for its forward and backward passes.

    DDP makes every process wait for the slowest one at the end of the backward pass, so that all
    steps take the same time. What a process does before that is its own time. In a sharded model
    each layer waits: there, nothing is measured.

    On a GPU these times are those of its kernels, between CUDA events, which nothing waits for.
    """

    def __init__(self, model):
        """Args: model: as `prepare` returned it."""
        self._spans, self._earlier = [], []
        if isinstance(model, DistributedDataParallel):
            on_gpu = next(model.parameters()).device.type == "cuda"
            self._now = _event if on_gpu else time.perf_counter
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._follow)

    def seconds(self):
        """The time (float) in the step before this one, whose events have happened.

        Call it after each optimizer step.
        """
        earlier, self._earlier, self._spans = self._earlier, self._spans, []
        return sum(_seconds(*span) for span in earlier)

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


def _event():
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start, end):
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
