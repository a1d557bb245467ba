"""Reads the weights of a model from one file: safetensors, or a pickle that executes no code."""

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch
from safetensors import safe_open

from utils.run import manifest
from utils.run.collectives import run_on_main
from utils.run.failures import UserError
from utils.run.files import read_json, regular_file

PICKLES = (".pth", ".pt", ".ckpt")
# Where the training scripts of torchvision and timm, of Lightning and many others, put the weights.
ENTRIES = ("model", "state_dict", "model_state_dict")
# Of DDP and averaged weights, of torch.compile, and of classes that hold a model, such as
# Lightning's.
WRAPPERS = ("module", "_orig_mod", "model")


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
    """Reads weights from a `.safetensors`, `.pth` or `.pt` file, or the `model.safetensors` of a
    run's folder or one of its checkpoints.

    Returns:
        Saved: the weights, the config of the model, and the arguments of the run.

    Raises:
        UserError: there is no such file, it holds no weights, or loading it would execute code.
    """
    file = _find(Path(path))
    try:
        state, config = _load_pickle(file) if file.suffix in PICKLES else _load_safetensors(file)
    except Exception as error:  # a damaged pickle raises errors of any type
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, UnpicklingError):
            reason = f"it would execute code when loaded: {reason}"
        elif isinstance(error, FileNotFoundError):
            reason = "no such file"
            if manifest.read(file.parent):
                reason = (
                    "the checkpoint is of a sharded run: finish the run and give its folder "
                    "(--init_from also takes the file that `accelerate merge-weights` makes)"
                )
        raise UserError(f"cannot read weights from {file}: {reason}") from None
    return _described(file, state, config)


def _find(path):
    """The `model.safetensors` of a run or its newest checkpoint; or `path` itself, if a file."""
    if not path.is_dir():
        return path
    if not ((path / "model.safetensors").exists() or manifest.read(path)):
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
    names = dict(zip(unwrapped(values), values, strict=True))
    weights = {names.get(name, name): value for name, value in unwrapped(state).items()}
    places = {value.data_ptr(): name for name, value in values.items() if name in weights}
    for name, value in values.items():  # a checkpoint has tied weights once
        if name not in weights and value.data_ptr() and value.data_ptr() in places:
            weights[name] = weights[places[value.data_ptr()]]
    return weights


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
    weights, state = model.state_dict(), fitted(state, model)
    last_layer = next(reversed(weights)).rpartition(".")[0] + "."

    def differs(name):
        return not (name in weights and name in state and state[name].shape == weights[name].shape)

    replaced = [name for name in weights if name.startswith(last_layer)]
    if not any(map(differs, replaced)):
        replaced = []
    expected = [name for name in weights if name not in replaced]
    others = [name for name in state if not name.startswith(last_layer)]
    wrong = [name for name in (*expected, *others) if differs(name)]
    if wrong:
        name, first = wrong[0], next(iter(state), "nothing")
        there = list(state[name].shape) if name in state else "missing"
        here = list(weights[name].shape) if name in weights else "missing"
        raise UserError(
            f"{place} holds another model: {name} is {there} there and {here} here (the first "
            f"weight there is {first})"
        )
    model.load_state_dict({name: state[name] for name in expected}, strict=False)
    message = f"{len(expected)} of {len(weights)} tensors initialized from {file}"
    if replaced:
        names = ", ".join(replaced)
        message += f"; the last layer, for other classes, keeps its initial weights: {names}"
    return message


def unwrapped(state):
    """The state (dict) of the model inside its wrappers.

    Removes their prefixes where all names have them, and the name that `torch.compile` gives to a
    part of a model.
    """
    state = {name.replace("._orig_mod.", "."): value for name, value in state.items()}
    while True:
        prefix = next(iter(state), "").partition(".")[0] + "."
        shared = all(name.startswith(prefix) for name in state)
        if not shared or prefix[:-1] not in WRAPPERS:
            return state
        state = {name.removeprefix(prefix): value for name, value in state.items()}


def _load_safetensors(file):
    """The tensors (dict) in a file, by plain name, and the config of the model (dict | None)."""
    with safe_open(regular_file(file), framework="pt") as opened:
        state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        config = json.loads((opened.metadata() or {}).get("config", "null"))
    return unwrapped(state), config


def _load_pickle(file):
    """The weights in a file of `torch.save`, which may hold more; executes no code; no config."""
    state = torch.load(regular_file(file), map_location="cpu", weights_only=True)
    for key in ENTRIES:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    values = state.values() if isinstance(state, dict) and state else [None]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise ValueError("it does not hold the weights of a model by their names")
    return unwrapped(state), None
