"""status.json: running, preempted, finished or failed, why, and what to do next."""

import contextlib
import fcntl
import os

from utils.run.failures import SAME_COMMAND, optional
from utils.run.files import read_json, write_json, write_text
from utils.run.record import timestamp


def read(folder):
    """The status in a run's folder; {} if there is none."""
    return read_json(folder / "status.json") or {}


def write(folder, state, reason, **more):
    """Replaces the status, atomically."""
    status = {"state": state, "reason": reason, "time": timestamp(), **more}
    write_json(folder / "status.json", status)


def write_failure(folder, reason, retry):
    """Records why the run failed; returns False if another process has already done so.

    The first process to fail knows the reason; the others fail later, because they lose contact
    with it.
    """
    with (folder / ".lock_status").open("a") as file:
        # On a file system without locks two processes may both be the first.
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)
        if read(folder).get("state") != "running":
            return False
        write(folder, "failed", reason, next=SAME_COMMAND if retry else None)
    return True


def tell_batch_script(folder, step):
    """Tells submit.sbatch, which does not parse our arguments, where the status of this run is."""
    file = os.environ.get("RUN_FOLDER_FILE")
    if file:
        with optional(f"{file}, by which a job is requeued,"):
            write_text(file, f"{folder.resolve()}\n{step}\n")
