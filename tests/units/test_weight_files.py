"""Weights of any file: sharded, averaged, pickled, with another last layer; none executes code."""

import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import fakes
from safetensors.torch import load_file, save_file

from utils import weight_files
from utils.run import files, manifest
from utils.run.failures import UserError


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


def build(classes=3):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, classes))


def sevens(prefix=""):
    """Weights of `build()`, all of them 7."""
    state = build().state_dict().items()
    return {f"{prefix}{name}": torch.full_like(value, 7.0) for name, value in state}


def equal(layers, others):
    pairs = zip(layers.parameters(), others.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("classes", "loaded"), [(3, 4), (7, 2)])
def test_a_last_layer_of_another_size_keeps_its_weights(classes, loaded, tmp_path, capsys):
    file, model = tmp_path / "weights.safetensors", build(classes)
    save_file(sevens(), file)
    weight_files.initialize(fakes.accelerator(), model, str(file))
    assert (model[0].weight == 7).all() and (model[0].bias == 7).all()
    said = capsys.readouterr().out
    assert said.startswith(f"{loaded} of 4 tensors initialized from {file}")
    keeps = "; the last layer, for other classes, keeps its initial weights: 2.weight, 2.bias\n"
    assert said.endswith(keeps) == equal(model[2], build(classes)[2]) == (loaded == 2)


class Wrapped(torch.nn.Module):
    """Holds a model as `model`, as many training scripts do."""

    def __init__(self):
        super().__init__()
        self.model = build()


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [("", ".pth"), ("model.", ".pt"), ("module._orig_mod.", ".ckpt"), ("module.", ".safetensors")],
)
@pytest.mark.parametrize("make", [build, Wrapped])
def test_the_prefix_of_a_wrapper_does_not_matter(prefix, suffix, make, tmp_path):
    path, state = tmp_path / f"weights{suffix}", sevens(prefix)
    if suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if suffix == ".ckpt" else state, path)
    model = make()
    weight_files.initialize(fakes.accelerator(), model, str(path))
    assert all((value == 7).all() for value in model.state_dict().values())


