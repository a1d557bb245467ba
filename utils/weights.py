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

from utils import shards, topology
from utils.exits import UserError

SHARDS = "pytorch_model_fsdp_0"  # where Accelerate puts the weights of a sharded model


def export(folder, model, config):
    """Writes the weights of an unwrapped model (no DDP, no compile wrapper) to `model.safetensors` in `folder`, atomically.

    Args:
        config (dict): what is needed to build the model again, kept in the header of the file as JSON.
    """
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    temporary = Path(folder) / ".model.safetensors.writing"
    # One key only: the library writes several in an order that varies from run to run.
    save_file(state, temporary, metadata={"config": json.dumps(config, sort_keys=True)})
    os.replace(temporary, Path(folder) / "model.safetensors")


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


def initialize(accelerator, model, path):
    """Loads weights, and nothing else, into a model that is not prepared yet; call it on every process.

    Only the main process loads them: `prepare` sends its weights to the others, under DDP and FSDP alike. A last layer of
    another size keeps its fresh weights, and is named on the screen.

    Args:
        path (str | None): a run's folder, a checkpoint or a `.safetensors` file; None: the model stays as it is.

    Raises:
        UserError: the file holds no weights, or those of another model.
    """
    if path is not None:
        topology.run_on_main(accelerator, lambda: print(_load_into(model, path)))


def _load_into(model, path):
    state, _, file = read(path)
    own = model.state_dict()
    prefix = next(reversed(own)).rpartition(".")[0] + "."
    last_layer = [name for name in own if name.startswith(prefix)]
    fits = all(name in state and state[name].shape == own[name].shape for name in last_layer)
    replaced = [] if fits else last_layer
    for name, value in own.items():
        if name in replaced:
            continue
        if name not in state:
            raise UserError(f"--init_from {path}: {file} holds another model: it has no {name}")
        if state[name].shape != value.shape:
            shapes = f"{list(state[name].shape)}, not {list(value.shape)}"
            raise UserError(f"--init_from {path}: {file} holds another model: its {name} is {shapes}")
    unknown = sorted(name for name in state.keys() - own.keys() if not name.startswith(prefix))
    if unknown:
        raise UserError(f"--init_from {path}: {file} holds another model: this one has no {unknown[0]}")
    loaded = {name: state[name] for name in own if name not in replaced}
    model.load_state_dict(loaded, strict=False)
    fresh = f"; the last layer has another size and starts fresh: {', '.join(replaced)}" if replaced else ""
    return f"{len(loaded)} of {len(own)} tensors initialized from {file}{fresh}"


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
