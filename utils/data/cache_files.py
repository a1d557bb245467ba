"""Files that one process of a machine makes, and all of them map into memory."""

import contextlib
import fcntl
import hashlib
import os
import platform
import secrets
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
from huggingface_hub.constants import HF_HOME

from utils.run.failures import UserError, full_disk


def cached(kind, parts, version, size=None):
    """Writes bytes to a file of the `datasets` library's cache, unless it is there, and maps it.

    The file gets its name when all of it is on disk.

    Args:
        kind (str): what they are, for the name of the folder, and for messages.
        parts (iterable): of bytes.
        version: a value that changes with the content.
        size (int | None): of all parts together, in bytes, if it is known.

    Returns:
        uint8 [bytes]. Raises UserError if it cannot be written, or has another size.
    """
    file = path_in_cache(kind, version)
    if not file.exists():
        try:
            _write(file, parts)
        except OSError as error:
            reason = error.strerror
            if full_disk(error):
                existing = next(path for path in file.parents if path.exists())
                free = shutil.disk_usage(existing).free / 2**30
                needed = "more space" if size is None else f"{size / 2**30:.1f} GiB"
                reason = f"{reason}; {free:.1f} GiB free, and it needs {needed}"
            raise UserError(
                f"cannot write the {kind} to {file.parent} (set HF_DATASETS_CACHE to use another "
                f"folder) ({reason})"
            ) from None
    if size not in (None, os.path.getsize(file)):
        raise UserError(f"{file} is damaged: delete it, and it is made again")
    return map_bytes(file)


def path_in_cache(kind, version):
    """Where `cached` keeps a file; `kind` and `version` as there."""
    library = os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME, "datasets")
    folder = Path(os.path.expanduser(library), kind.replace(" ", "_"))
    return folder / f"{hashlib.sha256(repr(version).encode()).hexdigest()[:32]}.bin"


def _write(file, parts):
    # Only left-overs of this machine: not every disk tells others that a file is locked.
    prefix = f"{file.stem}.writing.{platform.node()}."
    writing = file.with_name(prefix + secrets.token_hex(8))
    file.parent.mkdir(parents=True, exist_ok=True)
    for left_over in file.parent.glob(f"{prefix}*"):
        _remove_unlocked(left_over)
    try:
        with writing.open("xb") as out:
            with contextlib.suppress(OSError):  # no locks on this file system
                fcntl.flock(out, fcntl.LOCK_EX)
            for part in parts:
                out.write(part)
            out.flush()
            os.fsync(out.fileno())
        # Another machine may have made the same file, and map it by now: keep that one.
        if not file.exists():
            os.replace(writing, file)
    finally:
        with contextlib.suppress(OSError):
            writing.unlink()


def _remove_unlocked(path):
    """Removes a file whose writer was killed; keeps it where there are no locks."""
    with contextlib.suppress(OSError), path.open("r+b") as left_over:
        fcntl.flock(left_over, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def map_bytes(path):
    """Maps a file into memory, uint8 [bytes]: all processes of a machine share one copy.

    Writing to it ends the process. (Where that is possible, the system counts all of it as memory
    in use, and refuses a file that is larger than the memory.)
    """
    if os.path.getsize(path) == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(np.memmap(path, np.uint8, "r"))
