"""Claims the folder of a run, for one job at a time, and notices if it is taken away."""

import os
import socket
import time

from utils.run import process
from utils.run.failures import RunFailed, UserError
from utils.run.files import lock, sync
from utils.run.manifest import SHARED_CHECKS


def claim(path):
    """Locks the folder `path` (Path), which is made if necessary; main process only.

    Returns:
        tuple: its owner (str), which is this process and its host; the open file `.lock`, which
        releases the lock when it is closed.

    Raises:
        UserError: the folder cannot be written, or is in use.
    """
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        # The processes of a killed job may take a few seconds to exit: wait for them.
        file = lock(path / ".lock", owner, 2 * process.ORPHAN_SECONDS)
        probe = path / ".probe"
        try:
            probe.write_bytes(bytes(1 << 16))
        finally:
            probe.unlink(missing_ok=True)
        for folder in made:  # a power cut would lose them with all that they hold
            sync(folder.parent)
    except OSError as error:
        reason = "it is a file" if path.is_file() else error.strerror or error
        raise UserError(f"cannot write to --output_dir {path}: {reason}") from None
    return owner, file


def check_shared(path, owner):
    """Checks on every process but the main one that it sees the lock of the main process.

    (The main process must not open its lock again: closing it would release it.)

    Raises:
        UserError: it does not: this is another folder.
    """
    file = path / ".lock"
    for _ in range(SHARED_CHECKS):
        if path.is_dir() and file.name in os.listdir(path) and file.read_text() == owner:
            return
        time.sleep(0.5)
    raise UserError(
        f"--output_dir {path} is a different folder on {socket.gethostname()} than for {owner}: "
        "use one on a file system that all machines share"
    )


def identify(path):
    """The device and inode of a folder, which change if it is removed or renamed; None: no folder.

    Args: path (Path).
    """
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def check_place(path, identity):
    """Raises RunFailed if a folder is no longer the one that `identify` saw."""
    if identify(path) != identity:
        raise RunFailed(
            f"--output_dir {path} was removed or renamed while the run was writing to it: undo "
            "that and run the same command again, or use another --output_dir",
            retry=False,
        )
