"""The final weights of a run."""

import os

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from utils.run import weights


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
