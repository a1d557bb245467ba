"""Final weights: one safetensors file with plain names and the same bytes for the same weights, and how to read any of ours."""

import json
import os
import tempfile
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from utils import shards
from utils.exits import UserError

SHARDS = "pytorch_model_fsdp_0"  # where Accelerate puts the weights of a sharded model


def export(path, model, config):
    """Writes the weights of a bare model (no DDP, no compile wrapper) to `path`, atomically.

    Args:
        config (dict): what is needed to build the model again, kept in the file's header as JSON.
    """
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    beside = path.with_name(f".{path.name}.writing")
    # One key only: the library writes several in an order that varies from run to run.
    save_file(state, beside, metadata={"config": json.dumps(config, sort_keys=True)})
    os.replace(beside, path)


def read(path):
    """Reads weights from a run's folder, one of its checkpoints, or a `model.safetensors`, whatever topology wrote them.

    Returns:
        tuple[dict, dict | None, Path]: tensors by plain name; the config, or None if the file has none (a
        checkpoint's: see `args.json` of its run); the file they came from.

    Raises:
        UserError: there is no such file, or it holds no weights, or code.
    """
    path = Path(path)
    if path.is_dir():
        file = path / "model.safetensors"
        if not file.exists() and not (path / SHARDS).exists():
            checkpoints = sorted(path.glob("checkpoints/step_*"))
            if not checkpoints:
                raise UserError(f"{path} holds neither model.safetensors nor a checkpoint")
            file = checkpoints[-1] / "model.safetensors"
    else:
        file = path
    try:
        if (file.parent / SHARDS).exists() and not file.exists():
            return _read_shards(file.parent / SHARDS), None, file
        with safe_open(file, framework="pt") as opened:
            state = {_plain(name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            config = json.loads((opened.metadata() or {}).get("config", "null"))
    except (OSError, SafetensorError, RuntimeError, ValueError, UnpicklingError) as error:
        raise UserError(f"cannot read weights from {file}: {error}") from None
    return state, config, file


def _read_shards(folder):
    shards.refuse_code(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent.parent) as beside:  # not /tmp: it may be small
        whole = Path(beside) / "whole.pt"
        dcp_to_torch_save(folder, whole)
        state = torch.load(whole, weights_only=True)["model"]
    return {_plain(name): value for name, value in state.items()}


def _plain(name):
    for wrapper in ("module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name
