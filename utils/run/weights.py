"""Writes the final weights to a safetensors file, and reads them again."""

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from utils.run import manifest
from utils.run.collectives import run_on_main
from utils.run.failures import UserError
from utils.run.files import regular_file, set_usual_mode, sync

# Of DDP and averaged weights, of torch.compile, and of classes that hold a model, such as
# Lightning's.
WRAPPERS = ("module", "_orig_mod", "model")


def export(folder, model, config):
    """Writes the weights of an unwrapped model to `model.safetensors` in `folder`, atomically.

    Unwrapped: no DDP and no compile wrapper.

    Args:
        config (dict): what is needed to build the model again, stored as JSON in the header of the
            file.
    """
    state, seen = {}, set()
    for name, value in model.state_dict().items():
        value = value.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, such as tied weights.
        state[name] = value.clone() if storage in seen else value
        seen.add(storage)
    temporary = Path(folder) / ".model.safetensors.writing"
    # One key only: safetensors writes several keys in an order that varies from run to run.
    save_file(state, temporary, metadata={"config": json.dumps(config, sort_keys=True)})
    set_usual_mode(temporary)
    sync(temporary)
    os.replace(temporary, Path(folder) / "model.safetensors")
    sync(folder)


def read(file):
    """Reads a `.safetensors` file (Path).

    Returns:
        tuple: tensors by plain name (dict), and the config of the model (dict | None).

    Raises:
        UserError: there is no such file, or it holds no weights. `utils/weight_files.py` reads
            other formats.
    """
    try:
        with safe_open(regular_file(file), framework="pt") as opened:
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            config = json.loads((opened.metadata() or {}).get("config", "null"))
    except (OSError, SafetensorError, ValueError) as error:
        reason = first_line(error) if file.exists() else "no such file"
        raise UserError(f"cannot read weights from {file}: {reason}") from None
    return unwrapped(state), config


def find(path):
    """The file `model.safetensors` of a run or a checkpoint; or `path` itself, if it is a file."""
    if not path.is_dir():
        return path
    checkpoints = manifest.all_in(path)
    if (path / "model.safetensors").exists() or manifest.read(path):
        return path / "model.safetensors"
    if not checkpoints:
        raise UserError(f"{path} holds neither model.safetensors nor a checkpoint")
    return checkpoints[-1] / "model.safetensors"


def initialize(accelerator, model, path):
    """Loads weights, and nothing else, into a model that is not prepared yet.

    Call it on every process. Only the main process loads them: `prepare` sends its weights to the
    others.

    Args:
        path (str | None): a run's folder, one of its checkpoints, or a `.safetensors` file; None:
            the model stays as it is.

    Raises:
        UserError: the file has no weights, or those of another model.
    """

    def load():
        file = find(Path(path))
        state, _ = read(file)
        check_fit(state, model.state_dict(), f"--init_from {path}: {file}")
        model.load_state_dict(state)
        print(f"{len(state)} tensors initialized from {file}")

    if path is not None:
        run_on_main(accelerator, load)


def check_fit(state, expected, place):
    """Raises UserError if tensors are not those of a model.

    Args:
        state, expected (dict): tensors by name.
        place: where `state` is from, for the message.
    """
    for name, value in expected.items():
        if name not in state:
            raise UserError(f"{place} holds another model: it has no {name}")
        if state[name].shape != value.shape:
            shapes = f"{list(state[name].shape)}, not {list(value.shape)}"
            raise UserError(f"{place} holds another model: its {name} is {shapes}")
    unknown = sorted(state.keys() - expected.keys())
    if unknown:
        raise UserError(f"{place} holds another model: this one has no {unknown[0]}")


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


def first_line(error):
    """The first line of an error's text, or its type."""
    return str(error).partition("\n")[0] or type(error).__name__
