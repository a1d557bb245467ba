"""What a person, or a process that waits, asks of a run: where every process is, or a checkpoint.

A thread in each process looks into the folder of the run once a second: a main thread that waits
inside C++ runs nothing. A process that makes no progress creates the file `dump_stacks`, as a
person may do. Every process then writes `stacks/rank_N.txt`, and one says where all of them are.
With the file `save_now`, all processes save after the same step, and go on.

Imports only the standard library, as `process`, which notices SIGQUIT, does.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path

from utils.run import failures, process
from utils.run.files import publish

ANSWER_SECONDS = 5.0  # for the other processes to write their files
# Parts of a path in which no code of a project is.
LIBRARIES = (f"{os.sep}site-packages{os.sep}", os.path.dirname(os.__file__) + os.sep, "<frozen")
# What the innermost frame of a file does, where its function does not say it.
WAITS = {"distributed_c10d.py": "waits in {name},", "graph.py": "is in the backward pass,"}


class Place:
    """Where a process is in its run.

    Attributes:
        step, micro_batch (int): the optimizer step and micro-batch that it is in.
        agreed (int): the last step after which all processes agreed to go on.
        moved_at (float): when it last made progress, by `time.monotonic`.
        save_asked (bool): a person asked for a checkpoint, and no vote has said so yet.
    """

    def __init__(self):
        self.step = self.micro_batch = self.agreed = 0
        self.moved_at, self.save_asked = time.monotonic(), False

    def moved(self, step=None, micro_batch=0):
        """The process makes progress; `step` (int | None): None: in the same step as before."""
        if step is not None:
            self.step, self.micro_batch = step, micro_batch
        self.moved_at = time.monotonic()


place = Place()


class Watcher:
    """Watches the progress of a process, and the requests in the run's folder."""

    def __init__(self, folder, rank, ranks, seconds):
        """
        Args:
            folder (Path): the run's folder, which all processes share.
            rank, ranks (int): the number of this process, and how many there are.
            seconds (float): without progress for so long, a process asks all for their stacks.
        """
        self._folder, self._rank, self._ranks, self._seconds = Path(folder), rank, ranks, seconds
        self._request, self._save = self._folder / "dump_stacks", self._folder / "save_now"
        self._answered = self._reported = self._save_seen = None

    def start(self):
        """Starts the thread; it ends with the process."""
        place.moved()
        process.on_quit(lambda: self.ask("SIGQUIT"))
        threading.Thread(target=self._watch, name="stacks", daemon=True).start()

    def ask(self, reason):
        """Asks every process for its stacks."""
        writing = self._folder / f".dump_stacks_{self._rank}"
        # An error: another process was first, or the folder is gone, with the run.
        with contextlib.suppress(OSError):
            writing.write_text(reason)
            publish(writing, self._request)  # with its text: others may look at any moment
        with contextlib.suppress(OSError):
            writing.unlink()

    def _watch(self):
        while True:
            time.sleep(1)
            self.look()

    def look(self):
        """Asks if there was no progress, and answers a new request."""
        _refresh(self._folder)
        passed = time.monotonic() - place.moved_at
        if passed > self._seconds and place.moved_at != self._reported:
            self._reported = place.moved_at
            self.ask(f"no progress for {passed:.0f} s")
        with contextlib.suppress(OSError):
            request = self._request.stat().st_mtime_ns
            if request != self._answered:
                self._answered = request
                self._answer(request)
        with contextlib.suppress(OSError):
            request = self._save.stat().st_mtime_ns if self._rank == 0 else None
            if request != self._save_seen:
                self._save_seen, place.save_asked = request, True

    def _answer(self, request):
        reason = self._request.read_text().strip() or "asked by the file dump_stacks"
        self._write(request)
        states = self._others(request)
        if min(states) == self._rank:
            self._request.unlink(missing_ok=True)
            print(f"{reason}: {describe(states, self._ranks)}", file=sys.stderr, flush=True)
            print(f"all stacks: {self._folder}/stacks", file=sys.stderr, flush=True)

    def _write(self, request):
        """Writes the file of this process: a line of JSON, then the stacks of all its threads."""
        (self._folder / "stacks").mkdir(exist_ok=True)
        failures.remember_stacks(self._folder / "stacks")
        path = self._path(self._rank)
        state = {"request": request, "does": main_thread(), "step": place.step}
        state |= {"micro_batch": place.micro_batch, "last_step_agreed": place.agreed}
        state["seconds_without_progress"] = round(time.monotonic() - place.moved_at)
        writing = path.with_suffix(".writing")
        with open(writing, "w") as file:
            print(json.dumps(state), file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        os.replace(writing, path)

    def _others(self, request):
        """The states of all processes that answer in time: rank -> dict."""
        deadline, states = time.monotonic() + ANSWER_SECONDS, {}
        while len(states) < self._ranks and time.monotonic() < deadline:
            _refresh(self._folder / "stacks")
            for rank in range(self._ranks):
                with contextlib.suppress(OSError, ValueError):
                    state = json.loads(self._path(rank).read_text().partition("\n")[0])
                    if state["request"] == request:
                        states[rank] = state
            time.sleep(0.1)
        return states

    def _path(self, rank):
        return self._folder / "stacks" / f"rank_{rank}.txt"


def _refresh(folder):
    """Lists a folder: until then, NFS may remember for a minute that a file in it did not exist."""
    with contextlib.suppress(OSError):
        os.listdir(folder)


def answer_save(folder):
    """Removes the file with which a person asked for a checkpoint; returns whether it was there."""
    try:
        (Path(folder) / "save_now").unlink()
    except OSError:
        return False
    return True


def main_thread():
    """What the main thread does, in words: what it waits for, and the function it is in."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    waits = process.waits_for()
    does = f"waits for {waits}," if waits else None
    while frame:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        wait = WAITS.get(os.path.basename(path))
        if wait and does is None and "torch" in path:
            does = wait.format(name=name)
        if not path.startswith("<") and not any(part in path for part in LIBRARIES):
            at = f"{name} ({os.path.basename(path)}:{frame.f_lineno})"
            return f"{does} {at}" if does else f"is in {at}"
        frame = frame.f_back
    return (does or "has ended").rstrip(",")


def describe(states, ranks):
    """One line: which processes are where.

    Args:
        states (dict): rank -> what it wrote.
        ranks (int): how many processes there are.
    """
    groups = {}
    for rank, state in sorted(states.items()):
        groups.setdefault((state["does"], state["step"]), []).append(rank)
    parts = []
    for (does, step), members in groups.items():
        seconds = max(states[rank]["seconds_without_progress"] for rank in members)
        if len(members) > 1:
            does = does.replace("is in", "are in", 1).replace("waits", "wait", 1)
        parts.append(f"{_named(members)} {does} in step {step}, {seconds} s without progress")
    silent = [rank for rank in range(ranks) if rank not in states]
    if silent:
        parts.append(f"{_named(silent)} did not answer: stopped, or lost")
    return "; ".join(parts)


def _named(ranks):
    """`rank 2`, or `ranks 0, 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
