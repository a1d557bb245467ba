"""Functions of train_gpt.py: its model, and the samples that it prints."""

import math

import pytest
import torch
from harness.data import Loader
from harness.fakes import accelerator
from harness.launches import load_script
from torch import nn


def test_no_prediction_depends_on_later_bytes():
    torch.manual_seed(0)
    model = load_script("train_gpt").GPT(n_layer=2, n_head=2, n_embd=16, block_size=12)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    text = torch.randint(256, (1, 12))
    other = text.clone()
    other[0, 6] = (text[0, 6] + 1) % 256
    with torch.no_grad():
        same = torch.isclose(model(text), model(other)).all(2)[0]
    assert same[:6].all() and not same[6:].any()


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
    first = {"inputs": torch.tensor([[0, 1, 2, 3]]), "targets": torch.tensor([[1, 2, 3, 4]])}
    last = {"inputs": torch.tensor([[254, 255, 6, 0]])}
    last["targets"] = torch.tensor([[255, 0, 9, -100]])  # the last window is short
    loader, model = Loader([first, last], range(2)), Bytes().train()
    alone = accelerator(gather_for_metrics=lambda values: values)
    metrics = script.evaluate(alone, model, loader, iter)
    right, wrong = -math.log(math.exp(4) / (math.exp(4) + 255)), math.log(math.exp(4) + 255)
    assert metrics["loss"] == pytest.approx((6 * right + wrong) / 7, rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / math.log(2))
    assert metrics["bytes"] == 7 and metrics["loss_standard_error"] > 0
    assert model.passes == [False, False] and model.training
    loader.dataset = range(3)
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
