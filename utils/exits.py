"""Ends a run: records signals, makes processes exit when the launcher dies, and prints errors as one line.

Import this module and call `install()` before importing torch, so that a preemption signal during the slow imports is
handled. For the same reason this module imports only the standard library.
"""

import contextlib
import gc
import json
import os
import re
import signal
import sys
import threading
import time
import traceback

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: "try again later"; on this exit code a scheduler may requeue the job
ORPHAN_SECONDS = 3.5  # time that a process has to agree with the others on a last step after its launcher died
SAVE_SECONDS = 60  # time to save after that, or after the launcher died if a signal had arrived before
LOST_CONTACT = "lost contact with another process"
SAME_COMMAND = "run the same command again to continue"

_installed = False  # stays False in a notebook
_signal_name = None
_in_training = False
_saving = False
_failure_hooks = []
_micro_batch = None


class UserError(Exception):
    """Invalid input that the user can correct: ends the run with a one-line message and exit code 2.

    Args:
        line (str): what is wrong, and what to do.
        rank_variable (str | None): the process for which this environment variable is 0 prints the message. RANK: every
            process raises this error. LOCAL_RANK: every process of one machine does. None: only this process does, and prints.
    """

    def __init__(self, line, rank_variable="RANK"):
        super().__init__(line)
        self.rank_variable = rank_variable


class RunFailed(UserError):
    """The run cannot continue (for example after a non-finite loss): ends it with a one-line message and exit code 1.

    Args:
        retry (bool): whether the same command may succeed when it is run again.
    """

    def __init__(self, line, rank_variable="RANK", retry=True):
        super().__init__(line, rank_variable)
        self.retry = retry


def install():
    """Records SIGTERM, SIGUSR1 and Ctrl-C for `signal_name()`, and makes this process exit when the launcher dies.

    Turns off garbage collection until `run`, because it takes a tenth of the time of the imports and finds next to nothing.
    """
    global _installed
    _installed = True
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
    """Call this when training starts. After it, the loop notices signals and saves; before it, a signal ends the process.

    Objects that exist now, such as imported modules, are excluded from later garbage collections. Scanning them takes 0.1 s;
    each process would do it in a different step, and the others would wait. A notebook's process outlives its runs, so there
    nothing is excluded, and the memory of each run is freed.
    """
    global _in_training
    if _installed:
        gc.collect()
        gc.freeze()
    _in_training = True
    if _signal_name:
        _exit_at_once()


def saving_starts():
    """Call this when all processes have agreed to stop: it gives this one time to save although the launcher may be dead."""
    global _saving
    _saving = True


def grace_seconds():
    """Seconds that the launcher gives this process to save after SIGTERM, before it kills it; None without such a launcher."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))


def on_failure(hook):
    """Registers `hook(reason, retry)`, which is called when the run ends with an error, to record it.

    `retry` (bool): whether the same command may succeed when it is run again. The hook returns whether this process is the
    first to record a reason.
    """
    _failure_hooks.append(hook)


def remember_micro_batch(samples):
    """Stores the number of samples per micro-batch and process, for the out-of-memory message."""
    global _micro_batch
    _micro_batch = samples


def worker_init(_worker_id):
    """For `DataLoader(worker_init_fn=...)`: makes workers ignore signals, so that the loop can finish its step and save."""
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)


def run(main):
    """Calls `main()` and ends the process: 0 done, 1 failed, 2 invalid input, `PREEMPTED` stopped by a signal.

    An error is printed once, by one process, and appears in the final report of the launcher.
    """
    from torch.distributed.elastic.multiprocessing.errors import record  # here, because it imports torch

    gc.freeze()  # excludes what the imports created from garbage collection, which `install` turned off
    gc.enable()
    rank_variable, retry, lost_contact = None, True, False
    try:
        record(main)()
        return
    except SystemExit as error:
        if error.code == PREEMPTED:
            _report_to_launcher("stopped by a signal, as asked")
        raise
    except UserError as error:
        retry = getattr(error, "retry", False)
        code, line, rank_variable = 1 if isinstance(error, RunFailed) else 2, f"error: {error}", error.rank_variable
        _, in_worker, message = line.rpartition(f"{type(error).__name__}: ")
        if "in DataLoader worker" in line and in_worker:  # raised in a worker: drop its traceback; only this process knows it
            rank_variable, line = None, f"error: {message.strip()}"
        _report_to_launcher(line.removeprefix("error: "))
    except Exception as error:
        # If a loader worker died, PyTorch's handler of this signal may otherwise raise while the error is formatted.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code, line = 1, _known_failure(error)
        lost_contact = LOST_CONTACT in (line or "")
        if line is None:
            traceback.print_exc()
            line = f"error: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        else:
            _report_to_launcher(line.removeprefix("error: "))
    if rank_variable and int(os.environ.get(rank_variable, 0)) != 0:
        _wait_for_launcher(10)  # rank 0 prints the same error
    else:
        if not lost_contact:
            print(line, file=sys.stderr, flush=True)
        first = _call_failure_hooks(line.removeprefix("error: "), retry)
        if lost_contact and first:  # only one of the processes that lost contact prints it
            print(line, file=sys.stderr, flush=True)
        if _failure_hooks and first and retry:
            print(SAME_COMMAND, file=sys.stderr, flush=True)
        if lost_contact:
            _wait_for_launcher(5)
    sys.stdout.flush()
    # Not sys.exit: the destructor of a process group may wait forever for processes that have exited.
    os._exit(code)


def _call_failure_hooks(reason, retry):
    """Returns whether this process is the first to record why the run failed."""
    first = True
    for hook in _failure_hooks:
        try:
            first = hook(reason, retry)
        except (OSError, UserError) as error:  # for example because the disk is full
            print(f"warning: the run's status was not written: {error}", file=sys.stderr, flush=True)
    return first


def _wait_for_launcher(seconds):
    """Lets the launcher stop this process because of the one that failed first.

    It then exits with 0, so that the launcher's report, which lists all failed processes, names only the first.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: os._exit(0))
    if _signal_name is None:
        time.sleep(seconds)
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # it was the launcher's
        os._exit(0)


