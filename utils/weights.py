"""Writes the final weights to a safetensors file with plain parameter names, and reads weights from runs and checkpoints."""

import json
import os
import tempfile
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from utils import shards, topology
from utils.exits import UserError
from utils.files import sync

SHARDS = "pytorch_model_fsdp_0"  # the folder in which Accelerate saves the weights of a sharded model


def export(folder, model, config):
    """Writes the weights of an unwrapped model (no DDP, no compile wrapper) to `model.safetensors` in `folder`, atomically.

    Args:
        config (dict): what is needed to build the model again, stored as JSON in the header of the file.
    """
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    temporary = Path(folder) / ".model.safetensors.writing"
    # One key only: safetensors writes several keys in an order that varies from run to run.
    save_file(state, temporary, metadata={"config": json.dumps(config, sort_keys=True)})
    sync(temporary)
    os.replace(temporary, Path(folder) / "model.safetensors")
    sync(folder)


def read(path):
    """Reads weights from a run's folder, one of its checkpoints, or a `.safetensors` file, written by any topology.

    Returns:
        tuple[dict, dict | None, Path]: tensors by plain name; the config, or None if the file has none, as in a checkpoint
        (its manifest has the arguments of the run); the file.

    Raises:
        UserError: there is no such file, it holds no weights, or loading it would execute code.
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
        reason = "no such file" if not file.exists() else error
        raise UserError(f"cannot read weights from {file}: {reason}") from None
    return state, config, file


def initialize(accelerator, model, path):
    """Loads weights, and nothing else, into a model that is not prepared yet; call it on every process.

    Only the main process loads them: `prepare` sends its weights to the others, under DDP and FSDP alike. If the last
    layer has another size, it keeps its initial weights, and a message names it.

    Args:
        path (str | None): a run's folder, a checkpoint or a `.safetensors` file; None: the model stays as it is.

    Raises:
        UserError: the file has no weights, or those of another model.
    """
    if path is not None:
        topology.run_on_main(accelerator, lambda: print(_read_into(model, path)))


def _read_into(model, path):
    state, _, file = read(path)
    return load_into(model, state, f"--init_from {path}: {file}", file)


def load_into(model, state, place, file):
    """Loads weights into a model. If its last layer is missing or has another size, it keeps its initial weights.

    Args:
        state (dict): tensors by name.
        place, file: where they are from, for an error and for the message.

    Returns:
        str: a message about what was loaded.

    Raises:
        UserError: they are those of another model.
    """
    own = model.state_dict()
    prefix = next(reversed(own)).rpartition(".")[0] + "."
    last_layer = [name for name in own if name.startswith(prefix)]
    same_size = all(name in state and state[name].shape == own[name].shape for name in last_layer)
    replaced = [] if same_size else last_layer
    for name, value in own.items():
        if name in replaced:
            continue
        if name not in state:
            raise UserError(f"{place} holds another model: it has no {name}")
        if state[name].shape != value.shape:
            shapes = f"{list(state[name].shape)}, not {list(value.shape)}"
            raise UserError(f"{place} holds another model: its {name} is {shapes}")
    unknown = sorted(name for name in state.keys() - own.keys() if not name.startswith(prefix))
    if unknown:
        raise UserError(f"{place} holds another model: this one has no {unknown[0]}")
    loaded = {name: state[name] for name in own if name not in replaced}
    model.load_state_dict(loaded, strict=False)
    note = f"; the last layer, for other classes, keeps its initial weights: {', '.join(replaced)}" if replaced else ""
    return f"{len(loaded)} of {len(own)} tensors initialized from {file}{note}"


def _read_shards(folder):
    shards.refuse_code(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent.parent) as temporary:  # not in /tmp, which may be small
        merged = Path(temporary) / "merged.pt"
        dcp_to_torch_save(folder, merged)
        state = torch.load(merged, weights_only=True)["model"]
    return {_plain(name): value for name, value in state.items()}


def _plain(name):
    for wrapper in ("module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name
