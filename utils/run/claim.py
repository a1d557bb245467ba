"""Claims the folder of a run, for one job at a time, and notices if it is taken away."""

import contextlib
import errno
import fcntl
import os
import socket
import time

from utils.run import process
from utils.run.failures import RunFailed, UserError
from utils.run.files import read_json, sync
from utils.run.manifest import JUNK, SHARED_CHECKS
from utils.run.output import warn


def claim(path):
    """Locks the folder `path` (Path), which is made if necessary; main process only.

    Returns its owner (str), and the open file `.lock`, which releases the lock when it is closed.
    Raises UserError if the folder cannot be written, is in use, or holds something else.
    """
    _refuse_other_folders(path)
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        file = _lock(path / ".lock")
        file.truncate(0)
        file.write(owner)
        file.flush()
        os.fsync(file.fileno())  # other machines read it; also an error if the disk is full
        for folder in made:  # a power cut would lose them with all that they hold
            sync(folder.parent)
    except OSError as error:
        reason = "it is a file" if path.is_file() else error.strerror or error
        raise UserError(f"cannot write to --output_dir {path}: {reason}") from None
    return owner, file


def _refuse_other_folders(path):
    """Raises UserError for a folder of something else, before anything is written to it."""
    earlier = read_json(path / "args.json")
    if earlier is None:
        # What a run has before its args.json, if it is stopped there, and what systems add.
        begun = (".", "checkpoints", "status.json", *JUNK)
        names = [entry.name for entry in path.glob("*")]  # none of a folder that cannot be read
        is_ours = all(name.startswith(begun) for name in names)
    else:
        is_ours = isinstance(earlier, dict) and {"arguments", "data", "command"} <= earlier.keys()
    if not is_ours:
        raise UserError(
            f"{path} is not empty and does not contain a run of these scripts (or of another "
            "version of them): use another --output_dir"
        )


def _lock(path):
    """Locks the file `path` for this process, and returns it open; raises UserError if it is taken.

    A POSIX record lock belongs to the process: the kernel releases it however the process ends, and
    forked data loader workers do not inherit it. Closing any descriptor of the file releases it.
    """
    file = path.open("a+")
    # The processes of a killed job may take a few seconds to exit.
    deadline = time.monotonic() + 2 * process.ORPHAN_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # Lustre or NFS
                warn(f"{path.parent} is on a file system without locks: only one job may use it")
                return file
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() > deadline:
            file.seek(0)
            other = file.read().strip() or "another process"
            raise UserError(
                f"{path.parent} is in use by {other}: wait for it, or use another --output_dir"
            )
        time.sleep(0.2)


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


def check_place(path, place):
    """Raises RunFailed if a folder is no longer the one whose `stat` was `place`."""
    with contextlib.suppress(OSError):
        if os.path.samestat(path.stat(), place):
            return
    raise RunFailed(
        f"--output_dir {path} was removed or renamed while the run was writing to it: undo that "
        "and run the same command again, or use another --output_dir",
        retry=False,
    )
