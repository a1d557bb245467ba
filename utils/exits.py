"""How a run ends: signals become a flag, a dead launcher ends its workers, errors become one line.

Import and `install()` this before torch: a preemption signal that arrives during the slow imports is then
remembered instead of killing the process. Standard library only, for the same reason.
"""

import os
import signal
import sys
import threading
import time
import traceback

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: "try again later"; a scheduler may requeue on it
ORPHAN_SECONDS = 3.5  # how long a process whose launcher died may use to save before it is ended
TOLD_SECONDS = 60  # the same, if it had been told to stop before

_signal_name = None
_in_training = False
_failure_hooks = []
_micro_batch = None


class UserError(Exception):
    """Something a person can mend: ends the run with this one line and exit code 2.

    `speaker`: which number of a process must be 0 for it to say so. RANK: all processes know it. LOCAL_RANK: those of
    one machine do. None: only the one that raises it.
    """

    def __init__(self, line, speaker="RANK"):
        super().__init__(line)
        self.speaker = speaker


class RunFailed(UserError):
    """The run itself cannot go on (a diverged loss, say): one line and exit code 1."""


def install():
    """Turns SIGTERM, SIGUSR1 and Ctrl-C into `signal_name()`, and follows the launcher into its grave."""
    sys.stdout.reconfigure(line_buffering=True)  # people follow a log file while it is written
    for number_ in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number_, _on_signal)
    # Only a launcher is followed: `nohup python script.py &` must outlive its shell.
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_follow_launcher, args=(os.getppid(),), daemon=True).start()


def is_main():
    """Whether this process speaks for the run; known before there is an `Accelerator` to ask."""
    return int(os.environ.get("RANK", 0)) == 0


def signal_name():
    """The name of the first signal that asked this process to stop, or None."""
    return _signal_name


def training_starts():
    """From here on a signal waits for the loop to notice it; before, there is nothing to save and it ends the process."""
    global _in_training
    _in_training = True
    if _signal_name:
        _leave_at_once()


def on_failure(hook):
    """Calls `hook(reason)` when the run ends with an error, so that it can be recorded."""
    _failure_hooks.append(hook)


def remember_micro_batch(samples):
    """Notes how many samples a process takes at a time: what a person must know when memory runs out."""
    global _micro_batch
    _micro_batch = samples


def worker_init(_worker_id):
    """For `DataLoader(worker_init_fn=...)`: loading goes on while the main process saves after a signal."""
    for number_ in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number_, signal.SIG_IGN)


def run(main):
    """Calls `main()` and ends the process: 0 done, 1 failed, 2 a person's error, `PREEMPTED` stopped by a signal."""
    speaker = None
    try:
        main()
        return
    except UserError as error:
        code, line, speaker = 1 if isinstance(error, RunFailed) else 2, f"error: {error}", error.speaker
        _, in_worker, told = line.rpartition(f"{type(error).__name__}: ")
        if "in DataLoader worker" in line and in_worker:  # comes with the worker's traceback; no other process knows it
            speaker, line = None, f"error: {told.strip()}"
    except Exception as error:
        code, line = 1, _known_failure(error)
        if line is None:
            traceback.print_exc()
            line = f"error: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    if speaker and int(os.environ.get(speaker, 0)) != 0:
        # Rank 0 prints it. Leaving before it has would make the launcher stop it unread.
        deadline = time.monotonic() + 10
        while _signal_name is None and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        print(line, file=sys.stderr, flush=True)
        try:
            for hook in _failure_hooks:
                hook(line.removeprefix("error: "))
        except (OSError, UserError) as error:  # the disk is full, say, which is why it ends
            print(f"warning: the run's status was not written: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Not sys.exit: destructors of a process group whose peers are gone may wait for them.
    os._exit(code)


def _on_signal(number_, _frame):
    global _signal_name
    if _signal_name is None:
        _signal_name = signal.Signals(number_).name
        if not _in_training:
            _leave_at_once()
    elif number_ == signal.SIGINT:
        os._exit(PREEMPTED)  # a second Ctrl-C: now


def _leave_at_once():
    if is_main():
        print(f"stopped by {_signal_name}: nothing more was saved", file=sys.stderr, flush=True)
    os._exit(PREEMPTED)


def _follow_launcher(launcher):
    while os.getppid() == launcher:
        time.sleep(0.25)
    # Without elastic workers the launcher dies of what it is told, at once. Who told us both wants us to save first.
    seconds = ORPHAN_SECONDS if _signal_name is None else TOLD_SECONDS
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    # Still here: in a collective with a process that is gone, or in a long step. The last checkpoint stands.
    os._exit(PREEMPTED)


def _causes(error):
    """The error, what caused it or was being handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _known_failure(error):
    """One line for failures whose traceback tells a person nothing, else None."""
    text = str(error)
    rank = os.environ.get("RANK", "0")
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text or isinstance(error, MemoryError):
        return (
            f"error: out of memory on rank {rank}, which takes {_micro_batch} samples at a time: a larger "
            f"--gradient_accumulation_steps makes that fewer, of the same global batch ({text.splitlines()[0] if text else ''})"
        )
    if "No space left on device" in text:
        return (
            f"error: rank {rank}: the disk is full; with some space on it the same command continues ({text.splitlines()[0]})"
        )
    # A worker that dies while it hands a batch over breaks the connection, too: either error may come wrapped in the other.
    for cause in _causes(error):
        if "DataLoader worker" in str(cause):
            return f"error: rank {rank}: a data loader worker died: {str(cause).splitlines()[0]}"
    lost = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting", "timed out")
    if any(sign in text for sign in lost) and "RANK" in os.environ:
        return (
            f"error: rank {rank} lost contact with another process, or waited for it longer than --timeout "
            f"(the launcher's report names the one that failed first): {text.splitlines()[0]}"
        )
    if "NCCL" in text:  # says where in PyTorch first, and last what happened
        return f"error: rank {rank}: NCCL: {[line for line in text.splitlines() if line.strip()][-1].strip()}"
    return None
