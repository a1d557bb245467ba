"""Reads weights in any format: safetensors, pickles, checkpoints of any topology."""

import json
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from utils.run import manifest
from utils.run.checkpoint import CheckpointException, first_cause
from utils.run.collectives import run_on_main
from utils.run.failures import UserError
from utils.run.files import read_json, regular_file
from utils.scale.patches import Reader

PICKLES = (".pth", ".pt", ".ckpt")
SHARDS = "pytorch_model_fsdp_0"  # where Accelerate saves the weights of a sharded model
AVERAGED = "custom_checkpoint_0.pkl"  # where it saves the first registered object
# Where the training scripts of torchvision and timm, of Lightning and many others, put the weights.
ENTRIES = ("model", "state_dict", "model_state_dict")
# Of DDP and averaged weights, of torch.compile, and of classes that hold a model, such as
# Lightning's.
WRAPPERS = ("module", "_orig_mod", "model")
DAMAGE = (OSError, EOFError, RuntimeError, ValueError, SafetensorError)


class Saved(NamedTuple):
    """Weights, and what is known about them.

    Attributes:
        state (dict): tensors by plain name.
        config (dict | None): what is needed to build the model again.
        arguments (dict): those of the run that wrote it; {} if they are not known.
        data (dict): what else it depends on, such as a checksum of the data set.
        file (Path): where the weights are.
        run (Path): the folder of the run, or that of the file.
    """

    state: dict
    config: dict | None
    arguments: dict
    data: dict
    file: Path
    run: Path


def read(path):
    """Reads weights from a run's folder, one of its checkpoints, a `.safetensors`, `.pth` or `.pt`.

    Any topology may have written them. Of a checkpoint of a run that averages its weights
    with an `AveragedModel`, these are the averaged ones, as they are in the run's final weights.

    Returns:
        Saved: the weights, the config of the model, and the arguments of the run.

    Raises:
        UserError: there is no such file, it holds no weights, or loading it would execute code.
    """
    file = _find(Path(path))
    sharded = (file.parent / SHARDS).exists() and not file.exists()
    place = file.parent / SHARDS if sharded else file
    try:
        if sharded:
            state, config = _read_shards(place), None
        elif file.suffix in PICKLES:
            state, config = _read_pickle(file), None
        else:
            state, config = _read_safetensors(file)
        return _described(file, _read_averaged(file.parent) or state, config)
    except (Exception, CheckpointException) as error:
        cause = first_cause(error)
        reason = str(cause).partition("\n")[0] or type(cause).__name__
        reason = reason if place.exists() else "no such file"
        if isinstance(cause, UnpicklingError):
            reason = f"it would execute code when loaded: {reason}"
        elif not isinstance(cause, DAMAGE):
            if file.suffix not in PICKLES:  # a damaged one raises errors of any type
                raise
            reason = f"it is damaged ({type(cause).__name__})"
        raise UserError(f"cannot read weights from {place}: {reason}") from None


def _find(path):
    """The file `model.safetensors` of a run or a checkpoint; or `path` itself, if it is a file."""
    if not path.is_dir():
        return path
    whole = any((path / name).exists() for name in ("model.safetensors", SHARDS))
    if not (whole or manifest.read(path)):
        checkpoints = manifest.all_in(path)
        if not checkpoints:
            raise UserError(f"{path} holds neither model.safetensors nor a checkpoint")
        path = checkpoints[-1]
    return path / "model.safetensors"


def _described(file, state, config):
    """The weights of a file as `Saved`, with what its folder says about them."""
    folder, saved = file.parent, manifest.read(file.parent)
    run, record = folder, saved
    if saved is None:
        record = read_json(folder / "args.json") or {}
    else:  # a checkpoint: runs/NAME/checkpoints/step_N, or a copy of it
        run = folder.parents[1] if folder.parent.name == "checkpoints" else folder.parent
        config = config or saved["progress"].get("config")
    return Saved(state, config, record.get("arguments", {}), record.get("data", {}), file, run)


def _read_safetensors(file):
    """The tensors of a file, by plain name, and the config of the model (dict | None)."""
    with safe_open(regular_file(file), framework="pt") as opened:
        state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        config = json.loads((opened.metadata() or {}).get("config", "null"))
    return unwrapped(state), config


