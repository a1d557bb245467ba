"""Muon: its steps by hand, and what its updates are on every device."""

import pytest
import torch
from harness.worlds import group_of_one
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from utils import muon

MUON = dict(muon=True, momentum=0.9, beta2=0.95)


def test_steps_of_muon_by_hand_also_after_a_restart():
    """Momentum that rises, an orthogonal update, decay, and a scale for tall matrices.

    Only in the second step do the gradient and its average point in different directions.
    """
    torch.manual_seed(0)
    shapes = ((6, 2), (3, 4), (6, 2))
    tall, wide, unused = (nn.Parameter(torch.ones(*shape, dtype=torch.float64)) for shape in shapes)

    def optimizer():
        group = dict(params=[unused, tall, wide], muon=True, momentum=(0.5, 0.9, 4))
        return muon.MuonSGD([group | dict(weight_decay=0.2, iterations=3)], lr=0.1)

    ours = optimizer()
    expected = {weight: weight.detach().clone() for weight in (tall, wide)}
    momenta = {weight: torch.zeros_like(weight) for weight in expected}
    for step, kept in enumerate((0.5, 0.6, 0.7, 0.8, 0.9, 0.9)):
        if step == 3:
            saved, ours = ours.state_dict(), optimizer()
            ours.load_state_dict(saved)
        for weight, scale in ((tall, 3**0.5), (wide, 1)):
            gradient = torch.randn_like(weight)
            weight.grad = gradient.clone()
            momenta[weight] = kept * momenta[weight] + (1 - kept) * gradient
            update = (1 - kept) * gradient + kept * momenta[weight]
            update = muon.orthogonalize(update[None], 3)[0]
            expected[weight] = (1 - 0.1 * 0.2) * expected[weight] - 0.1 * scale * update
        ours.step()
        for weight in expected:
            assert torch.allclose(weight, expected[weight]) and weight.grad is None
            assert torch.allclose(ours.state[weight]["momentum"], momenta[weight])
            assert ours.state[weight]["step"] == step + 1
    assert torch.equal(unused, torch.ones_like(unused))


@pytest.mark.parametrize("shape", [(4, 4), (4, 6), (4, 11), (11, 4)])
def test_an_orthogonal_matrix_has_singular_values_near_one(shape):
    torch.manual_seed(0)
    x = torch.randn(3, *shape, dtype=torch.float64)
    values = torch.linalg.svdvals(muon.orthogonalize(x))
    assert values.min() > 0.3 and values.max() < 1.3
    # Whatever the size of the matrix, also a tiny one.
    assert torch.allclose(muon.orthogonalize(x * 1e-3), muon.orthogonalize(x), atol=1e-9)
    slow = x / x.norm(dim=(1, 2), keepdim=True)
    for _ in range(5):
        gram = slow @ slow.mT if shape[0] <= shape[1] else slow.mT @ slow
        factor = 3.4445 * torch.eye(len(gram[0])) - 4.7750 * gram + 2.0315 * gram @ gram
        slow = factor @ slow if shape[0] <= shape[1] else slow @ factor
    assert torch.allclose(muon.orthogonalize(x), slow, atol=1e-9)


def test_a_gpu_computes_filters_of_as_many_outputs_together_and_in_half_precision(monkeypatch):
    found, baddbmm = [], torch.baddbmm

    def noted(first, second, third, **factors):
        if first is second:  # once in each iteration
            found.append((len(first), first.dtype))
        return baddbmm(first, second, third, **factors)

    monkeypatch.setattr(torch, "baddbmm", noted)

    def products(device, beta2=None):
        found.clear()
        with FakeTensorMode():
            filters = [torch.empty(4, width, 3, 3, device=device) for width in (2, 5)]
            matrices = [torch.empty(4, width, device=device) for width in (8, 9)]
            updates = filters if beta2 else [*filters, *matrices]
            results = muon.orthogonalize_all(updates, 1, beta2, [{} for _ in updates])
            assert [result.shape for result in results] == [update.shape for update in updates]
        return list(found)

    half, single = torch.float16, torch.float32
    assert products("cuda") == [(2, half), (1, half), (1, half)]
    assert {kind for _, kind in products("cpu")} == {single}
    assert all(count == 1 for count, _ in products("cpu"))
    # Which normalizes rows of one shape.
    assert products("cuda", beta2=0.9) == [(1, half)] * 2


def test_a_sharded_matrix_moves_as_a_whole_one():
    torch.manual_seed(0)
    whole = [torch.randn(4, 6), torch.randn(4, 6)]
    with group_of_one():
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Shard(0), Shard(1)):
            sharded = [DTensor.from_local(x, mesh, [placement]) for x in whole]
            results = muon.orthogonalize_all(sharded, 3)
            for result, expected in zip(results, muon.orthogonalize_all(whole, 3), strict=True):
                assert isinstance(result, DTensor) and result.placements == (placement,)
                assert result.shape == (4, 6) and result.device_mesh is mesh
                assert result.stride() == expected.stride()
                assert torch.equal(result.to_local(), expected)


def test_rows_of_an_update_are_normalized_by_their_running_mean():
    """But not those of a group without `beta2`, and not those of a gradient of zero."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 8), (8, 4), (8, 4), (4, 4))]
    for weight, scale in zip(weights, (1, 1, 1, 0), strict=True):
        weight.grad = scale * torch.randn(weight.shape)
    plain = MUON | dict(weight_decay=0.0, beta2=None)
    groups = [dict(params=[weights[i] for i in (0, 1, 3)], **plain | dict(beta2=0.95))]
    muon.MuonAdamW([*groups, dict(params=[weights[2]], **plain)], lr=0.1).step()
    for weight, same in zip(weights, (True, True, False, True), strict=True):
        norms = weight.detach().norm(dim=1)
        assert torch.allclose(norms, norms[:1]) == same
    assert not weights[3].any()
    first, second = torch.randn(2, 4, 8, dtype=torch.float64)
    state = {}
    (normal,) = muon.normalize_rows([state], [1e-3 * first], 0.9)
    assert torch.allclose(normal.norm(dim=1), 1e-3 * first.norm() / 2, rtol=1e-6)
    normal, _ = muon.normalize_rows([state, {}], [second, first], 0.9)
    squares = 0.9 * 0.1 * (1e-3 * first).square().sum(1) + 0.1 * second.square().sum(1)
    expected = second / squares.sqrt()[:, None]
    assert torch.allclose(normal, expected * second.norm() / expected.norm())


def test_muon_treats_filters_as_matrices_and_leaves_the_rest_to_the_other_optimizer():
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, 3)
    before, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    filters = dict(
        params=[layer.weight], weight_decay=0.0, muon=True, momentum=0.6, fixed_norm=True
    )
    optimizer = muon.MuonSGD(
        [filters, dict(params=[layer.bias], lr=0.5, muon=False)], lr=0.1, momentum=0.9
    )
    layer(torch.randn(2, 4, 8, 8)).square().sum().backward()
    gradient = layer.bias.grad.clone()
    optimizer.step()
    step = layer.weight.detach() - before * 8**0.5 / before.norm()
    values = torch.linalg.svdvals(step.flatten(1)) / 0.1
    assert values.min() > 0.6 and values.max() < 1.3
    assert torch.allclose(layer.bias, bias - 0.5 * gradient)
