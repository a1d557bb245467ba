"""Muon, and that a step in fp16 is taken or skipped as a whole, by every optimizer."""

from types import SimpleNamespace

import pytest
import torch
from harness.worlds import run_guards

from utils.muon import MuonAdamW, MuonSGD

MUON = dict(muon=True, momentum=0.9, beta2=0.95)


@pytest.mark.parametrize(
    "build",
    [
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
        lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
        lambda weights: MuonSGD([dict(params=weights, weight_decay=0.1, **MUON)], lr=0.1),
        lambda weights: MuonAdamW([dict(params=weights, **MUON)], lr=0.1),
    ],
)
def test_a_step_whose_gradients_overflow_changes_nothing(build):
    """A fused optimizer by itself would be called, without the host knowing what it did."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    torch.manual_seed(0)
    scaled, plain = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    with_scaler, without = build([scaled]), build([plain])
    prepared = [SimpleNamespace(optimizer=with_scaler)]
    run_guards(1, lambda *_: None, scaler=scaler, optimizers=prepared)
    taken = set()
    with_scaler.register_step_post_hook(lambda *_: taken.add(step))
    for step in range(4):
        gradient = torch.randn(3, 2)
        scaler.scale(torch.zeros(()))  # as `backward` does; makes the scale a tensor
        scaled.grad = gradient * scaler.get_scale()
        if step == 2:
            scaled.grad[1, 1] = float("inf")
        else:
            plain.grad = gradient.clone()
            without.step()
        assert scaler.step(with_scaler, lambda: 7) == (7 if step != 2 else None)
        scaler.update()
        with_scaler.zero_grad()
        assert torch.equal(scaled, plain)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(with_scaler, closure=lambda: 7)
    assert taken == {0, 1, 3} and scaler.get_scale() == 2.0
    states = (optimizer.state_dict()["state"][0] for optimizer in (with_scaler, without))
    ours, theirs = states
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(torch.as_tensor(ours[k]), torch.as_tensor(theirs[k])) for k in ours)


def test_muon_raises_its_momentum_as_documented_also_after_a_restart():
    """With a gradient of ones the average is 1 - (the product of all momenta)."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))

    def optimizer():
        return MuonAdamW([dict(params=[weight], lr=0.1, muon=True, momentum=(0.5, 0.9, 4))])

    muon = optimizer()
    for step in range(6):
        if step == 3:
            saved, muon = muon.state_dict(), optimizer()
            muon.load_state_dict(saved)
        weight.grad = torch.ones(2, 2)
        muon.step()
    expected = torch.full((2, 2), 1 - 0.5 * 0.6 * 0.7 * 0.8 * 0.9 * 0.9)
    assert torch.allclose(muon.state[weight]["momentum"], expected)


def test_muon_with_beta2_changes_all_rows_by_the_same_amount():
    """But not those of a group without it, and not those of a gradient of zero."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((4, 8), (8, 4), (8, 4), (4, 4))]
    for weight in weights[:3]:
        weight.grad = torch.randn(weight.shape)
    weights[3].grad = torch.zeros(4, 4)  # as in the first step, behind a weight of zero
    common = dict(muon=True, weight_decay=0.0, momentum=0.9)
    even = dict(params=[weights[i] for i in (0, 1, 3)], beta2=0.95, **common)
    MuonAdamW([even, dict(params=[weights[2]], **common)], lr=0.1).step()
    for weight, same in zip(weights, (True, True, False, True), strict=True):
        norms = weight.detach().norm(dim=1)
        assert torch.allclose(norms, norms[:1]) == same
    assert not weights[3].any()


def test_muon_treats_filters_as_matrices_and_leaves_the_rest_to_the_other_optimizer():
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(4, 8, 3)
    before, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    filters = dict(
        params=[layer.weight], weight_decay=0.0, muon=True, momentum=0.6, fixed_norm=True
    )
    optimizer = MuonSGD(
        [filters, dict(params=[layer.bias], lr=0.5, muon=False)], lr=0.1, momentum=0.9
    )
    layer(torch.randn(2, 4, 8, 8)).square().sum().backward()
    gradient = layer.bias.grad.clone()
    optimizer.step()
    step = layer.weight.detach() - before * 8**0.5 / before.norm()
    values = torch.linalg.svdvals(step.flatten(1)) / 0.1
    assert values.min() > 0.6 and values.max() < 1.3
    assert torch.allclose(layer.bias, bias - 0.5 * gradient)
