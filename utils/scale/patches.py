"""The attributes of libraries that this project replaces: nothing else in it replaces any.

Each says why, and what would make it needless. `train_minimal.py` uses none.
"""

import contextlib
from multiprocessing.queues import Queue

import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import fsdp_utils, other
from torch.distributed.checkpoint import format_utils


@contextlib.contextmanager
def saving_with(save, save_file, save_shards):
    """Replaces the functions with which `accelerator.save_state` writes files, in a block.

    `save_state` has no asynchronous form (accelerate 1.15), and `dcp.async_save` writes a format
    that neither `accelerator.load_state` nor a reader of safetensors loads.
    """
    before = torch.save, other.safe_save_file, dcp.save
    try:
        torch.save, other.safe_save_file, dcp.save = save, save_file, save_shards
        yield
    finally:
        torch.save, other.safe_save_file, dcp.save = before


def read_shards_with(reader):
    """Replaces the class that reads sharded state: its index is a pickle, which executes code.

    That of torch loads it by `pickle.load` (torch 2.14).
    """
    dcp.FileSystemReader = format_utils.FileSystemReader = reader


def load_shards_with(load):
    """Replaces how a sharded model gets its weights in `prepare`: the main process sends all.

    Accelerate has no hook for that, though FSDP2 itself builds a model without memory, shards it
    and then loads it (accelerate 1.15).

    Args: load (Callable): called with the accelerator, the model, the state that the model had
        before it was sharded, and whether shards lie in memory of the CPU.
    """
    fsdp_utils.fsdp2_load_full_state_dict = load


def report_unsendable_batches(report):
    """Replaces what a loader worker does with a batch that it cannot send: it only prints.

    The loader would wait forever (cpython, `multiprocessing.queues.Queue`, a hook that is private).

    Args: report (Callable): called with the error and the batch.
    """
    Queue._on_queue_feeder_error = staticmethod(report)
