"""The attributes of libraries that this project replaces: nothing else in it replaces any.

Each says why, and what would make it needless. `train_minimal.py` uses none.
"""

import contextlib
from functools import wraps
from multiprocessing.queues import Queue

import torch
import torch.distributed.checkpoint as dcp
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, fsdp_utils, other
from torch.distributed.checkpoint import format_utils
from torch.distributed.device_mesh import init_device_mesh


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
    """Replaces the class that reads sharded state.

    That of torch loads its index by `pickle.load`, which executes code (torch 2.14).
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


def shard_on_cpu():
    """Makes Accelerate select FSDP for processes on the CPU, as it does on GPUs.

    FSDP2 works over gloo in both PyTorch and Accelerate. But Accelerate 1.15 does not select it on
    a CPU: `AcceleratorState` switches to FSDP only if the distributed type is that of several GPUs,
    and keeps DDP for processes on the CPU. And it does not say that the model is there.
    """
    decide = AcceleratorState.__init__

    @wraps(decide)
    def decide_for_cpu_too(self, *args, fsdp_plugin=None, **kwargs):
        decide(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = (
                DistributedType.FSDP
            )
            self.fsdp_plugin = fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = decide_for_cpu_too
    shard = torch.distributed.fsdp.fully_shard

    @wraps(shard)
    def shard_there(module, *, mesh=None, **options):
        # By default torch shards over the accelerator of the machine, such as that of a Mac.
        mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        return shard(module, mesh=mesh, **options)

    torch.distributed.fsdp.fully_shard = shard_there
