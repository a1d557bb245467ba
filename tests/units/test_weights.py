"""Weights of any file: a run, a checkpoint, a sharded or an averaged one; none of it executes code."""

import json
import os
import pickle
from pathlib import PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import fakes
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import metadata

from utils.run import manifest, weights
from utils.run.failures import UserError
from utils.scale import shards


class Bomb:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def checkpoint(tmp_path):
    """An empty checkpoint of a run; the function that completes it returns its folder."""
    writing = tmp_path / "run" / "checkpoints" / ".writing"
    writing.mkdir(parents=True)

    def complete(**progress):
        target = writing.with_name("step_00000003")
        record = {"progress": {"step": 3, **progress}, "arguments": {"lr": 0.5}}
        files = manifest.hash_and_sync(fakes.accelerator(), writing)
        manifest.complete(writing, target, {**record, "files": files})
        return target

    complete.writing = writing
    return complete


def test_what_is_exported(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(weights, "sync", lambda path: synced.append(str(path)))
    model = torch.nn.Linear(2, 3)
    model.weight.data = torch.randn(2, 3).t()  # not contiguous
    (tmp_path / "model.safetensors").write_bytes(b"an older one")
    weights.export(str(tmp_path), model, {"b": 1, "a": [2]})
    assert os.listdir(tmp_path) == ["model.safetensors"]
    file = tmp_path / "model.safetensors"
    assert synced == [str(tmp_path / ".model.safetensors.writing"), str(tmp_path)]
    assert torch.equal(load_file(file)["weight"], model.weight)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"config": '{"a": [2], "b": 1}'}
    before = file.read_bytes()
    weights.export(tmp_path, model, {"a": [2], "b": 1})
    assert file.read_bytes() == before


class Tied(torch.nn.Module):
    """A language model's embedding and head, which are one matrix."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(4)


def test_tied_weights_are_exported_under_both_names_and_read_from_one(tmp_path, capsys):
    model = Tied()
    weights.export(tmp_path, model, {})
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert torch.equal(saved["embed.weight"], saved["head.weight"])
    for removed in ("embed.weight", "head.weight"):  # as in what `save_state` writes
        once = {name: value for name, value in saved.items() if name != removed}
        save_file(once, tmp_path / "once.safetensors")
        other = Tied()
        weights.initialize(fakes.accelerator(), other, tmp_path / "once.safetensors")
        assert "4 of 4 tensors initialized" in capsys.readouterr().out
        assert torch.equal(other.head.weight, model.embed.weight)
        assert other.head.weight is other.embed.weight


def test_the_weights_of_a_run(tmp_path):
    weights.export(tmp_path, torch.nn.Linear(2, 3), {"model": "net"})
    saved = weights.read(tmp_path)
    assert (saved.config, saved.arguments, saved.run) == ({"model": "net"}, {}, tmp_path)
    assert saved.file == tmp_path / "model.safetensors" and list(saved.state) == ["bias", "weight"]
    (tmp_path / "args.json").write_text(json.dumps({"arguments": {"lr": 0.5}}))
    assert weights.read(tmp_path / "model.safetensors").arguments == {"lr": 0.5}
    save_file({"a": torch.ones(1)}, tmp_path / "plain.safetensors")
    assert weights.read(tmp_path / "plain.safetensors").config is None


def test_averaged_weights_are_the_ones_that_count(checkpoint):
    model = torch.nn.Linear(1, 1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.module.weight.data.fill_(7.0)
    save_file(dict(model.state_dict()), checkpoint.writing / "model.safetensors")
    torch.save(averaged.state_dict(), checkpoint.writing / weights.AVERAGED)
    saved = weights.read(checkpoint())
    assert saved.state["weight"].item() == 7.0 and saved.state.keys() == {"weight", "bias"}


def test_sharded_weights(checkpoint, tmp_path):
    model = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}
    dcp.save({"model": model}, checkpoint_id=checkpoint.writing / weights.SHARDS, no_dist=True)
    folder = checkpoint(config={"width": 3})
    saved = weights.read(folder)
    assert torch.equal(saved.state["weight"], model["weight"]) and saved.config == {"width": 3}
    assert saved.state.keys() == model.keys()
    assert sorted(os.listdir(folder.parent)) == ["step_00000003"]  # nothing temporary is left
    (folder / weights.SHARDS).rename(tmp_path / "elsewhere")
    (folder / weights.SHARDS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is refused: it is a link"):
        weights.read(folder)


@pytest.mark.parametrize("place", ["averaged", "shards", "pickle"])
def test_nothing_that_is_read_executes_code(place, checkpoint, tmp_path):
    bomb, path = Bomb(tmp_path / "executed"), None
    if place == "averaged":
        save_file({"a": torch.ones(1)}, checkpoint.writing / "model.safetensors")
        torch.save({"n_averaged": bomb}, checkpoint.writing / weights.AVERAGED)
    elif place == "pickle":
        path = tmp_path / "model.pth"
        torch.save({"a": bomb}, path)
    else:
        state = {"model": {"a": torch.ones(2), "b": bomb}}
        dcp.save(state, checkpoint_id=checkpoint.writing / weights.SHARDS, no_dist=True)
    with pytest.raises(UserError, match="it would execute code when loaded: ") as caught:
        weights.read(path or checkpoint())
    assert not (tmp_path / "executed").exists() and "\n" not in str(caught.value)
    assert dcp.FileSystemReader is not shards.Reader


def test_an_error_of_some_processes_is_theirs():
    for kind in (RuntimeError, OSError):
        with pytest.raises(kind, match="no a"), shards.safe_loading():
            raise dcp.CheckpointException("load", {3: (kind("no a"), None)})


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
        with pytest.raises(pickle.UnpicklingError):
            index_with(OfPython311(*wrong), tmp_path)


def test_without_weights_it_is_one_line(tmp_path):
    for path, says in (
        (tmp_path, "holds neither model.safetensors nor a checkpoint"),
        (tmp_path / "no.safetensors", "no such file"),
        (tmp_path / "no.pth", "no such file"),
    ):
        with pytest.raises(UserError, match=says):
            weights.read(path)
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match=r"cannot read weights from .*bad.safetensors: ") as caught:
        weights.read(tmp_path / "bad.safetensors")
    assert "no such file" not in str(caught.value)


def test_a_run_without_final_weights_has_those_of_its_newest_checkpoint(tmp_path):
    for step in (3, 12):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        manifest_of = {"progress": {"step": step, "config": {"width": step}}, "arguments": {}}
        (folder / manifest.MANIFEST).write_text(json.dumps(manifest_of))
        save_file({"module.bias": torch.full((2,), float(step))}, folder / "model.safetensors")
    saved = weights.read(tmp_path)
    assert saved.state["bias"].tolist() == [12, 12] and saved.config == {"width": 12}
    assert saved.run == tmp_path
