"""Files that one process of a machine makes, and all of them map into memory."""

import contextlib
import os
import platform
import shutil
import warnings
from pathlib import Path

import numpy as np
import psutil
import torch

from utils.run.failures import UserError


@contextlib.contextmanager
def complete_or_absent(file):
    """Opens a file for writing bytes, which gets its name when all of it is on disk.

    Args:
        file (Path): its folder is made if necessary.
    """
    # On a disk that several machines share, the process id alone names no process.
    writer = f"{file.stem}.writing.{platform.node()}."
    temporary = file.with_name(f"{writer}{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for left_over in file.parent.glob(f"{writer}*"):
            if not psutil.pid_exists(int(left_over.suffix[1:])):  # of a process that was killed
                left_over.unlink(missing_ok=True)
        with temporary.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        try:
            # Another machine may have made the same file, and map it by now: keep that one.
            os.link(temporary, file)
        except FileExistsError:
            pass
        except OSError:  # no links on this file system
            os.replace(temporary, file)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def no_space(error, what, folder, needed="space"):
    """The UserError for an OSError in `complete_or_absent`; `what` says what cannot be written."""
    free = shutil.disk_usage(folder).free / 2**30 if Path(folder).exists() else 0
    return UserError(
        f"cannot write {what} ({error.strerror}; {free:.1f} GiB free): it needs {needed}"
    )


def map_bytes(path):
    """Maps a file into memory, uint8 [bytes]: all processes of a machine share one copy.

    Do not write to it: that ends the process. (Where writing is possible, the system counts all of
    it as memory in use, and refuses a file that is larger than the memory.)
    """
    if os.path.getsize(path) == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(np.memmap(path, np.uint8, "r"))