def test_a_file_that_holds_anything_else_is_one_line(tmp_path):
    path = tmp_path / "w.pth"
    torch.save(build().state_dict(), path)
    whole = path.read_bytes()
    for content in (
        *([1, 2], {}, {"model": {"a": 3}}, "text"),
        *(b"", b"\x80\x02", whole[: len(whole) // 2], b"\x80\x02}q\x00X\xff.", b"not a pickle"),
    ):
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        with pytest.raises(UserError, match=r"cannot read weights from [^\n]+\Z"):
            weight_files.read(path)
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 100)
    for name, says in (
        ("none.pth", "no such file"),
        ("no.safetensors", "no such file"),
        ("bad.safetensors", r"cannot read weights from .*bad.safetensors: (?!no such)"),
        (".", "holds neither model.safetensors nor a checkpoint"),
    ):
        with pytest.raises(UserError, match=says):
            weight_files.read(tmp_path / name)


class Tied(torch.nn.Module):
    """A language model's embedding and head, which are one matrix."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(4)


def test_tied_weights_are_exported_under_both_names_and_read_from_one(tmp_path, capsys):
    model = Tied()
    files.write_weights(tmp_path, model, {})
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["embed.weight"], saved["head.weight"])
    for removed in ("embed.weight", "head.weight"):  # as in what `save_state` writes
        once = {name: value for name, value in saved.items() if name != removed}
        save_file(once, tmp_path / "once.safetensors")
        other = Tied()
        weight_files.initialize(fakes.accelerator(), other, tmp_path / "once.safetensors")
        assert "4 of 4 tensors initialized" in capsys.readouterr().out
        assert torch.equal(other.head.weight, model.embed.weight)
        assert other.head.weight is other.embed.weight


def test_sharded_weights(checkpoint, tmp_path):
    model = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2).bfloat16()}
    dcp.save({"model": model}, checkpoint_id=checkpoint.writing / weight_files.SHARDS, no_dist=True)
    folder = checkpoint(config={"width": 3})
    saved = weight_files.read(folder)
    assert torch.equal(saved.state["weight"], model["weight"]) and saved.config == {"width": 3}
    assert saved.state.keys() == model.keys() and saved.state["bias"].dtype == torch.bfloat16
    assert sorted(os.listdir(folder.parent)) == ["step_00000003"]  # nothing temporary is left
    (folder / weight_files.SHARDS).rename(tmp_path / "elsewhere")
    (folder / weight_files.SHARDS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is refused: it is a link"):
        weight_files.read(folder)


@pytest.mark.parametrize("place", ["averaged", "shards", "pickle"])
def test_nothing_that_is_read_executes_code(place, checkpoint, tmp_path):
    bomb, path = fakes.Bomb(tmp_path / "executed"), None
    if place == "averaged":
        save_file({"a": torch.ones(1)}, checkpoint.writing / "model.safetensors")
        torch.save({"n_averaged": bomb}, checkpoint.writing / weight_files.AVERAGED)
    elif place == "pickle":
        path = tmp_path / "model.pth"
        torch.save({"a": bomb}, path)
    else:
        state = {"model": {"a": torch.ones(2), "b": bomb}}
        dcp.save(state, checkpoint_id=checkpoint.writing / weight_files.SHARDS, no_dist=True)
    if place == "shards":  # only tensors are read
        assert weight_files.read(checkpoint()).state.keys() == {"a"}
    else:
        with pytest.raises(UserError, match=r"it would execute code when loaded: [^\n]+\Z"):
            weight_files.read(path or checkpoint())
    assert not (tmp_path / "executed").exists()


def test_the_final_weights_of_a_run(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append(str(path)))
    model, file = torch.nn.Linear(2, 3), tmp_path / "model.safetensors"
    model.weight.data = torch.randn(2, 3).t()  # not contiguous
    file.write_bytes(b"an older one")
    files.write_weights(str(tmp_path), model, {"b": 1, "a": [2]})
    assert os.listdir(tmp_path) == [file.name]
    assert synced == [str(tmp_path / ".model.safetensors.writing"), str(tmp_path)]
    (tmp_path / "another").touch()
    assert file.stat().st_mode == (tmp_path / "another").stat().st_mode
    before = file.read_bytes()
    files.write_weights(tmp_path, model, {"a": [2], "b": 1})
    assert file.read_bytes() == before
    saved = weight_files.read(tmp_path)
    assert saved[1:] == ({"a": [2], "b": 1}, {}, {}, file, tmp_path)
    assert list(saved.state) == ["bias", "weight"]
    assert torch.equal(saved.state["weight"], model.weight)
    (tmp_path / "args.json").write_text(json.dumps({"arguments": {"lr": 0.5}}))
    assert weight_files.read(file).arguments == {"lr": 0.5}
    plain = {"model.a": torch.ones(1), "module.b": torch.ones(1)}  # parts, and no wrappers
    save_file(plain, tmp_path / "plain.safetensors")
    saved = weight_files.read(tmp_path / "plain.safetensors")
    assert saved.config is None and saved.state.keys() == plain.keys()


def test_a_run_without_final_weights_has_those_of_its_newest_checkpoint(tmp_path):
    """The averaged ones, if it averages them."""
    model = torch.nn.Linear(1, 1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for step, expected in ((3, 3), (12, 12), (13, 7)):
        writing = tmp_path / "checkpoints" / ".writing"
        writing.mkdir(parents=True)
        save_file({"module.bias": torch.full((1,), float(step))}, writing / "model.safetensors")
        if step == 13:
            averaged.module.bias.data.fill_(7.0)
            torch.save(averaged.state_dict(), writing / weight_files.AVERAGED)
        record = {"progress": {"step": step, "config": {"width": step}}, "arguments": {}}
        manifest.complete(writing, writing.with_name(f"step_{step:08d}"), record)
        saved = weight_files.read(tmp_path)
        assert saved.state["bias"].tolist() == [expected] and saved.config == {"width": step}
        assert saved.run == tmp_path and saved.state.keys() <= {"weight", "bias"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"0.bias": None}, " holds another model: it has no 0.bias"),
        ({"0.bias": torch.zeros(6)}, r" its 0.bias is \[6\], not \[5\]"),
        ({"extra": torch.zeros(6)}, "this one has no extra"),
        ("backbone.", r"all its names begin with `backbone\.`"),
    ],
)
def test_another_model_is_refused(change, says, tmp_path):
    model, file = build(), tmp_path / "a.safetensors"
    state = sevens(change) if isinstance(change, str) else sevens() | change
    save_file({name: value for name, value in state.items() if value is not None}, file)
    with pytest.raises(UserError, match=f"^--init_from [^\n]*{says}[^\n]*\\Z"):
        weight_files.initialize(fakes.accelerator(), model, file)
    assert equal(model, build())
