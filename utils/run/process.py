"""Handles signals, exits when the launcher dies, and turns errors into exit codes.

Call `handle_signals()` before importing torch, so that a preemption signal during the slow imports
is handled. For the same reason this module imports only the standard library.

Where a signal finds a process, and what follows:

    before training           exits at once; there is nothing to save
    in a step                 saves after the step, on every process, then exits
    in a step that lasts,     exits after `stop_seconds()`, 20 by default, without saving
    or waiting for a batch
    or another process
    in an evaluation          stops it within about a second and saves; the restart evaluates
    saving                    finishes the checkpoint, then exits
    after the last save       exits at once; the restart writes the results

However a process ends, it first finishes a checkpoint that a thread is writing (`before_exit`), if
there is time. The exit code is `PREEMPTED` in each case. A main thread that waits inside C++, for a
collective say, runs no signal handler: a second thread, which the kernel's notice wakes up, ends
the process.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback

from utils.run import failures, launcher, output
from utils.run.failures import RunFailed, UserError

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: on this exit code a scheduler may requeue the job
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# Time that a process has to agree with the others on a last step after its launcher died.
ORPHAN_SECONDS = 3.5
# Time to save after that, or after the launcher died if a signal had arrived before; also to finish
# a checkpoint after an error.
SAVE_SECONDS = 60

if getattr(multiprocessing.current_process(), "_inheriting", False):
    # This is a loader worker that was spawned (macOS) and now imports the script: the main process
    # handles Ctrl-C, which a terminal sends to all.
    for _signum in STOPPING:
        signal.signal(_signum, signal.SIG_IGN)

_handles_signals = False  # stays False in a notebook
_refused = None  # the error to raise, if the environment describes another launch
_signal_name = None
_signal_time = None
_phase = "starting"  # then "training", "saving" while it saves to stop, "finishing"
_waits_for = None  # what the main thread waits for, in words
_on_preempted = None
_on_quit = None
_before_exit = None


class Interrupted(Exception):
    """A signal asked a process to stop during an evaluation, which ended on all of them."""


def handle_signals():
    """Handles SIGTERM, SIGUSR1, SIGHUP and Ctrl-C; exits when the launcher dies.

    SIGQUIT (Ctrl-\\) calls the function registered by `on_quit`, and ends nothing from then on.
    SIGHUP stays ignored if it is now, as under `nohup`. This also drops output that cannot be
    printed, and turns off garbage collection until `run`: during the imports it takes a tenth of
    the time and finds next to nothing.
    """
    global _handles_signals, _refused
    _handles_signals = True
    gc.disable()
    output.protect()
    _refused = launcher.drop_variables()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # not from loader workers
    for signum in STOPPING:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _on_signal)
    threading.Thread(target=_end_if_stuck, args=(reader,), daemon=True).start()
    if launcher.find():  # without one, `nohup python script.py &` must outlive its shell
        threading.Thread(target=_exit_with_launcher, args=(os.getppid(),), daemon=True).start()


def is_main():
    """Whether this is rank 0, which prints for the run; works before an `Accelerator` exists."""
    return int(os.environ.get("RANK", 0)) == 0


def signal_name():
    """The name of the first signal that asked this process to stop, or None."""
    return _signal_name


def on_quit(hook):
    """Registers `hook()`, which a thread calls on SIGQUIT, whatever the main thread does."""
    global _on_quit
    _on_quit = hook
    if not _handles_signals:  # in a notebook
        return
    signal.signal(signal.SIGQUIT, lambda *_: None)


def waits_for():
    """What the main thread waits for, in words, or None."""
    return _waits_for


@contextlib.contextmanager
def waiting_for(what):
    """Marks a block in which the main thread waits for `what` (str), for messages."""
    global _waits_for
    before, _waits_for = _waits_for, what
    try:
        yield
    finally:
        _waits_for = before


def on_preempted(hook):
    """Registers `hook(reason)`, which records that a signal ended the run without saving."""
    global _on_preempted
    _on_preempted = hook


def before_exit(wait):
    """Registers `wait(seconds)`, which waits for so long (float) for what must not be cut off."""
    global _before_exit
    _before_exit = wait


def training_starts():
    """Call this when training starts: from then on the loop notices signals and saves.

    Before it, a signal ends the process. Objects that exist now, such as imported modules, are
    excluded from later garbage collections. Scanning them takes 0.1 s; each process would do it in
    a different step, and the others would wait. A notebook's process outlives its runs, so there
    nothing is excluded, and the memory of each run is freed.
    """
    global _phase
    if _handles_signals:
        gc.collect()
        gc.freeze()
    _phase = "training"
    if _signal_name:
        _exit_at_once(" before there was anything to save")


def stopping_starts():
    """Call this when all processes have agreed to stop: this one gets time to save.

    Its launcher may be dead.
    """
    global _phase
    _phase = "saving"


def is_stopping():
    """Whether all processes have agreed to stop: the next checkpoint is the last one.

    Within `saving()`, always.
    """
    return _phase == "saving"


@contextlib.contextmanager
def saving():
    """Marks a block that writes a checkpoint: a signal ends the process later, not in it."""
    global _phase, _signal_time
    before, _phase = _phase, "saving"
    try:
        yield
    finally:
        _phase = before
        if _signal_time:  # the next step may take as long as if the signal had arrived now
            _signal_time = time.monotonic()


def training_ends():
    """Call this when everything is saved: from then on a signal ends the process at once."""
    global _phase
    if _phase == "training":
        _phase = "finishing"


def wait_for_each(items, what):
    """Yields `items`; while the main thread waits for one, a signal ends it after a while.

    Args: what (str): what an item is, for the message.
    """
    items = iter(items)
    while True:
        with waiting_for(what):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def grace_seconds():
    """Seconds between the launcher's SIGTERM and SIGKILL; schedulers give about as many."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))


