"""How processes share a data set: who reads it first, files that one makes and all map.

Also whether all have the same, and even batches of an evaluation.
"""

import hashlib
import math
import os
import platform
import warnings
from pathlib import Path

import numpy as np
import torch
from huggingface_hub.constants import HF_HOME

from utils.run.collectives import gather, run_on_all
from utils.run.failures import UserError, full_disk


def local_main_first(accelerator, function):
    """Runs `function()` on one process per node first, then on the others, which use its cache.

    An error on any process is raised on every one.
    """
    first = accelerator.is_local_main_process
    result = run_on_all(accelerator, function if first else lambda: None)
    after = run_on_all(accelerator, lambda: None if first else function())
    return result if first else after


def agree(accelerator, name, data):
    """Prints what a data set is, on the main process; call it on every process.

    Args:
        name (str): the value of `--dataset`.
        data: has `description`, one line with a checksum, and `details`, more lines.

    Returns:
        str: the description: a run that records it continues with the same data only.

    Raises:
        UserError: the data set differs between machines.
    """
    everywhere = sorted(set(gather(accelerator, data.description)))
    if len(everywhere) > 1:
        differing = " against ".join(everywhere)
        raise UserError(f"--dataset {name} differs between machines: {differing}")
    if accelerator.is_main_process:
        print("\n  ".join([f"data: {data.description}", *data.details]))
    return data.description


def evaluation_batch_size(accelerator, samples, most):
    """Computes the global batch size for an evaluation of so many samples.

    At most `most` (int) per process and batch. All batches get about the same size: Accelerate
    fills up the last one with repeated samples, which take time.
    """
    processes = accelerator.num_processes
    batches = math.ceil(samples / (most * processes))
    return math.ceil(samples / (batches * processes)) * processes


# ------------------------------------------------------------------------------------------ files


def cached(kind, parts, version):
    """Writes bytes to a file of the `datasets` library's cache, unless it is there, and maps it.

    The file gets its name when all of it is on disk.

    Args:
        kind (str): what they are, for the name of the folder, and for messages.
        parts (iterable): of bytes; always the same for a `version`.
        version: a value that changes with the content.

    Returns:
        uint8 [bytes]. Raises UserError if it cannot be written.
    """
    file = path_in_cache(kind, version)
    # Other runs of this machine may write the same bytes to it at the same time.
    writing = file.with_name(f"{file.stem}.writing.{platform.node()}")
    try:
        if not file.exists():
            _write(writing, parts)
            # Another machine may have made the same file, and map it by now: keep that one.
            if not file.exists():
                os.replace(writing, file)
            writing.unlink(missing_ok=True)
    except OSError as error:
        if full_disk(error):
            writing.unlink(missing_ok=True)
        raise UserError(
            f"cannot write the {kind} to {file.parent} (set HF_DATASETS_CACHE to use another "
            f"folder) ({error.strerror})"
        ) from None
    return map_bytes(file)


def path_in_cache(kind, version):
    """Where `cached` keeps a file; `kind` and `version` as there."""
    library = os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME, "datasets")
    folder = Path(os.path.expanduser(library), kind.replace(" ", "_"))
    return folder / f"{hashlib.sha256(repr(version).encode()).hexdigest()[:32]}.bin"


def _write(path, parts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with path.open("r+b") as out:  # over what a killed process has left
        for part in parts:
            out.write(part)
        out.truncate()
        out.flush()
        os.fsync(out.fileno())


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
