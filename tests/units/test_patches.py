"""What replaces attributes of libraries: it gets all that they are given, and executes nothing."""

import contextlib
import pickle
import shutil
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.fakes import Bomb, accelerator
from torch.distributed.checkpoint import format_utils, metadata

from utils.run import checkpoint
from utils.run.failures import UserError
from utils.scale import patches
from utils.scale.patches import DistributedType


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
        ("index", "is refused: loading it could execute code .its index refers to posix.mkdir"),
        ("value", "could execute code .*unsupported GLOBAL posix.mkdir"),
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
    patches.read_shards_safely()
    mine = accelerator(load_state=load_state)
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        checkpoint.load(mine, folder)
    weight, there = ([0, 0, 0], None) if says else ([1, 1, 1], plain)
    assert loaded["weight"].tolist() == weight and loaded["plain"] == there
    assert not (tmp_path / "executed").exists()


class OfPython311:
    """What Python 3.11.0 to 3.11.3, that of Debian 12, pickles for a member of an enumeration."""

    def __init__(self, kind, name):
        self.parts = kind, name

    def __reduce__(self):
        return getattr, self.parts


FORMATS = metadata._MEM_FORMAT_ENCODING


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (PurePosixPath("a/b"), PurePosixPath("a/b")),
        *((OfPython311(FORMATS, member.name), member) for member in FORMATS),
        (OfPython311(FORMATS, "__init__"), None),
        (OfPython311(metadata.Metadata, "__init__"), None),
        (OfPython311(FORMATS.TORCH_CHANNELS_LAST, "name"), None),
    ],
)
def test_an_index_of_another_python_is_read_and_no_other_attribute(value, read, tmp_path):
    pickled = pickle.dumps(metadata.Metadata({}, planner_data=value, storage_data={}), protocol=3)
    # As Python 3.13 pickles it.
    (tmp_path / ".metadata").write_bytes(pickled.replace(b"cpathlib\n", b"cpathlib._local\n"))
    if read is not None:
        assert patches.Reader(tmp_path).read_metadata().planner_data == read
        return
    with pytest.raises(dcp.CheckpointException) as error:
        patches.Reader(tmp_path).read_metadata()
    assert isinstance(checkpoint.first_cause(error.value), pickle.UnpicklingError)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_processes_on_the_cpu_shard_if_they_are_asked_to(precision, monkeypatch):
    """Over the CPU, also on a machine that has another device, as a Mac has."""

    class State:
        distributed_type = DistributedType.MULTI_CPU

        def __init__(self, *args, **options):
            self.given = args, options
            self.__dict__["_mixed_precision"] = options.get("precision", "no")

    monkeypatch.setattr(patches, "AcceleratorState", State)
    monkeypatch.setattr(patches, "PartialState", SimpleNamespace(**{"_shared_state": {}}))
    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", lambda *args, **how: (args, how))
    monkeypatch.setattr(patches, "init_device_mesh", lambda *args: args)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    patches.shard_on_cpu()
    asked = []
    plugin = SimpleNamespace(set_mixed_precision=asked.append)
    made = State("here", fsdp_plugin=plugin, precision=precision)
    assert made.given == (("here",), {"fsdp_plugin": plugin, "precision": precision})
    assert made.distributed_type == DistributedType.FSDP and made.fsdp_plugin is plugin
    assert asked == ([] if precision == "no" else [precision])
    plain = State("here")
    assert plain.distributed_type == DistributedType.MULTI_CPU
    assert plain.given == (("here",), {"fsdp_plugin": None})
    shard = torch.distributed.fsdp.fully_shard
    assert shard("model", reshard=True) == (("model",), {"mesh": ("cpu", (3,)), "reshard": True})
    assert shard("model", mesh="given") == (("model",), {"mesh": "given"})