def stop_seconds():
    """Seconds after a signal until a process that does not get to a save is ended."""
    return grace_seconds() * 2 / 3 if _phase == "training" else 5


def run(main):
    """Calls `main()` and ends the process.

    Exit codes: 0 done, 1 failed, 2 invalid input, `PREEMPTED` stopped by a signal. An error is
    printed once, by one process, and appears in the final report of the launcher.
    """
    # Here, because it imports torch.
    from torch.distributed.elastic.multiprocessing.errors import record

    gc.freeze()  # excludes what the imports created from garbage collection
    gc.enable()
    try:
        if _refused:
            raise _refused
        record(main)()
    except SystemExit as error:
        if error.code == PREEMPTED:
            failures.report_to_launcher("stopped by a signal, as asked")
            _exit(PREEMPTED)  # at once: Python would wait for a loader worker that is stuck
        raise
    except Interrupted:
        _exit_at_once(" in an evaluation, which the restart repeats")
    except UserError as error:
        _end_with_message(error)
    except Exception as error:
        # If a loader worker died, PyTorch's handler of this signal may otherwise raise while the
        # error is formatted.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _end_with_failure(error)


def _end_with_message(error):
    line, rank_variable = str(error), error.rank_variable
    before, _, message = line.rpartition(f"{type(error).__name__}: ")
    if "in DataLoader worker" in before:  # raised in a worker: only this process knows it
        rank_variable, line = None, message.strip()
    failures.report_to_launcher(line)
    if rank_variable and int(os.environ.get(rank_variable, 0)) != 0:
        _wait_for_launcher(10)  # rank 0 prints the same error
    else:
        print(f"error: {line}", file=sys.stderr, flush=True)
        _record(line + getattr(error, "more", ""), getattr(error, "retry", False))
    _exit(1 if isinstance(error, RunFailed) else 2)


