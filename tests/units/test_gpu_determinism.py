"""How models avoid the operations that GPUs do not compute twice in the same way."""

import pytest
import torch

from utils import compilation
from utils.images import pretrained


@pytest.mark.parametrize("deterministic", [True, False])
def test_attention_is_deterministic_unless_nobody_asked_for_it(deterministic, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *how: calls.append(how))
    compilation.make_attention_deterministic()
    assert calls == [(True,)] * deterministic
    calls.clear()
    with torch.device("meta"):
        pretrained.build(dict(model="alexnet", class_names=["a", "b"]))
    assert calls == [(True,)] * deterministic  # its pooling is an error then
