"""The attributes of libraries that this project replaces: nothing else in it replaces any.

Each says why, and what would make it needless. `train_minimal.py` uses none.
"""

import contextlib
import enum
import pickle
import stat
from functools import wraps
from multiprocessing.queues import Queue
from pathlib import Path, PurePosixPath
from traceback import StackSummary

import torch
import torch.distributed.checkpoint as dcp
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, fsdp_utils, other
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.device_mesh import init_device_mesh

# The module that defines the data classes of an index; a later release may add some.
METADATA = "torch.distributed.checkpoint.metadata"
# What else an index may refer to: module -> names.
KNOWN = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


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


def read_shards_safely():
    """Replaces the class that reads sharded state: its index is a pickle, which executes code.

    That of torch loads it by `pickle.load` (torch 2.14).
    """
    dcp.FileSystemReader = format_utils.FileSystemReader = Reader


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


class Reader(dcp.FileSystemReader):
    """Reads sharded state; its index may refer only to data classes and to files beside it."""

    def read_metadata(self, *args, **options):
        """Reads the index, and checks what it refers to.

        Raises:
            CheckpointException: torch passes it on. At an `Exception` it would look for an index of
                this process alone, and then forget why it did.
        """
        path = Path(self._get_metadata_path(options.get("rank")))
        try:
            with path.open("rb") as file:
                index = _Unpickler(file).load()
            self._check(index)
        except (OSError, pickle.UnpicklingError) as error:
            raise _failure(error) from None
        except (AttributeError, EOFError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"{path.name} is not an index of sharded state: {error}"
            raise _failure(pickle.UnpicklingError(reason)) from None
        if getattr(index, "storage_meta", None) is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index

    def _check(self, index):
        if type(index.storage_data) is not dict or type(index.state_dict_metadata) is not dict:
            # Another type could return other items to torch than here.
            raise TypeError("it does not hold plain dictionaries")
        for key, location in index.storage_data.items():
            if getattr(location, "transform_descriptors", None):
                raise pickle.UnpicklingError(f"{key.fqn} is stored with a transform")
            name = location.relative_path
            beside = isinstance(name, str) and PurePosixPath(name).name == name
            if not (beside and stat.S_ISREG((Path(self.path) / name).lstat().st_mode)):
                raise pickle.UnpicklingError(f"{key.fqn} is not in a file of the checkpoint")


def _failure(error):
    return dcp.CheckpointException("read its index", {0: (error, StackSummary())})


def _member(kind, name):
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 pickles as getattr(kind, name)."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"its index refers to getattr of {kind!r}")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        module = "pathlib" if module == "pathlib._local" else module  # of Python 3.13
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == METADATA or name in KNOWN.get(module, ()):
            found = super().find_class(module, name)
            if module != METADATA or getattr(found, "__module__", None) == METADATA:
                return found
        raise pickle.UnpicklingError(f"its index refers to {module}.{name}")
