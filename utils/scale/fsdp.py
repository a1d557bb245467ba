"""Checks a launch that shards the model (FSDP), shards it also on CPUs, and reads shards safely."""

import contextlib
import enum
import os
import pickle
import stat
from functools import partial
from pathlib import Path, PurePosixPath
from traceback import StackSummary

import accelerate
import torch
import torch.distributed.checkpoint as dcp
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.versions import is_torch_version
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from utils.run import launch
from utils.run.failures import UserError
from utils.scale import elastic, patches

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


def requested():
    """Whether the launcher's configuration asks for a sharded model (`distributed_type: FSDP`)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def set_up(on_cpu):
    """Refuses what is not supported.

    Call it before `Accelerator(...)`; without a sharded model it does nothing.

    Args: on_cpu (bool): what `launch.set_up` returned.

    Raises:
        UserError: FSDP1; tensor or context parallelism; hybrid sharding (HSDP) of a number of
            processes that does not fit, or may change; fp16; on a CPU also `fsdp_offload_params`.
    """
    config = launch.config_name()
    hybrid = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    if hybrid and (not requested() or any(_size(kind) > 1 for kind in ("TP", "CP", "SP"))):
        raise UserError(
            f"{config} asks for tensor, context or sequence parallelism, which these scripts do "
            "not support: shard the model with FSDP alone, as 8gpu_fsdp.yaml does"
        )
    if not requested():
        return
    if os.environ.get("FSDP_VERSION") != "2":
        raise UserError(
            f"{config} asks for FSDP1, which these scripts do not support: set fsdp_version: 2 in "
            "fsdp_config"
        )
    # The scripts build random weights on the main process only; others may be read in slices.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"
    if hybrid:
        _check_hybrid(config)
    if not on_cpu:
        if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":
            # Loading a checkpoint would also advance the gradient scaler (accelerate#4289).
            raise UserError(
                f"{config} shards the model in fp16, which is not supported: set mixed_precision: "
                'bf16, or "no" on GPUs older than Ampere (2020)'
            )
        return
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise UserError(
            f"{config} offloads parameters to CPU memory, but runs on the CPU: set "
            "fsdp_offload_params: false"
        )
    # Accelerate would refuse sizes on a CPU: there `configure` gives them.
    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"


def parts(accelerator):
    """The number of processes that share a copy of the model; 1: each has a whole one."""
    if not accelerator.is_fsdp2:
        return 1
    return _size("DP_SHARD") if _size("DP_REPLICATE") > 1 else accelerator.num_processes


def _size(kind):
    return int(os.environ.get(f"PARALLELISM_CONFIG_{kind}_SIZE", 1))


def _check_hybrid(config):
    copies, parts = _size("DP_REPLICATE"), _size("DP_SHARD")
    if elastic.machines():
        raise UserError(
            f"{config} makes a fixed number of copies of the model (dp_replicate_size), and the "
            "number of machines may change: give a fixed --nnodes, or shard without copies"
        )
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if parts == 1 or copies * parts != processes:
        raise UserError(
            f"{config} makes {copies} copies of the model (dp_replicate_size) in {parts} "
            f"parts (dp_shard_size), which does not fit {processes} processes: set them to "
            "the number of machines and of processes on each"
        )


def configure(accelerator):
    """Makes Accelerate shard the model if it should, and sets how; call it before `prepare`.

    Gradients are reduced in float32, and inputs stay as they are: by default Accelerate also
    reduces in bf16, and casts floating-point inputs. The state stays on the GPUs for whoever writes
    or copies it: by default Accelerate first copies all of it to memory that is not pinned.

    Raises:
        UserError: it does not shard the model.
    """
    if not requested():
        return
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        _shard_on_cpu(accelerator)
    if not accelerator.is_fsdp2:
        raise UserError(
            f"{launch.config_name()} asks for a sharded model, but accelerate "
            f"{accelerate.__version__} would not shard it on {accelerator.device.type}: install "
            "accelerate 1.15, or use 4gpu.yaml instead"
        )
    if accelerator.is_main_process:
        print(f"the model is sharded over {accelerator.num_processes} processes")
    patches.read_shards_with(Reader)
    plugin = accelerator.state.fsdp_plugin
    plugin.state_dict_config.offload_to_cpu = False
    if accelerator.mixed_precision == "bf16":
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )


def _shard_on_cpu(accelerator):
    """Selects FSDP, as Accelerate itself does on GPUs only, although it works over gloo (1.15)."""
    copies = _size("DP_REPLICATE")
    sizes = dict(dp_replicate_size=copies, dp_shard_size=accelerator.num_processes // copies)
    state = accelerator.state
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin()  # as the launcher's configuration says
    state.parallelism_config = ParallelismConfig(**sizes)
    # By default torch shards over the accelerator of the machine, such as that of a Mac.
    state.device_mesh = state.parallelism_config.get_device_mesh("cpu")


def blocks(model):
    """The layers (list) of the classes that a model names in `_no_split_modules`.

    Models of `transformers` name theirs. They are gathered and compiled one at a time.
    """
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [layer for layer in model.modules() if type(layer).__name__ in names]


def use_model_blocks(accelerator, model):
    """Chooses the layers that are gathered one at a time; call it before `prepare`.

    These are its `blocks`, unless the launcher's configuration has
    `fsdp_transformer_layer_cls_to_wrap`.

    Raises:
        UserError: the model has no such layer, or the configuration does not ask for layers: it
            would be gathered all at once.
    """
    if not accelerator.is_fsdp2:
        return
    plugin, name = accelerator.state.fsdp_plugin, type(model).__name__
    policy = plugin.auto_wrap_policy
    if isinstance(policy, partial):
        policy = policy.func
    if policy is not transformer_auto_wrap_policy:
        raise UserError(
            f"{name} would be gathered all at once: set fsdp_auto_wrap_policy: "
            "TRANSFORMER_BASED_WRAP in fsdp_config"
        )
    layer_classes = {type(layer).__name__ for layer in model.modules()}
    listed = plugin.transformer_cls_names_to_wrap
    missing = sorted(set(listed or []) - layer_classes)
    if missing:
        raise UserError(
            f"fsdp_transformer_layer_cls_to_wrap: {name} has no {missing[0]}: leave the field out"
        )
    block_classes = sorted(listed or {type(block).__name__ for block in blocks(model)})
    if not block_classes:
        raise UserError(
            f"{name} does not name its blocks, so it would be gathered all at once: set "
            "fsdp_transformer_layer_cls_to_wrap in fsdp_config to the class of a block"
        )
    plugin.transformer_cls_names_to_wrap = block_classes
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if tied and is_torch_version("<", "2.13"):
        raise UserError(
            f"torch {torch.__version__} unties the embeddings of this model under FSDP2: install "
            "torch 2.13 or later"
        )


@contextlib.contextmanager
def gathered(model):
    """While it is active, each process has the parameters that belong to no block.

    For methods other than `forward` that use them: FSDP gathers them only for a call of the model.
    Of a model that is not sharded, this changes nothing.
    """
    sharded = isinstance(model, FSDPModule)
    if sharded:
        model.unshard()
    try:
        yield
    finally:
        if sharded:
            model.reshard()


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
            value = super().find_class(module, name)
            if module != METADATA or getattr(value, "__module__", None) == METADATA:
                return value
        raise pickle.UnpicklingError(f"its index refers to {module}.{name}")
