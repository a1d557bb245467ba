"""Writes a checkpoint beside the training, which waits only until the state is copied in memory.

Within `BackgroundWriter.capture` the functions with which `accelerator.save_state` writes files
only copy what they are given, and a thread calls them later. The files are the same as without
this. Writing into the page cache instead, and hashing and syncing in the thread, would need no
copy: but it blocks the training for 60 to 80 % of the time of a waiting save, and a copy for 7 to
10 % (0.3 and 2 GB, 2 cores of an x86-64 server, 2026-11-29).
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
from utils.scale import patches

NICENESS = 10  # more, of the thread: training comes first where there are few cores


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread; every process has one.

    Attributes:
        group: for collectives in the thread. In a group that the training uses, they would get
            between its own, in another order on each process, and all would wait forever.
    """

    def __init__(self, accelerator):
        """Call it on every process."""
        self.group = new_group() if accelerator.num_processes > 1 else None
        self._newest = None
        # Not in shared memory, of which containers have little.
        pinned = accelerator.device.type == "cuda"
        self._stager = StateDictStager(pin_memory=pinned, share_memory=False)
        self._thread = ThreadPoolExecutor(1, "checkpoint", _give_way)
        process.before_exit(self.wait_for_newest)
        # A lock that the thread holds, of OpenSSL for instance, would stay locked in a loader
        # worker.
        os.register_at_fork(before=lambda: self.wait_for_newest())

    @contextlib.contextmanager
    def capture(self, wait):
        """A block that yields a list of functions, which write files that it would have written.

        `torch.save`, `safetensors.torch.save_file` as Accelerate calls it, and `dcp.save` copy what
        they are given. Everything else is written in the block.

        Args: wait (bool): whether the block writes all files itself, since the training waits.
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

        later = patches.saving_with(save_later, save_file_later, save_shards_later)
        with contextlib.nullcontext() if wait else later:
            yield writes

    def start(self, writes, finish):
        """Calls `writes`, a list of `capture`, and then `finish`, in the thread.

        Args:
            finish: a function of the first error of `writes`; None if there was none.

        Returns:
            Future: of what `finish` returns.
        """
        self._newest = self._thread.submit(_write, writes, finish)
        return self._newest

    def wait_for_newest(self, seconds=None):
        """Waits until no checkpoint is being written, or for so many seconds (float)."""
        if self._newest is not None:
            wait([self._newest], seconds)


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
