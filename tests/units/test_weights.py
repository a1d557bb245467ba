"""Weights of any file: a run, a checkpoint, a sharded or an averaged one; none of it executes code."""

import io
import json
import os
import pickle
from pathlib import PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import metadata

from utils.run import manifest, model_card, shards, weights
from utils.run.failures import UserError


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
        one = type("One", (), dict(num_processes=1, process_index=0, is_local_main_process=True))
        target = writing.with_name("step_00000003")
        record = {"progress": {"step": 3, **progress}, "arguments": {"lr": 0.5}}
        files = manifest.hash_and_sync(one, writing)
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
        alone, other = type("One", (), dict(is_main_process=True, num_processes=1)), Tied()
        weights.initialize(alone, other, tmp_path / "once.safetensors")
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


def test_the_weights_of_a_checkpoint(checkpoint, tmp_path):
    save_file({"module.a": torch.ones(1)}, checkpoint.writing / "model.safetensors")
    (checkpoint.writing / weights.AVERAGED).write_bytes(b"")
    (checkpoint.writing / weights.AVERAGED).unlink()
    folder = checkpoint(config={"width": 3})
    for path in (folder, folder / "model.safetensors", tmp_path / "run"):
        saved = weights.read(path)
        assert list(saved.state) == ["a"] and saved.config == {"width": 3}
        assert saved.arguments == {"lr": 0.5} and saved.run == tmp_path / "run"
        assert saved.file == folder / "model.safetensors"
    copy = folder.rename(tmp_path / "copy")
    assert weights.read(copy).run == tmp_path


def test_averaged_weights_are_the_ones_that_count(checkpoint):
    model = torch.nn.Linear(1, 1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.module.weight.data.fill_(7.0)
    save_file(dict(model.state_dict()), checkpoint.writing / "model.safetensors")
    torch.save(averaged.state_dict(), checkpoint.writing / weights.AVERAGED)
    saved = weights.read(checkpoint())
    assert saved.state["weight"].item() == 7.0 and saved.state.keys() == {"weight", "bias"}


@pytest.mark.parametrize("state", [{"epoch": 3}, [1, 2]])
def test_another_registered_object_is_none_of_the_weights(state, checkpoint):
    save_file({"a": torch.ones(1)}, checkpoint.writing / "model.safetensors")
    torch.save(state, checkpoint.writing / weights.AVERAGED)
    assert weights.read(checkpoint()).state["a"].item() == 1.0


def test_sharded_weights(checkpoint, tmp_path):
    model = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}
    dcp.save({"model": model}, checkpoint_id=checkpoint.writing / weights.SHARDS, no_dist=True)
    folder = checkpoint(config={"width": 3})
    saved = weights.read(folder)
    assert torch.equal(saved.state["weight"], model["weight"]) and saved.config == {"width": 3}
    assert saved.state.keys() == model.keys()
    assert sorted(os.listdir(folder.parent)) == ["step_00000003"]  # nothing temporary is left
    assert torch.load.__module__ == "torch.serialization"
    (folder / weights.SHARDS).rename(tmp_path / "elsewhere")
    (folder / weights.SHARDS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is refused: it is a link"):
        weights.read(folder)


@pytest.mark.parametrize("place", ["averaged", "index", "value", "pickle"])
def test_nothing_that_is_read_executes_code(place, checkpoint, tmp_path):
    bomb, shards_of = Bomb(tmp_path / "executed"), checkpoint.writing / weights.SHARDS
    path = None
    if place == "averaged":
        save_file({"a": torch.ones(1)}, checkpoint.writing / "model.safetensors")
        torch.save({"n_averaged": bomb}, checkpoint.writing / weights.AVERAGED)
    elif place == "pickle":
        path = tmp_path / "model.pth"
        torch.save({"a": bomb}, path)
    else:
        state = {"model": {"a": torch.ones(2), "b": bomb if place == "value" else 1}}
        dcp.save(state, checkpoint_id=shards_of, no_dist=True)
        if place == "index":
            (shards_of / ".metadata").write_bytes(pickle.dumps(bomb))
    with pytest.raises(UserError, match="it would execute code when loaded: ") as caught:
        weights.read(path or checkpoint())
    assert not (tmp_path / "executed").exists() and "\n" not in str(caught.value)
    assert dcp.FileSystemReader is not shards.Reader


def test_an_index_keeps_its_other_data(checkpoint):
    """What torch's own reader gives to the rest of torch."""
    dcp.save({"a": torch.ones(2)}, checkpoint_id=checkpoint.writing, no_dist=True)
    reader = shards.Reader(checkpoint.writing)
    index = reader.read_metadata()
    assert index.storage_meta.load_id == reader.load_id
    assert list(index.state_dict_metadata) == ["a"]


def test_shards_that_cannot_be_read_are_one_line(checkpoint, tmp_path, monkeypatch):
    """Of whichever process the error is; and a run that may only be read is read."""
    state = {"model": {"a": torch.ones(2, 3)}}
    dcp.save(state, checkpoint_id=checkpoint.writing / weights.SHARDS, no_dist=True)
    folder = checkpoint()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    made = []
    temporary = weights.tempfile.TemporaryDirectory
    monkeypatch.setattr(
        weights.tempfile,
        "TemporaryDirectory",
        lambda dir: made.append(dir) or temporary(dir=tmp_path),
    )
    assert torch.equal(weights.read(folder).state["a"], torch.ones(2, 3)) and made == [None]
    (shard,) = (folder / weights.SHARDS).glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match=f"cannot read weights from .*{weights.SHARDS}: ") as caught:
        weights.read(folder)
    assert "no such file" not in str(caught.value)


