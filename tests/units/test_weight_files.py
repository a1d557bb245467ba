"""Weights of any file: safetensors or pickles, with another last layer; none executes code."""

import json
import os

import pytest
import torch
from harness import fakes
from safetensors.torch import load_file, save_file

from utils import weight_files
from utils.run import files, manifest
from utils.run.failures import UserError


class Wrapped(torch.nn.Module):
    """Holds a model as `model`, as many training scripts do."""

    def __init__(self):
        super().__init__()
        self.model = build()


def build(classes=3):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, classes))


def sevens(prefix=""):
    """Weights of `build()`, all of them 7."""
    state = build().state_dict().items()
    return {f"{prefix}{name}": torch.full_like(value, 7.0) for name, value in state}


def initialized(model, path):
    """How many weights of a model are 7 after it was initialized from a file."""
    weight_files.initialize(fakes.accelerator(), model, str(path))
    return sum(bool((value == 7).all()) for value in model.parameters())


def test_a_last_layer_of_another_size_keeps_its_weights(tmp_path, capsys):
    file = tmp_path / "weights.safetensors"
    save_file(sevens(), file)
    keeps = "; the last layer, for other classes, keeps its initial weights: 2.weight, 2.bias\n"
    for classes, loaded, end in ((3, 4, f"{file}\n"), (7, 2, keeps)):
        model = build(classes)
        assert initialized(model, file) == loaded and (model[0].bias == 7).all()
        said = capsys.readouterr().out
        assert said.startswith(f"{loaded} of 4 tensors initialized from {file}")
        assert said.endswith(end)


def test_the_prefix_of_a_wrapper_does_not_matter(tmp_path):
    prefixes = {
        ".pth": "",
        ".pt": "model.",
        ".ckpt": "module._orig_mod.",
        ".safetensors": "module.",
    }
    for suffix, prefix in prefixes.items():
        path, state = tmp_path / f"weights{suffix}", sevens(prefix)
        if suffix == ".safetensors":
            save_file(state, path)
        else:
            torch.save({"state_dict": state, "epoch": 3} if suffix == ".ckpt" else state, path)
        assert initialized(build(), path) == initialized(Wrapped(), path) == 4


def test_a_file_that_holds_anything_else_is_one_line_and_executes_nothing(tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"a": fakes.Bomb(tmp_path / "executed")}, path)
    with pytest.raises(UserError, match=r"it would execute code when loaded: [^\n]+\Z"):
        weight_files.read(path)
    assert not (tmp_path / "executed").exists()
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


def test_tied_weights_are_exported_under_both_names_and_read_from_one(tmp_path):
    model = Tied()
    files.write_weights(tmp_path, model, {})
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["embed.weight"], saved["head.weight"])
    for removed in ("embed.weight", "head.weight"):  # as in what `save_state` writes
        once = {name: value for name, value in saved.items() if name != removed}
        save_file(once, tmp_path / "once.safetensors")
        other = Tied()
        initialized(other, tmp_path / "once.safetensors")
        assert torch.equal(other.head.weight, model.embed.weight)
        assert other.head.weight is other.embed.weight


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
    for step in (3, 12):
        writing = tmp_path / "checkpoints" / ".writing"
        writing.mkdir(parents=True)
        save_file({"module.bias": torch.full((1,), float(step))}, writing / "model.safetensors")
        record = {"progress": {"step": step, "config": {"width": step}}, "arguments": {}}
        folder = writing.with_name(f"step_{step:08d}")
        manifest.complete(writing, folder, record)
        saved = weight_files.read(tmp_path)
        assert saved.state["bias"].tolist() == [step] and saved.config == {"width": step}
        assert saved.run == tmp_path and saved.state.keys() == {"bias"}
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="of a sharded run: finish the run and give its folder"):
        weight_files.read(tmp_path)


def test_another_model_is_refused(tmp_path):
    file = tmp_path / "a.safetensors"
    for state, says in (
        ({"0.bias": None}, r" holds another model: 0.bias is missing there and \[5\] here"),
        ({"0.bias": torch.zeros(6)}, r" 0.bias is \[6\] there and \[5\] here"),
        ({"extra": torch.zeros(6)}, r"extra is \[6\] there and missing here"),
        (sevens("backbone."), r"the first weight there is backbone\.0\."),
    ):
        changed = state if len(state) > 1 else sevens() | state
        save_file({name: value for name, value in changed.items() if value is not None}, file)
        model = build()
        with pytest.raises(UserError, match=f"^--init_from [^\n]*{says}[^\n]*\\Z"):
            initialized(model, file)
        pairs = zip(model.parameters(), build().parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
