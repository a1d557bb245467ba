"""Reads and writes small files, and makes sure that they survive a power cut."""

import json
import os
from pathlib import Path

from utils.exits import UserError


def read_json(path):
    """Reads JSON from `path`; None if there is no such file. Raises UserError if it is damaged."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{path} is damaged: restore it, or move it away") from None


def read_json_lines(path):
    """Reads the JSON values in the lines of `path`, up to one that is incomplete because its writer was killed."""
    values = []
    for line in Path(path).read_text().splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:
            break
    return values


def write_json(path, value):
    """Writes `value` as JSON, atomically: a reader finds either the complete old file or the complete new one."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path, text):
    """Like `write_json`, for text."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")  # per process, as several may write the status
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(path):
    """Waits until a file, or the entries of a folder, are on disk and not only in the memory of this machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