def test_an_error_of_some_processes_is_theirs():
    for kind in (RuntimeError, OSError):
        with pytest.raises(kind, match="no a"), shards.safe_loading():
            raise dcp.CheckpointException("load", {3: (kind("no a"), None)})


def test_a_path_in_an_index_of_python_3_13_is_read():
    """It pickles `pathlib.PosixPath` as `pathlib._local.PosixPath`."""
    pickled = pickle.dumps(PurePosixPath("a/b"), protocol=2)
    assert pickled.count(b"cpathlib\n") == 1
    newer = pickled.replace(b"cpathlib\n", b"cpathlib._local\n")
    assert shards._Unpickler(io.BytesIO(newer)).load() == PurePosixPath("a/b")


class OfPython311:
    """What Python 3.11.0 to 3.11.3, that of Debian 12, pickles for a member of an enumeration."""

    def __init__(self, kind, name):
        self.parts = kind, name

    def __reduce__(self):
        return getattr, self.parts


def test_a_member_of_an_enumeration_is_read_and_no_other_attribute():
    kind = metadata._MEM_FORMAT_ENCODING
    for member in kind:
        pickled = pickle.dumps(OfPython311(kind, member.name))
        assert shards._Unpickler(io.BytesIO(pickled)).load() is member
    for wrong in (
        (kind, "__init__"),
        (metadata.Metadata, "__init__"),
        (kind.TORCH_CHANNELS_LAST, "name"),
    ):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            shards._Unpickler(io.BytesIO(pickle.dumps(OfPython311(*wrong)))).load()


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


# ---------------------------------------------------------------------------------------- the card


RECORD = {
    "arguments": {"dataset": "a_b", "batch_size": 1500},
    "command": ["scripts/train_it.py", "--lr", "1"],
    "topology": {"processes": 2, "device": "H200"},
}
RESULTS = {"train_seconds": 119.4, "global_step": 12000, "val_accuracy": 0.5, "test_loss": 1.25}
RESULTS |= {"val_top5": 0.75, "val_samples": 9, "train_loss": 3.0, "test_note": "x"}


def test_a_card(tmp_path):
    said = dict(title="A net", library="torchvision", task="image-classification")
    model_card.write(
        str(tmp_path), RECORD, RESULTS, **said, about="Two classes.", usage=" use it\n"
    )
    assert (tmp_path / "README.md").read_text() == (
        """---
library_name: torchvision
pipeline_tag: image-classification
tags:
- train_it
---

# A net

Trained with `train_it.py` on a\\_b: 12,000 optimizer steps of 1,500 samples, 119 s on 2 x H200.

| metric | value |
|---|---|
| val accuracy | 50.00% |
| test loss | 1.2500 |
| val top5 | 75.00% |

Two classes.

`args.json` has all arguments and versions, `results.json` all figures, and `metrics.jsonl`
their history. `model.safetensors` has the weights; the settings of the model are in its header, as
JSON.

## Use

use it
"""
    )


def test_a_card_of_a_script_that_says_nothing(tmp_path):
    record = {**RECORD, "arguments": {"batch_size": 1}}
    model_card.write(tmp_path, record, {**RESULTS, "train_seconds": 120.0})
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: pytorch\ntags:\n- train_it\n---\n\n# A model of tr")
    assert "Trained with `train_it.py`: 12,000 optimizer" in card and " 2 min on 2 x" in card
    assert "75.00% |\n\n`args.json` has" in card
    assert card.endswith('tensors = load_file("model.safetensors")  # name -> tensor\n```\n')
    data = {**RECORD, "arguments": {"batch_size": 1, "data": "mine", "dataset": "other"}}
    model_card.write(tmp_path, data, RESULTS)
    assert "`train_it.py` on mine: " in (tmp_path / "README.md").read_text()
