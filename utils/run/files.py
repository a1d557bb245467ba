"""Reads and writes files that survive a power cut: JSON, text, and the final weights."""

import errno
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from utils.run.failures import UserError


def regular_file(path):
    """The path (Path) of a file, or of a link to one: reading a pipe or a device could wait.

    Raises FileNotFoundError for nothing, and UserError for anything else.
    """
    path = Path(path)
    if not os.path.isfile(path):
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        kind = "folder" if path.is_dir() else "device, a pipe or a socket"
        raise UserError(f"{path} is not a file, but a {kind}")
    return path


def read_json(path):
    """Reads JSON from `path`; None if there is no such file. Raises UserError if it is damaged."""
    try:
        return json.loads(regular_file(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: restore it, or move it away") from None


def json_lines(path):
    """Yields the JSON values in the lines of `path`, up to one that is incomplete."""
    with open(path, "rb") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                return
            yield value


def write_json(path, value):
    """Writes `value` as JSON, atomically: a reader finds either the old file or the new one."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path, text):
    """Like `write_json`, for text."""
    path = Path(path)
    # Per process, as several may write the status.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    # Names of files may hold bytes that are not UTF-8: these are written as they are.
    with temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def write_weights(folder, model, config):
    """Writes the weights of an unwrapped model to `model.safetensors` in `folder`, atomically.

    Unwrapped: no DDP and no compile wrapper.

    Args: config (dict): what is needed to build the model again, for the header of the file.
    """
    # Copies, since safetensors refuses tensors that share memory, such as tied weights.
    how = dict(copy=True, memory_format=torch.contiguous_format)
    state = {name: value.to("cpu", **how) for name, value in model.state_dict().items()}
    temporary = Path(folder) / ".model.safetensors.writing"
    # One key only: safetensors writes several keys in an order that varies from run to run.
    save_file(state, temporary, metadata={"config": json.dumps(config, sort_keys=True)})
    set_usual_mode(temporary)
    sync(temporary)
    os.replace(temporary, Path(folder) / "model.safetensors")
    sync(folder)


def set_usual_mode(path):
    """Gives a file the permissions of any new file: safetensors lets only its owner read it."""
    mask = os.umask(0)  # the only way to read it sets it
    os.umask(mask)
    os.chmod(path, 0o666 & ~mask)


def sync(path):
    """Waits until a file, or the entries of a folder, are on disk and not only in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
