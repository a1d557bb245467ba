"""The final weights of a run: what is written, and what is read as the weights of a model."""

import os

import pytest
import torch
from harness import fakes
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from utils.run import weights
from utils.run.failures import UserError


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


def test_tied_weights_are_exported_under_both_names(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    weights.export(tmp_path, model, {})
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == {"0.weight", "1.weight"}
    assert torch.equal(saved["0.weight"], saved["1.weight"])


def test_without_weights_it_is_one_line(tmp_path):
    for path, says in (
        (tmp_path, "holds neither model.safetensors nor a checkpoint"),
        (tmp_path / "no.safetensors", "no such file"),
    ):
        with pytest.raises(UserError, match=says):
            weights.read(weights.find(path))
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match=r"cannot read weights from .*bad.safetensors: ") as caught:
        weights.read(tmp_path / "bad.safetensors")
    assert "no such file" not in str(caught.value)


def build():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))


@pytest.fixture
def file(tmp_path):
    """Weights of `build()`, all of them 7, in wrappers."""
    state = {
        f"module._orig_mod.{k}": torch.full_like(v, 7.0) for k, v in build().state_dict().items()
    }
    save_file(state, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def test_a_model_begins_with_the_weights_of_a_file(file, capsys):
    model = build()
    weights.initialize(fakes.accelerator(), model, None)
    assert not (model[0].weight == 7).any()
    weights.initialize(fakes.accelerator(), model, str(file))
    assert all((value == 7).all() for value in model.state_dict().values())
    assert capsys.readouterr().out == f"4 tensors initialized from {file}\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("0.bias"), "it has no 0.bias"),
        (lambda state: state.update({"0.bias": torch.zeros(6)}), r"its 0.bias is \[6\], not \[5\]"),
        (lambda state: state.update({"extra": torch.zeros(6)}), "this one has no extra"),
    ],
)
def test_another_model_is_refused(change, says, tmp_path):
    model, state = build(), build().state_dict()
    change(state)
    save_file({name: value + 1 for name, value in state.items()}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=f"^--init_from .* holds another model: {says}"):
        weights.initialize(fakes.accelerator(), model, tmp_path / "a.safetensors")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), build().parameters(), strict=True)
    )
