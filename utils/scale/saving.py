"""Writes a checkpoint beside the training, which waits only until the state is copied in memory.

`accelerator.save_state` has no asynchronous form. So within `Writer.captured` the functions with
which it writes files only copy what they are given, and a thread calls them later. The files are
the same as without this. `torch.distributed.checkpoint.async_save` writes a format of its own,
which neither `accelerator.load_state` nor a reader of safetensors loads.
"""

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import other

# `DefaultStager`, which uses it, forgets its memory in torch 2.11 after each copy.
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from utils.run import process
from utils.run.collectives import new_group
from utils.scale import fsdp

NICENESS = 10  # more, of the thread: training comes first where there are few cores
_newest = None  # the future of the checkpoint that was started last


class Writer:
    """Writes one checkpoint at a time in a thread; every process has one.

    Attributes:
        group: for collectives in the thread. In a group that the training uses, they would get
            between its own, in another order on each process, and all would wait forever.
    """

    def __init__(self, accelerator):
        """Call it on every process."""
        self.group = new_group(accelerator)
        fsdp.save_from_gpus(accelerator)
        # Not in shared memory, of which containers have little.
        pinned = accelerator.device.type == "cuda"
        self._stager = StateDictStager(pin_memory=pinned, share_memory=False)
        self._thread = ThreadPoolExecutor(1, "checkpoint", _give_way)
        process.before_exit(wait_for_newest)

    @contextlib.contextmanager
    def captured(self):
        """Yields a list of functions; each writes a file that this block would have written.

        `torch.save`, `safetensors.torch.save_file` as Accelerate calls it, and `dcp.save` copy what
        they are given. Everything else is written in the block.
        """
        # Waits for the copy of each tensor, on whichever GPU it is.
        writes, copy = [], self._stager.stage
        save, save_file, save_shards = torch.save, other.safe_save_file, dcp.save

        def save_later(state, file, *args, **options):
            if not isinstance(file, str | os.PathLike):  # its caller reads it next
                return save(state, file, *args, **options)
            writes.append(partial(save, copy(state), file, *args, **options))

        def save_file_later(tensors, *args, **options):
            writes.append(partial(save_file, copy(tensors), *args, **options))

        def save_shards_later(state_dict, **options):
            options["process_group"] = self.group
            writes.append(partial(save_shards, copy(state_dict), **options))

        torch.save, other.safe_save_file, dcp.save = save_later, save_file_later, save_shards_later
        try:
            yield writes
        finally:
            torch.save, other.safe_save_file, dcp.save = save, save_file, save_shards

    def start(self, writes, finish):
        """Calls `writes`, a list of `captured`, and then `finish`, in the thread.

        Args:
            finish: a function of the first error of `writes`; None if there was none.

        Returns:
            Future: of what `finish` returns.
        """
        global _newest
        _newest = self._thread.submit(_write, writes, finish)
        return _newest


def wait_for_newest(seconds=None):
    """Waits until no checkpoint is being written, or for so many seconds (float)."""
    if _newest is not None:
        wait([_newest], seconds)


# A lock that the thread holds, of OpenSSL for instance, would stay locked in a loader worker.
os.register_at_fork(before=wait_for_newest)


def _write(writes, finish):
    first = None
    while writes:  # each releases its copy; all, because others may wait in a collective one
        try:
            writes.pop(0)()
        except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
            first = first or error
    return finish(first)


def _give_way():
    if sys.platform == "linux":  # elsewhere a priority belongs to the process
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness, 19))  # less takes a privilege