def _report_to_launcher(line):
    """Replaces the traceback that `record` wrote for the launcher's report with one line."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError), open(path, "w") as file:  # without this file, the report only lacks the reason
            json.dump({"message": line, "timestamp": str(int(time.time()))}, file)


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
        print(f"stopped by {_signal_name} before training started: nothing to save", file=sys.stderr, flush=True)
    os._exit(PREEMPTED)


def _exit_with_launcher(launcher):
    while os.getppid() == launcher:
        time.sleep(0.25)
    # With one process the launcher has no elastic agent: a signal kills it at once, while this process still has to save.
    seconds = ORPHAN_SECONDS if _signal_name is None else SAVE_SECONDS
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    if _saving:
        time.sleep(SAVE_SECONDS)
    # Still running: blocked in a collective with a process that has exited, or in a long step. The last checkpoint is valid.
    os._exit(PREEMPTED)


def _causes(error):
    """Yields the error, then its `__cause__` or `__context__`, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _known_failure(error):
    """A one-line message for failures whose traceback does not help the user, else None."""
    text = str(error).partition("GLHF")[0]  # how gloo ends the advice that follows its reason
    rank = os.environ.get("RANK", "0")
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text or isinstance(error, MemoryError):
        return (
            f"error: out of memory on rank {rank}, which computes {_micro_batch} samples at a time: a larger "
            f"--gradient_accumulation_steps splits the same batch into smaller parts ({text.splitlines()[0] if text else ''})"
        )
    if "No space left on device" in text:
        return (
            f"error: rank {rank}: the disk is full: free some space, then run the same command again ({text.splitlines()[0]})"
        )
    # A worker that dies while sending a batch also breaks the connection. Either error may be the context of the other.
    for cause in _causes(error):
        if "DataLoader worker" in str(cause):
            return f"error: rank {rank}: a data loader worker died: {str(cause).splitlines()[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, (EOFError, ConnectionError)) and any("utils/data/dataloader.py" in frame.filename for frame in frames):
        return f"error: rank {rank}: a data loader worker died while sending a batch ({type(error).__name__})"
    ended = any(phrase in text for phrase in ("Connection closed by peer", "Connection reset", "Broken pipe"))
    if (ended or "Timed out waiting" in text or "timed out" in text) and "RANK" in os.environ:
        # Without the source line of gloo before the reason, and its advice behind it.
        reason = re.sub(r"^\[\S+:\d+\] ", "", text.splitlines()[0]).partition(". This is ")[0]
        why = "which has ended (the launcher's report names it)" if ended else "and waited for it longer than --timeout"
        return f"error: rank {rank} {LOST_CONTACT}, {why}: {reason}"
    if "NCCL" in text:  # its last line says what happened; the first says where in PyTorch
        return f"error: rank {rank}: NCCL: {[line for line in text.splitlines() if line.strip()][-1].strip()}"
    return None