def _read_averaged(folder):
    """The averaged weights that were registered for checkpointing; None without any."""
    if not (folder / AVERAGED).exists():
        return None
    saved = torch.load(regular_file(folder / AVERAGED), map_location="cpu", weights_only=True)
    if not isinstance(saved, dict) or "n_averaged" not in saved:
        return None
    return unwrapped({name: value for name, value in saved.items() if name != "n_averaged"})


def initialize(accelerator, model, path):
    """Loads weights, and nothing else, into a model that is not prepared yet.

    Call it on every process.

    Only the main process loads them: `prepare` sends its weights to the others, under DDP and FSDP
    alike. If the last layer has another size, it keeps its initial weights, and a message names it.

    Args:
        path (str | None): as for `read`; None: the model stays as it is.

    Raises:
        UserError: the file has no weights, or those of another model.
    """

    def load():
        saved = read(path)
        print(load_into(model, saved.state, f"--init_from {path}: {saved.file}", saved.file))

    if path is not None:
        run_on_main(accelerator, load)


def fitted(state, model):
    """`state` under the names of `model`, which may have wrappers that `state` lacks."""
    values = model.state_dict()
    own = dict(zip(unwrapped(values), values, strict=True))
    found = {own.get(name, name): value for name, value in unwrapped(state).items()}
    places = {value.data_ptr(): name for name, value in values.items() if name in found}
    for name, value in values.items():  # a checkpoint has tied weights once
        if name not in found and value.data_ptr() and value.data_ptr() in places:
            found[name] = found[places[value.data_ptr()]]
    return found


def load_into(model, state, place, file):
    """Loads weights into a model.

    If its last layer is missing or has another size, it keeps its initial weights.

    Args:
        state (dict): tensors by name.
        place, file: where they are from, for an error and for the message.

    Returns:
        str: a message about what was loaded.

    Raises:
        UserError: they are those of another model.
    """
    own, state = model.state_dict(), fitted(state, model)
    wrapper, other = shared_prefix(state), f"{place} holds another model"
    if wrapper and wrapper != shared_prefix(own):
        other = f"{place} (all its names begin with `{wrapper}`) holds another model"
    last_layer = next(reversed(own)).rpartition(".")[0] + "."
    replaced = [name for name in own if name.startswith(last_layer)]
    if all(name in state and state[name].shape == own[name].shape for name in replaced):
        replaced = []
    expected = {name: value for name, value in own.items() if name not in replaced}
    for name, value in expected.items():
        if name not in state:
            raise UserError(f"{other}: it has no {name}")
        if state[name].shape != value.shape:
            shapes = f"{list(state[name].shape)}, not {list(value.shape)}"
            raise UserError(f"{other}: its {name} is {shapes}")
    unknown = [name for name in state if name not in own and not name.startswith(last_layer)]
    if unknown:
        raise UserError(f"{other}: this one has no {min(unknown)}")
    model.load_state_dict({name: state[name] for name in expected}, strict=False)
    said = f"{len(expected)} of {len(own)} tensors initialized from {file}"
    if replaced:
        names = ", ".join(replaced)
        said += f"; the last layer, for other classes, keeps its initial weights: {names}"
    return said


def unwrapped(state):
    """The state (dict) of the model inside its wrappers.

    Removes their prefixes where all names have them, and the name that `torch.compile` gives to a
    part of a model.
    """
    state = {name.replace("._orig_mod.", "."): value for name, value in state.items()}
    while prefix := shared_prefix(state, WRAPPERS):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def shared_prefix(state, allowed=None):
    """The first part of all names, such as `module.`; None if there is none, or none `allowed`."""
    firsts = {name.partition(".")[0] if "." in name else None for name in state}
    first = firsts.pop() if len(firsts) == 1 else None
    return f"{first}." if first and (allowed is None or first in allowed) else None


def _read_shards(folder):
    manifest.refuse_links(folder)
    reader = Reader(folder)
    state = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in reader.read_metadata().state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }
    with warnings.catch_warnings(action="ignore"):  # one says that this process loads alone
        dcp.load(state, storage_reader=reader, no_dist=True)
    return unwrapped(state)


def _read_pickle(file):
    """The weights in a file of `torch.save`, which may hold more; executes no code."""
    state = torch.load(regular_file(file), map_location="cpu", weights_only=True)
    for key in ENTRIES:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    values = state.values() if isinstance(state, dict) and state else [None]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise ValueError("it does not hold the weights of a model by their names")
    return unwrapped(state)
