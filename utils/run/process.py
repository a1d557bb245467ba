"""Handles signals, and exits when the launcher dies.

Call `handle_signals()` before importing torch, so that a preemption signal during the slow imports
is handled. For the same reason this module imports only the standard library.

Where a signal finds a process, and what follows:

    before training           exits at once; there is nothing to save
    in a step                 saves after the step, on every process, then exits
    in a step that lasts,     exits after `stop_seconds()`, 20 by default, without saving
    or waiting for a batch
    or another process
    in an evaluation          exits within about a second; the checkpoint before it is complete,
                              and the restart evaluates
    saving                    finishes the checkpoint, then exits
    after the last evaluation exits at once; the restart writes the results

However a process ends, it first finishes a checkpoint that a thread is writing (`before_exit`), if
there is time. The exit code is `PREEMPTED` in each case. A main thread that waits inside C++, for a
collective for example, runs no signal handler: a second thread, which the kernel's notice wakes up,
ends the process.
"""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time

from utils.run import failures, launcher, output
from utils.run.failures import UserError

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: on this exit code a scheduler may requeue the job
ORPHANED = signal.SIGUSR2  # what the kernel sends when the launcher has died
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, ORPHANED)
# Time that a process has to agree with the others on a last step after its launcher died.
ORPHAN_SECONDS = 3.5
# Time to save after the launcher died; also to finish a checkpoint after an error.
SAVE_SECONDS = 60
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>

if getattr(multiprocessing.current_process(), "_inheriting", False):
    # This is a loader worker that was spawned (macOS) and now imports the script: the main process
    # handles Ctrl-C, which a terminal sends to all.
    for _signum in STOPPING:
        signal.signal(_signum, signal.SIG_IGN)


class Interrupted(Exception):
    """A signal asked a process to stop during an evaluation, which ended on all of them."""


class _State:
    """What is known about stopping this process. Only this module changes it."""

    def __init__(self):
        self.handles_signals = False  # stays so in a notebook
        self.refusal = None  # UserError: the environment describes another launch
        self.parent = os.getppid()
        self.signum = self.since = None  # the first signal, and when it arrived
        self.phase = "starting"  # then "training", "saving", "finishing", "done"
        self.failed = self.preempted = self.wait = None  # see `record_with` and `before_exit`


state = _State()


def handle_signals():
    """Handles SIGTERM, SIGUSR1, SIGHUP and Ctrl-C; exits when the launcher dies (on Linux).

    This also drops output that cannot be printed, and turns off garbage collection until
    `entry.run`: during the imports it takes a tenth of the time and finds next to nothing.
    """
    state.handles_signals = True
    atexit.register(_skip_finalization)  # the first one registered is called last
    sys.excepthook = lambda _, error, __: print_uncaught(error)  # of an import, on one process
    gc.disable()
    output.protect()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # not from loader workers
    for signum in STOPPING:  # SIGHUP stays ignored under `nohup`
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _on_signal)
    threading.Thread(target=_end_if_stuck, args=(reader,), daemon=True).start()
    state.refusal = launcher.check_variables()
    # Without a launcher, `nohup python script.py &` must outlive its shell.
    if (launcher.is_elastic() or launcher.find()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ORPHANED)
        if _launcher_is_dead():  # before the kernel was told
            os.kill(os.getpid(), ORPHANED)


def _launcher_is_dead():
    return os.getppid() != state.parent


def is_main():
    """Whether this is rank 0, which prints for the run; works before an `Accelerator` exists."""
    return failures.rank() == "0"


def signal_name():
    """The name of the first signal that asked this process to stop, or None."""
    if state.signum == ORPHANED:
        return "the end of its launcher"
    return state.signum and signal.Signals(state.signum).name


def record_with(failed, preempted=None):
    """Registers what records how the run ends, in place of what was registered before.

    Args:
        failed (Callable | None): called with the reason and whether the same command may succeed
            when it is run again; returns whether this process is the first to record a reason, and
            what else there is to say, a list of lines.
        preempted (Callable | None): called with the reason when a signal ends the run outside of
            the loop; returns how to continue. None: there is nothing to continue.
    """
    state.failed, state.preempted = failed, preempted


def before_exit(wait):
    """Registers `wait(seconds)`, which waits for so long (float) for what must not be cut off."""
    state.wait = wait


def training_starts():
    """Call this when training starts: from then on the loop notices signals and saves.

    Objects that exist now, such as imported modules, are excluded from later garbage collections:
    scanning them takes 0.1 s, each process would do it in a different step, and the others would
    wait. A notebook's process outlives its runs, so there the memory of each run is freed.
    """
    if state.handles_signals:
        gc.collect()
        gc.freeze()
    state.phase = "training"
    if state.signum:
        exit_at_once(" before there was anything to save")


