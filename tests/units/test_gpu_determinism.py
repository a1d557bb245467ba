"""Which operations GPUs compute twice in the same way, and how the models avoid the others."""

import re

import pytest
import torch
from harness.data import kinds_of_classifiers
from harness.gpu_rules import FORBIDDEN, NOT_DETERMINISTIC, Rules
from harness.launches import some_slow

from utils import compilation
from utils.images import pretrained


def test_the_documented_list_of_pytorch_is_the_known_one():
    """A release that adds an operation has to be looked at."""
    page = torch.use_deterministic_algorithms.__doc__
    listed = page.partition(":class:`RuntimeError` when ``mode=True``:")[2].partition("In addition")
    names = re.findall(r"^ +\* :(?:class|func):`torch\.([\w.]+)`", listed[0], re.MULTILINE)
    assert set(names) == NOT_DETERMINISTIC.keys()
    assert all(hasattr(torch.ops.aten, name.removeprefix("aten::")) for name in FORBIDDEN)


KINDS = kinds_of_classifiers()
SLOW = set(KINDS) - {"alexnet", "vgg11", "squeezenet1_0"}
ADAPTIVE = ("alexnet", "vgg11")  # their pooling: --nondeterministic trains them


@pytest.mark.parametrize("name", some_slow(KINDS, *SLOW))
def test_a_step_of_every_classifier_is_deterministic_on_gpus(name):
    model = pretrained.without_weights(name)
    side = 224 if "vit" in name else 288
    with Rules() as rules, torch.random.fork_rng():
        images = torch.empty(2, 3, side, side, device="meta")
        rules.place(images)
        model(images).sum().backward()
    assert len(rules.operations) > 10
    assert bool(rules.operations & FORBIDDEN) == (name in ADAPTIVE)


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
