"""Records signals, exits when the launcher dies, and turns errors into exit codes.

Call `handle_signals()` before importing torch, so that a preemption signal during the slow imports
is handled. For the same reason this module imports only the standard library.
"""

import gc
import os
import signal
import sys
import threading
import time
import traceback

from utils.run import failures
from utils.run.failures import RunFailed, UserError

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: on this exit code a scheduler may requeue the job
# Time that a process has to agree with the others on a last step after its launcher died.
ORPHAN_SECONDS = 3.5
# Time to save after that, or after the launcher died if a signal had arrived before.
SAVE_SECONDS = 60

_handles_signals = False  # stays False in a notebook
_signal_name = None
_in_training = False
_saving = False


def handle_signals():
    """Records SIGTERM, SIGUSR1 and Ctrl-C for `signal_name()`; exits when the launcher dies.

    Also turns off garbage collection until `run`: during the imports it takes a tenth of the time
    and finds next to nothing.
    """
    global _handles_signals
    _handles_signals = True
    gc.disable()
    sys.stdout.reconfigure(line_buffering=True)  # so that a log file shows every line at once
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(signum, _on_signal)
    # Only under a launcher: `nohup python script.py &` must outlive its shell.
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_exit_with_launcher, args=(os.getppid(),), daemon=True).start()


def is_main():
    """Whether this is rank 0, which prints for the run; works before an `Accelerator` exists."""
    return int(os.environ.get("RANK", 0)) == 0


def signal_name():
    """The name of the first signal that asked this process to stop, or None."""
    return _signal_name


def training_starts():
    """Call this when training starts: from then on the loop notices signals and saves.

    Before it, a signal ends the process. Objects that exist now, such as imported modules, are
    excluded from later garbage collections. Scanning them takes 0.1 s; each process would do it in
    a different step, and the others would wait. A notebook's process outlives its runs, so there
    nothing is excluded, and the memory of each run is freed.
    """
    global _in_training
    if _handles_signals:
        gc.collect()
        gc.freeze()
    _in_training = True
    if _signal_name:
        _exit_at_once()


def saving_starts():
    """Call this when all processes have agreed to stop.

    It gives this one time to save although the launcher may be dead.
    """
    global _saving
    _saving = True


def grace_seconds():
    """Seconds between the launcher's SIGTERM and SIGKILL; None without such a launcher."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))


def ignore_signals(_worker_id):
    """For `DataLoader(worker_init_fn=...)`: so that the loop can finish its step and save."""
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)


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
        record(main)()
    except SystemExit as error:
        if error.code == PREEMPTED:
            failures.report_to_launcher("stopped by a signal, as asked")
        raise
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
        retry = getattr(error, "retry", False)
        _record(line, retry)
    _exit(1 if isinstance(error, RunFailed) else 2)


def _end_with_failure(error):
    line = failures.describe(error)
    if line is None:
        traceback.print_exc()
        text = str(error).strip()
        line = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    else:
        failures.report_to_launcher(line)
    if failures.is_lost_contact(error):
        # Only the first of the processes that lost contact prints it.
        _record(line, retry=True, before=f"error: {line}")
        _wait_for_launcher(5)
    else:
        print(f"error: {line}", file=sys.stderr, flush=True)
        _record(line, retry=True)
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
    # Not sys.exit: the destructor of a process group may wait forever for processes that exited.
    os._exit(code)


def _wait_for_launcher(seconds):
    """Lets the launcher stop this process because of the one that failed first.

    This process then exits with 0, so that the launcher's report, which lists all failed processes,
    names only the first one.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: os._exit(0))
    if _signal_name is None:
        time.sleep(seconds)
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # it was the launcher's
        os._exit(0)


def _on_signal(signum, _frame):
    global _signal_name
    if _signal_name is None:
        _signal_name = signal.Signals(signum).name
        if not _in_training:
            _exit_at_once()
    elif signum == signal.SIGINT:
        os._exit(PREEMPTED)  # exit immediately on a second Ctrl-C


def _exit_at_once():
    if is_main():
        line = f"stopped by {_signal_name} before training started: nothing to save"
        print(line, file=sys.stderr, flush=True)
    os._exit(PREEMPTED)


def _exit_with_launcher(launcher):
    while os.getppid() == launcher:
        time.sleep(0.25)
    # With one process the launcher has no elastic agent: a signal kills it at once, while this
    # process still has to save.
    seconds = ORPHAN_SECONDS if _signal_name is None else SAVE_SECONDS
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    if _saving:
        time.sleep(SAVE_SECONDS)
    # Still running: blocked in a collective with a process that has exited, or in a long step. The
    # last checkpoint is valid.
    os._exit(PREEMPTED)
