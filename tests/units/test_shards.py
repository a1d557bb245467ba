"""Sharded state that comes from anywhere executes nothing: torch would unpickle its index."""

import contextlib
import os
import pickle
import shutil
from pathlib import PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.fakes import accelerator
from torch.distributed.checkpoint import format_utils, metadata

from utils.run import checkpoint
from utils.run.failures import UserError
from utils.scale import patches, shards


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def poison(kind, folder):
    """Makes the index of a sharded checkpoint run or read something else."""
    index = folder / ".metadata"
    if kind == "index":
        index.write_bytes(pickle.dumps(Bomb(folder.parent / "executed")))
    elif kind == "constructor":  # a function that the module of the data classes imports
        index.write_bytes(b"ctorch.distributed.checkpoint.metadata\ndataclass\n(tR.")
    elif kind == "elsewhere":
        shutil.copy(folder / "__0_0.distcp", folder.parent / "outside")
        changed = pickle.loads(index.read_bytes())
        for location in changed.storage_data.values():
            location.relative_path = "../outside"
        index.write_bytes(pickle.dumps(changed))
    elif kind == "damaged":
        index.write_bytes(pickle.dumps("text"))
    elif kind == "missing":
        index.unlink()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("index", "is refused: loading it could execute code .its index refers to posix.system"),
        ("value", "could execute code .*unsupported GLOBAL posix.system"),
        ("constructor", "could execute code .its index refers to torch.distributed.checkpoint.met"),
        ("elsewhere", "could execute code .plain is not in a file of the checkpoint"),
        ("damaged", "could execute code ..metadata is not an index of sharded state"),
        ("missing", "does not fit this run: .Errno 2. No such file"),
        (None, None),
    ],
)
def test_a_poisoned_sharded_checkpoint_executes_nothing(kind, says, tmp_path, monkeypatch):
    folder, plain = tmp_path / "shards", [1, "two"]
    state = {
        "weight": torch.ones(3),
        "plain": Bomb(tmp_path / "executed") if kind == "value" else plain,
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    poison(kind, folder)
    loaded = {"weight": torch.zeros(3), "plain": None}

    def load_state(path, map_location):
        reader = dcp.FileSystemReader(path)  # the name by which Accelerate gets it
        dcp.load(loaded, storage_reader=reader, no_dist=True)

    for place in (dcp, format_utils):
        monkeypatch.setattr(place, "FileSystemReader", place.FileSystemReader)
    patches.read_shards_with(shards.Reader)
    mine = accelerator(load_state=load_state)
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        checkpoint.load(mine, folder)
    weight, there = ([0, 0, 0], None) if says else ([1, 1, 1], plain)
    assert loaded["weight"].tolist() == weight and loaded["plain"] == there
    assert not (tmp_path / "executed").exists()


def index_with(value, folder, change=lambda pickled: pickled):
    """Reads the index of sharded weights that has `value` in it, pickled as `change` says."""
    index = metadata.Metadata({}, planner_data=value, storage_data={})
    (folder / ".metadata").write_bytes(change(pickle.dumps(index, protocol=3)))
    return shards.Reader(folder).read_metadata().planner_data


def test_a_path_in_an_index_of_python_3_13_is_read(tmp_path):
    """It pickles `pathlib.PosixPath` as `pathlib._local.PosixPath`."""

    def as_newer(pickled):
        assert pickled.count(b"cpathlib\n") == 1
        return pickled.replace(b"cpathlib\n", b"cpathlib._local\n")

    assert index_with(PurePosixPath("a/b"), tmp_path, as_newer) == PurePosixPath("a/b")


class OfPython311:
    """What Python 3.11.0 to 3.11.3, that of Debian 12, pickles for a member of an enumeration."""

    def __init__(self, kind, name):
        self.parts = kind, name

    def __reduce__(self):
        return getattr, self.parts


def test_a_member_of_an_enumeration_is_read_and_no_other_attribute(tmp_path):
    kind = metadata._MEM_FORMAT_ENCODING
    for member in kind:
        assert index_with(OfPython311(kind, member.name), tmp_path) is member
    for wrong in (
        (kind, "__init__"),
        (metadata.Metadata, "__init__"),
        (kind.TORCH_CHANNELS_LAST, "name"),
    ):
        with pytest.raises(dcp.CheckpointException) as error:
            index_with(OfPython311(*wrong), tmp_path)
        assert isinstance(checkpoint.first_cause(error.value), pickle.UnpicklingError)
