"""Muon: its steps by hand, and what its orthogonal updates are on every device."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode

from utils import muon


@pytest.mark.parametrize("iterations", [None, 3])
def test_steps_of_muon_by_hand(iterations):
    """Nesterov momentum, an orthogonal update, decay, and a scale for tall matrices.

    Only in the second step do the gradient and its average point in different directions.
    """
    torch.manual_seed(0)
    tall, wide, unused = (torch.nn.Parameter(torch.ones(*shape, dtype=torch.float64))
                          for shape in ((6, 2), (3, 4), (6, 2)))  # fmt: skip
    group = dict(params=[unused, tall, wide], muon=True, momentum=0.9, weight_decay=0.2)
    group |= {"iterations": iterations} if iterations else {}
    optimizer = muon.MuonSGD([group], lr=0.1)
    expected = {weight: weight.detach().clone() for weight in (tall, wide)}
    momenta = {weight: torch.zeros_like(weight) for weight in expected}
    for step in (1, 2):
        for weight, scale in ((tall, 3**0.5), (wide, 1)):
            gradient = torch.randn_like(weight)
            weight.grad = gradient.clone()
            momenta[weight] = 0.9 * momenta[weight] + 0.1 * gradient
            update = 0.1 * gradient + 0.9 * momenta[weight]
            update = muon.orthogonalize(update[None], iterations or 5)[0]
            expected[weight] = (1 - 0.1 * 0.2) * expected[weight] - 0.1 * scale * update
        optimizer.step()
        for weight in expected:
            assert torch.allclose(weight, expected[weight]) and weight.grad is None
            assert torch.allclose(optimizer.state[weight]["momentum"], momenta[weight])
            assert optimizer.state[weight]["step"] == step
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


@pytest.mark.parametrize(("shape", "operations"), [
    ((8, 8), 3 * 3 * 2 * 8**3),  # each iteration: Gram matrix, its square, product
    ((8, 16), 2 * 8 * 8 * (2 * 16 + 3 * 8 + 2 * 3 * 8)),
    ((16, 8), 2 * 8 * 8 * (2 * 16 + 3 * 8 + 2 * 3 * 8)),
])  # fmt: skip
def test_the_cheaper_of_two_ways_is_taken(shape, operations):
    with FlopCounterMode(display=False) as counter:
        muon.orthogonalize(torch.randn(1, *shape), 3)
    assert counter.get_total_flops() == operations


@pytest.mark.parametrize("shape", [(32, 32), (32, 96), (96, 32)])
def test_half_precision_stays_near_the_exact_result(shape):
    """Also if most singular values are tiny, as those of gradients are."""
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(1, *shape), full_matrices=False)
    x = left * torch.arange(1, 33).float() ** -2 @ right
    exact = muon.orthogonalize(x.double())
    half = muon.orthogonalize(x, half=True)
    assert half.dtype == torch.float32 and not torch.equal(half, muon.orthogonalize(x))
    assert (half - exact).norm() < 0.05 * exact.norm()


def test_rows_of_an_update_are_normalized_by_their_running_mean():
    torch.manual_seed(0)
    update, state = 1e-3 * torch.randn(4, 8, dtype=torch.float64), {}
    (normal,) = muon.normalize_rows([state], [update], 0.9)
    assert torch.allclose(normal.norm(), update.norm())
    assert torch.allclose(normal.norm(dim=1), update.norm() / 2, rtol=1e-6)
    squares = 0.1 * update.square().sum(1)
    other = torch.randn(4, 8, dtype=torch.float64)
    normal, _ = muon.normalize_rows([state, {}], [other, 3 * update], 0.9)
    squares = 0.9 * squares + 0.1 * other.square().sum(1)
    expected = other / squares.sqrt()[:, None]
    assert torch.allclose(normal, expected * other.norm() / expected.norm())


@pytest.fixture
def mesh():
    """A mesh of one process: what a shard is, without a second process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_matrix_moves_as_a_whole_one(mesh):
    torch.manual_seed(0)
    whole = [torch.randn(4, 6), torch.randn(4, 6)]
    for placement in (Shard(0), Shard(1)):
        sharded = [DTensor.from_local(x, mesh, [placement]) for x in whole]
        results = muon.orthogonalize_all(sharded, 3)
        for result, expected in zip(results, muon.orthogonalize_all(whole, 3), strict=True):
            assert isinstance(result, DTensor) and result.placements == (placement,)
            assert result.shape == (4, 6) and result.device_mesh is mesh
            assert result.stride() == expected.stride()
            assert torch.equal(result.to_local(), expected)