def stopping_starts():
    """Call this when all processes have agreed to stop: this one gets time to save."""
    state.phase = "saving"


def is_stopping():
    """Whether all processes have agreed to stop. Within `saving()`, always."""
    return state.phase == "saving"


@contextlib.contextmanager
def saving():
    """Marks a block that writes a checkpoint: a signal ends the process later, not in it."""
    before, state.phase = state.phase, "saving"
    try:
        yield
    finally:
        state.phase = before
        if state.since:  # the next step may take as long as if the signal had arrived now
            state.since = time.monotonic()


def training_ends():
    """Call this when everything is saved: from then on a signal ends the process at once."""
    if state.phase == "training":
        state.phase = "finishing"


def main_ends():
    """Call this when the script is done and only Python's exit functions are left."""
    state.phase = "done"


def _skip_finalization():
    """Ends a process that is done before Python finalizes.

    A thread of gloo may still free a tensor of the last collective. It needs Python's lock for
    that, and during finalization Python ends or stops a thread that asks for it: the process would
    abort, or wait forever (torch 2.14).
    """
    if state.phase == "done":
        sys.stdout.flush()
        os._exit(0)


def grace_seconds():
    """Seconds between the launcher's SIGTERM and SIGKILL; schedulers give about as many."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))


def stop_seconds():
    """Seconds after a signal until a process that does not get to a save is ended."""
    if state.signum == ORPHANED:
        return ORPHAN_SECONDS
    return grace_seconds() * 2 / 3 if state.phase == "training" else 5


def main_thread_place():
    """The line of the project that the main thread is in, such as `evaluate (train_gpt.py:380)`."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame:
        path = frame.f_code.co_filename
        if not failures.in_library(path) and "utils/run/" not in path:
            return f"{frame.f_code.co_name} ({os.path.basename(path)}:{frame.f_lineno})"
        frame = frame.f_back
    return "no line of this project"


def print_uncaught(error):
    """Prints the traceback of an error, on the first process that has it.

    The others, which the launcher stops because of the first, do not return.
    """
    failures.report_to_launcher(failures.headline(error))
    if not is_main():  # the first one of each machine does not wait for as long as the others
        wait_for_launcher(2 if os.environ.get("LOCAL_RANK") == "0" else 4)
    print(failures.short_traceback(error), end="", file=sys.stderr, flush=True)


def wait_for_launcher(seconds):
    """Lets the launcher stop this process because of the one that failed first.

    This process then exits with 0, so that the launcher's report, which lists all failed processes,
    names only the first one.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: os._exit(0))
    if state.signum is None:
        time.sleep(seconds)
    elif launcher.is_elastic():  # it was the launcher's
        os._exit(0)


def finish_writing(seconds):
    """Waits for what `before_exit` registered, at most so many seconds (float)."""
    if state.wait:
        state.wait(seconds)


def _on_signal(signum, _frame):
    if state.signum is None:
        state.signum, state.since = signum, time.monotonic()
        if state.phase == "starting":
            exit_at_once(" before there was anything to save")
        elif state.phase == "finishing":
            exit_at_once(" after the last step, which is saved")
    elif signum == signal.SIGINT:
        state.wait = None  # a second Ctrl-C waits for nothing
        exit_at_once(" twice: the last checkpoint is valid")


def exit_at_once(where):
    """Ends the process, also from a signal handler or another thread than the main one."""
    # In an evaluation another process may have got it.
    reason = f"stopped by {signal_name() or 'a signal to another process'}{where}"
    if is_main():
        again = ""
        if state.preempted:
            # The folder may be gone; the process ends in any case.
            with contextlib.suppress(OSError, UserError):
                again = f": {state.preempted(reason)}"
        # Not print: the main thread may be in the middle of it.
        with contextlib.suppress(OSError):
            os.write(2, f"{reason}{again}\n".encode())
    passed = time.monotonic() - state.since if state.since else 0
    finish_writing(grace_seconds() - passed - 1)
    os._exit(PREEMPTED)


def _end_if_stuck(reader):
    """Ends the process if the main thread does not get to it after a signal.

    Args:
        reader (int): a pipe into which the kernel's handler of a signal writes its number.
    """
    while (signum := os.read(reader, 1)[0]) not in STOPPING:
        pass
    arrived = time.monotonic()
    while True:
        time.sleep(0.25)
        passed = time.monotonic() - (state.since or arrived)
        stuck = state.phase != "saving" and passed > stop_seconds()
        # A save may wait for a process that ended with the launcher.
        if stuck or (_launcher_is_dead() and passed > SAVE_SECONDS):
            state.signum, state.since = state.signum or signum, state.since or arrived
            exit_at_once(
                f", {passed:.0f} s later still in {main_thread_place()}: the last checkpoint is "
                "valid (for longer steps: export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=SECONDS)"
            )
