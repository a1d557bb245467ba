"""How a run ends: signals set a flag, processes exit when the launcher dies, errors are printed as one line.

Import this and call `install()` before torch is imported: a preemption signal during the slow imports is then remembered
instead of killing the process. For the same reason it imports the standard library only.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: "try again later"; a scheduler may requeue on it
ORPHAN_SECONDS = 3.5  # how long a process may take to save after its launcher died
SIGNALED_SECONDS = 60  # the same, if a signal had asked it to stop before the launcher died

_signal_name = None
_in_training = False
_failure_hooks = []
_micro_batch = None


class UserError(Exception):
    """Invalid input that a person can correct: ends the run with this one line and exit code 2.

    Args:
        line (str): what is wrong, and what to do.
        speaker (str | None): which processes raise the same error, so that one of them prints it. RANK: all of them, and
            rank 0 prints it. LOCAL_RANK: all of one machine. None: only this one.
    """

    def __init__(self, line, speaker="RANK"):
        super().__init__(line)
        self.speaker = speaker


class RunFailed(UserError):
    """The run itself cannot continue (a non-finite loss, say): one line and exit code 1.

    Args:
        retry (bool): whether it helps to run the same command again.
    """

    def __init__(self, line, speaker="RANK", retry=True):
        super().__init__(line, speaker)
        self.retry = retry


def install():
    """Turns SIGTERM, SIGUSR1 and Ctrl-C into `signal_name()`, and makes this process exit when the launcher dies."""
    sys.stdout.reconfigure(line_buffering=True)  # people follow a log file while it is written
    for number_ in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number_, _on_signal)
    # Only a launcher is watched: `nohup python script.py &` must outlive its shell.
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_exit_with_launcher, args=(os.getppid(),), daemon=True).start()


def is_main():
    """Whether this is rank 0, which prints for the run; known before there is an `Accelerator` to ask."""
    return int(os.environ.get("RANK", 0)) == 0


def signal_name():
    """The name of the first signal that asked this process to stop, or None."""
    return _signal_name


def training_starts():
    """Call it when training starts: from now on the loop notices a signal and saves; before, a signal exits at once."""
    global _in_training
    _in_training = True
    if _signal_name:
        _exit_at_once()


def on_failure(hook):
    """Calls `hook(reason, retry)` when the run ends with an error, to record it.

    `retry` (bool): whether the same command may succeed next time. The hook returns a line that says what to do, or None.
    """
    _failure_hooks.append(hook)


def remember_micro_batch(samples):
    """Stores how many samples a process computes at a time, for the message about running out of memory."""
    global _micro_batch
    _micro_batch = samples


def worker_init(_worker_id):
    """For `DataLoader(worker_init_fn=...)`: workers ignore signals, so that loading continues while a checkpoint is saved."""
    for number_ in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number_, signal.SIG_IGN)


def run(main):
    """Calls `main()` and ends the process: 0 done, 1 failed, 2 invalid input, `PREEMPTED` stopped by a signal.

    An error is printed once, by one process, and reaches the report that the launcher prints at the end.
    """
    from torch.distributed.elastic.multiprocessing.errors import record  # not above: before torch is imported

    speaker, retry = None, True
    try:
        record(main)()
        return
    except SystemExit as error:
        if error.code == PREEMPTED:
            _report_to_launcher("stopped by a signal, as asked")
        raise
    except UserError as error:
        retry = getattr(error, "retry", False)
        code, line, speaker = 1 if isinstance(error, RunFailed) else 2, f"error: {error}", error.speaker
        _, in_worker, message = line.rpartition(f"{type(error).__name__}: ")
        if "in DataLoader worker" in line and in_worker:  # comes with the worker's traceback; no other process knows it
            speaker, line = None, f"error: {message.strip()}"
        _report_to_launcher(line.removeprefix("error: "))
    except Exception as error:
        code, line = 1, _known_failure(error)
        if line is None:
            traceback.print_exc()
            line = f"error: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        else:
            _report_to_launcher(line.removeprefix("error: "))
    if speaker and int(os.environ.get(speaker, 0)) != 0:
        # Rank 0 prints it. This process waits for the launcher to stop it, and then exits with 0: the launcher's report
        # lists every process that fails, and this one has nothing to add.
        for number_ in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number_, lambda *_: os._exit(0))
        if _signal_name is None:
            time.sleep(10)
    else:
        print(line, file=sys.stderr, flush=True)
        _call_failure_hooks(line.removeprefix("error: "), retry)
    sys.stdout.flush()
    # Not sys.exit: destructors of a process group whose peers are gone may wait for them.
    os._exit(code)


def _call_failure_hooks(reason, retry):
    for hook in _failure_hooks:
        try:
            advice = hook(reason, retry)
        except (OSError, UserError) as error:  # the disk is full, say, which is why the run ends
            print(f"warning: the run's status was not written: {error}", file=sys.stderr, flush=True)
        else:
            if advice:
                print(advice, file=sys.stderr, flush=True)


def _report_to_launcher(line):
    """Replaces the traceback that `record` wrote for the launcher's report by one line."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError), open(path, "w") as file:  # without it the report has no reason, no more
            json.dump({"message": line, "timestamp": str(int(time.time()))}, file)


def _on_signal(number_, _frame):
    global _signal_name
    if _signal_name is None:
        _signal_name = signal.Signals(number_).name
        if not _in_training:
            _exit_at_once()
    elif number_ == signal.SIGINT:
        os._exit(PREEMPTED)  # a second Ctrl-C: now


def _exit_at_once():
    if is_main():
        print(f"stopped by {_signal_name} before training started: nothing to save", file=sys.stderr, flush=True)
    os._exit(PREEMPTED)


def _exit_with_launcher(launcher):
    while os.getppid() == launcher:
        time.sleep(0.25)
    # With one process there is no elastic agent: a signal kills the launcher at once, while this process still has to save.
    seconds = ORPHAN_SECONDS if _signal_name is None else SIGNALED_SECONDS
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    # Still running: in a collective with a process that is gone, or in a long step. The last checkpoint remains valid.
    os._exit(PREEMPTED)


def _causes(error):
    """The error, what caused it or was being handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _known_failure(error):
    """One line for failures whose traceback does not help a person, else None."""
    text = str(error)
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
    # A worker that dies while it hands a batch over breaks the connection, too: either error may come wrapped in the other.
    for cause in _causes(error):
        if "DataLoader worker" in str(cause):
            return f"error: rank {rank}: a data loader worker died: {str(cause).splitlines()[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, (EOFError, ConnectionError)) and any("utils/data/dataloader.py" in frame.filename for frame in frames):
        return f"error: rank {rank}: a data loader worker died while it handed a batch over ({type(error).__name__})"
    lost = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting", "timed out")
    if any(sign in text for sign in lost) and "RANK" in os.environ:
        return (
            f"error: rank {rank} lost contact with another process, or waited for it longer than --timeout "
            f"(the launcher's report names the one that failed first): {text.splitlines()[0]}"
        )
    if "NCCL" in text:  # says where in PyTorch first, and last what happened
        return f"error: rank {rank}: NCCL: {[line for line in text.splitlines() if line.strip()][-1].strip()}"
    return None