def _end_with_failure(error):
    line, retry = failures.describe(error), failures.may_pass(error)
    if line is None:
        traceback.print_exc()
        text = str(error).strip()
        line = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    else:
        failures.report_to_launcher(line)
    if failures.is_lost_contact(error):
        # Only the first of the processes that lost contact prints it.
        _record(line, retry, before=f"error: {line}")
        _wait_for_launcher(5)
    else:
        print(f"error: {line}", file=sys.stderr, flush=True)
        _record(line, retry)
    _exit(1)


def _record(line, retry, before=None):
    """Records why the run failed; if no process did so before, says how to continue."""
    if not failures.record(line, retry):
        return
    if before:
        print(before, file=sys.stderr, flush=True)
    if retry and failures.recorded_anywhere():
        print(failures.SAME_COMMAND, file=sys.stderr, flush=True)


def _exit(code):
    sys.stdout.flush()
    _finish_writing(SAVE_SECONDS)
    # Not sys.exit: the destructor of a process group may wait forever for processes that exited.
    os._exit(code)


def _finish_writing(seconds):
    if _before_exit:
        _before_exit(seconds)


def _wait_for_launcher(seconds):
    """Lets the launcher stop this process because of the one that failed first.

    This process then exits with 0, so that the launcher's report, which lists all failed processes,
    names only the first one.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: os._exit(0))
    if _signal_name is None:
        time.sleep(seconds)
    elif launcher.is_elastic():  # it was the launcher's
        os._exit(0)


def _on_signal(signum, _frame):
    global _signal_name, _signal_time
    if _signal_name is None:
        _signal_name, _signal_time = signal.Signals(signum).name, time.monotonic()
        if _phase == "starting":
            _exit_at_once(" before there was anything to save")
        elif _phase == "finishing":
            _exit_at_once(" after the last step, which is saved")
    elif signum == signal.SIGINT:
        os._exit(PREEMPTED)  # exit immediately on a second Ctrl-C


def _exit_at_once(where):
    """Ends the process, also from a signal handler or another thread than the main one."""
    # In an evaluation another process may have got it.
    reason = f"stopped by {_signal_name or 'a signal to another process'}{where}"
    if is_main():
        again = ""
        if _on_preempted:
            again = f": {failures.SAME_COMMAND}"
            # The folder may be gone; the process ends in any case.
            with contextlib.suppress(OSError, UserError):
                _on_preempted(reason)
        # Not print: the main thread may be in the middle of it.
        with contextlib.suppress(OSError):
            os.write(2, f"{reason}{again}\n".encode())
    passed = time.monotonic() - _signal_time if _signal_time else 0
    _finish_writing(grace_seconds() - passed - 1)
    os._exit(PREEMPTED)


def _end_if_stuck(reader):
    """Ends the process if the main thread does not get to it after a signal.

    Args:
        reader (int): a pipe into which the kernel's handler of a signal writes its number.
    """
    global _signal_name, _signal_time
    while (signum := os.read(reader, 1)[0]) not in STOPPING:
        if signum == signal.SIGQUIT and _on_quit:
            _on_quit()
    arrived = time.monotonic()
    while True:
        time.sleep(0.25)
        passed = time.monotonic() - (_signal_time or arrived)
        if _phase != "saving" and passed > stop_seconds():
            _signal_name = _signal_name or signal.Signals(signum).name
            _signal_time = _signal_time or arrived
            place = f"waiting for {_waits_for}" if _waits_for else "in a step or a collective"
            _exit_at_once(
                f", {place} {passed:.0f} s later: the last checkpoint is valid (for longer steps: "
                "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=SECONDS)"
            )


def _exit_with_launcher(launcher_id):
    while os.getppid() == launcher_id:
        time.sleep(0.25)
    # With one process the launcher has no elastic agent: a signal kills it at once, while this
    # process still has to save.
    seconds = ORPHAN_SECONDS if _signal_name is None else SAVE_SECONDS
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    if _phase == "saving":
        time.sleep(SAVE_SECONDS)
    # Still running: blocked in a collective with a process that has exited, or in a long step. The
    # last checkpoint is valid.
    _finish_writing(SAVE_SECONDS)
    os._exit(PREEMPTED)
