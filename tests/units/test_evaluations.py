"""Views of images, sizes, bytes and samples of text; that scores are exact is in tests/properties."""

import math
from types import SimpleNamespace

import pytest
import torch
from harness.data import Loader
from harness.fakes import accelerator
from harness.launches import load_script
from torch import nn

from utils.language.text import Windows
from utils.run.failures import UserError


def test_views_are_weighted_and_mirrored():
    """Half of the weight for the image, a quarter for each shift by a pixel, with its mirror image."""
    script, seen = load_script("train_cifar"), []

    def model(x):
        seen.append(x)
        return x.flatten(1)[:, :5]

    images = torch.arange(2 * 3 * 36).view(2, 3, 6, 6).float()
    outputs = script.predict_views(model, images)
    padded = nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
    up, down = padded[:, :, :6, :6], padded[:, :, 2:, 2:]
    views = [images, images.flip(3), up, up.flip(3), down, down.flip(3)]
    assert all(torch.equal(a, b) for a, b in zip(seen, views, strict=True))
    weights = (0.25, 0.25, 0.125, 0.125, 0.125, 0.125)
    expected = sum(w * view.flatten(1)[:, :5] for w, view in zip(weights, views, strict=True))
    assert torch.equal(outputs, expected)


def test_the_image_size_grows():
    size = load_script("train_cifar").image_size_at
    fast = SimpleNamespace(model="fastnet", lr_schedule="linear")
    assert [size(p, fast) for p in (0.01, 0.6, 0.61, 0.8, 0.81, 1)] == [24, 24, 28, 28, 32, 32]
    assert size(0.1, SimpleNamespace(model="net", lr_schedule="linear")) == 32
    assert size(0.1, SimpleNamespace(model="fastnet", lr_schedule="constant")) == 32


class Bytes(nn.Module):
    """Logits of the next byte: 4 for the present one plus 1. Notes whether it is training."""

    def __init__(self):
        super().__init__()
        self.passes = []

    def forward(self, x, targets):
        self.passes.append(self.training)
        scores = 4.0 * nn.functional.one_hot((x + 1) % 256, 256).flatten(0, 1)
        losses = nn.functional.cross_entropy(scores, targets.flatten(), reduction="none")
        return losses.view_as(targets)


def test_every_held_out_byte_counts_once():
    script = load_script("train_gpt")
    text = Windows(torch.arange(8, dtype=torch.uint8), 4)  # seven bytes are predicted
    first = {"inputs": torch.tensor([[0, 1, 2, 3]]), "targets": torch.tensor([[1, 2, 3, 4]])}
    last = {"inputs": torch.tensor([[254, 255, 6, 0]])}
    last["targets"] = torch.tensor([[255, 0, 9, -100]])  # the last window is short
    loader, model = Loader([first, last], text), Bytes().train()
    alone = accelerator(gather_for_metrics=lambda values: values)
    metrics = script.evaluate(alone, model, loader, iter)
    right, wrong = -math.log(math.exp(4) / (math.exp(4) + 255)), math.log(math.exp(4) + 255)
    assert metrics["loss"] == pytest.approx((6 * right + wrong) / 7, rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / math.log(2))
    assert metrics["bytes"] == 7 and metrics["loss_standard_error"] > 0
    assert model.passes == [False, False] and model.training
    loader.dataset = Windows(torch.arange(10, dtype=torch.uint8), 4)
    with pytest.raises(RuntimeError, match="evaluated 2 of 3 held-out windows"):
        script.evaluate(alone, model, loader, iter)


@pytest.mark.parametrize("training", [True, False])
def test_sampling_changes_nothing_of_training(training):
    """Neither its random numbers nor whether dropout is on."""
    script = load_script("train_gpt")
    torch.manual_seed(0)
    model = script.GPT(n_layer=1, n_head=1, n_embd=8, block_size=8, dropout=0.5).train(training)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    before = torch.get_rng_state()

    def sample(seed):
        return script.generate(model, "ab", length=20, temperature=0.8, seed=seed)

    text = sample(3)
    assert torch.equal(torch.get_rng_state(), before) and model.training == training
    assert text.startswith("ab") and text == sample(3) != sample(4)


def test_patience_needs_a_validation_split(monkeypatch):
    script = load_script("train_lm")
    data = SimpleNamespace(held_out="test")
    monkeypatch.setattr(script, "local_main_first", lambda *_: data)
    monkeypatch.setattr(script, "agree", lambda *_: "")
    names = ("subset", "loss_on", "block_size", "val_fraction", "seed")
    args = dict.fromkeys(names) | {"dataset": "a", "streaming": False, "patience": 1}
    with pytest.raises(UserError, match="--patience needs a validation split"):
        script.load_data(None, None, True, SimpleNamespace(**args))
