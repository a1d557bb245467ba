"""Checks a launch that shards the model (FSDP), and shards it on machines without GPUs, too."""

import contextlib
import os
from functools import partial

import accelerate
import torch
from accelerate.utils.versions import is_torch_version
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from utils.run import launch
from utils.run.failures import UserError
from utils.scale import elastic, patches


def requested():
    """Whether the launcher's configuration asks for a sharded model (`distributed_type: FSDP`)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def set_up(on_cpu):
    """Refuses what is not supported, and prepares sharding on a CPU.

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
    patches.shard_on_cpu()


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
    """Checks that Accelerate shards the model if it should, and sets how; call it before `prepare`.

    Gradients are reduced in float32, and inputs stay as they are: by default Accelerate also
    reduces in bf16, and casts floating-point inputs. The state stays on the GPUs for whoever writes
    or copies it: by default Accelerate first copies all of it to memory that is not pinned.

    Raises:
        UserError: it does not shard the model.
    """
    if not requested():
        return
    if not accelerator.is_fsdp2:
        raise UserError(
            f"{launch.config_name()} asks for a sharded model, but accelerate "
            f"{accelerate.__version__} would not shard it on {accelerator.device.type}: install "
            "accelerate 1.15, or use 4gpu.yaml instead"
        )
    if accelerator.is_main_process:
        print(f"the model is sharded over {accelerator.num_processes} processes")
    patches.read_shards_safely()
    plugin = accelerator.state.fsdp_plugin
    plugin.state_dict_config.offload_to_cpu = False
    if accelerator.mixed_precision == "bf16":
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )


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
    own = {type(layer).__name__ for layer in model.modules()}
    listed = plugin.transformer_cls_names_to_wrap
    missing = sorted(set(listed or []) - own)
    if missing:
        raise UserError(
            f"fsdp_transformer_layer_cls_to_wrap: {name} has no {missing[0]}: leave the field out"
        )
    found = sorted(listed or {type(block).__name__ for block in blocks(model)})
    if not found:
        raise UserError(
            f"{name} does not name its blocks, so it would be gathered all at once: set "
            "fsdp_transformer_layer_cls_to_wrap in fsdp_config to the class of a block"
        )
    plugin.transformer_cls_names_to_wrap = found
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
