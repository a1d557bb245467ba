"""Batches, their order, their augmentation and the optimizer: exact values.

What a seed draws stays the same from version to version, because a run must resume exactly.
"""

import hashlib
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode

from utils import muon, scores
from utils.data import loaders, shared_batches
from utils.data.augment import augment, normalize, random_uint32
from utils.data.mixing import Mix
from utils.data.shared_batches import SharedBatch


def digest(*tensors):
    """A checksum of integer tensors."""
    joined = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(joined).hexdigest()[:16]


def pictures(count=6, height=8, width=6):
    return (
        (torch.arange(count * 3 * height * width) * 37 % 251)
        .to(torch.uint8)
        .view(count, 3, height, width)
    )


def test_what_a_seed_draws_stays_the_same():
    ids = torch.tensor([0, 1, 2, 99_999])
    draws = [random_uint32(seed, epoch, ids, stream) for seed, epoch, stream in
             ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]  # fmt: skip
    assert all(((draw >= 0) & (draw < 2**32)).all() for draw in draws)
    assert draws[0].tolist() == [0, 1753845952, 3507691905, 2280229469]
    assert digest(*draws) == "1f06bf5354a5d048"


def test_what_the_augmentation_makes_of_an_image_stays_the_same():
    images, ids = pictures(), torch.arange(6)
    changed, keep = augment(images, ids, 3, 1, padding=1, cutout=3)
    assert digest(changed) == "c2fb280d54e96f7c" and digest(keep) == "ce7dd3a78e9f51d1"
    assert digest(augment(images, ids, 4, 1)[0]) == "093877ae76d86b57"
    assert augment(images, ids, 4, 1)[1] is None
    even = augment(images, ids, 3, 1, cutout=4)[1]
    assert digest(even) == "72b310fffb4267cb" and set(even.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [None, 4, 6])
def test_images_are_normalized_then_masked_then_scaled(layout, size):
    images = pictures(4, 6, 6).contiguous(memory_format=layout)
    mean, std = torch.tensor([10.0, 20, 30]), torch.tensor([2.0, 4, 8])
    keep = torch.ones(4, 1, 6, 6)
    keep[:, :, 2:4] = 0
    out = normalize(images, mean, std, keep, size)
    expected = keep * (images.float() - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    if size == 4:
        options = dict(mode="bilinear", antialias=True)
        expected = torch.nn.functional.interpolate(expected, size=(4, 4), **options)
        plain = torch.nn.functional.interpolate(expected, size=(4, 4), mode="bilinear")
        assert plain.shape == out.shape
    assert torch.allclose(out, expected, atol=1e-4)
    assert out.is_contiguous(memory_format=torch.channels_last) and out.dtype == torch.float32


def test_mixing_stays_the_same():
    """Positions 2k and 2k + 1 are mixed with each other, as the step decides."""
    images = torch.arange(4 * 3 * 4 * 4).view(4, 3, 4, 4).float()
    labels = torch.tensor([0, 1, 2, 0])
    mixed, shares = Mix(1.0, 0.0, 3, seed=7)(images, labels, step=5)
    share = shares[0, 0].item()
    assert share == pytest.approx(0.9940605, abs=1e-6)
    expected = share * images + (1 - share) * images[[1, 0, 3, 2]]
    assert torch.allclose(mixed, expected, atol=1e-3)
    other = torch.nn.functional.one_hot(labels, 3)[[1, 0, 3, 2]]
    assert torch.allclose(
        shares, share * torch.nn.functional.one_hot(labels, 3) + (1 - share) * other
    )
    before = torch.get_rng_state()
    Mix(1.0, 1.0, 3, seed=7)(images, labels, step=6)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------ loaders


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda", True)])
def test_options_of_loaders(device, pinned):
    options = loaders.loader_options(SimpleNamespace(device=torch.device(device)), 3)
    assert options["num_workers"] == 3 and options["pin_memory"] is pinned
    assert options["collate_fn"] is loaders.already_a_batch
    assert options["worker_init_fn"] is loaders.set_up_worker and options["timeout"] == 600
    # A worker of a server that forks would outlive a killed process.
    assert options["multiprocessing_context"] == ("fork" if sys.platform == "linux" else None)
    alone = loaders.loader_options(SimpleNamespace(device=torch.device("cpu")))
    assert alone["num_workers"] == alone["timeout"] == 0
    assert alone["multiprocessing_context"] is None
    assert loaders.already_a_batch([1, 2]) == [1, 2]


def test_a_batch_is_copied_to_a_gpu_from_pinned_memory(monkeypatch):
    pinned, cpu, gpu = [], torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    with FakeTensorMode():
        there = loaders.to_device(torch.zeros(3), gpu)
        assert there.device == gpu and len(pinned) == 1
        assert loaders.to_device(there, gpu) is there
        assert loaders.to_device(torch.zeros(3), cpu).device == cpu and len(pinned) == 1


def test_the_order_of_an_epoch_stays_the_same():
    sampler = loaders.EpochSampler(2500, 100, seed=3)
    first = list(sampler)
    assert len(first) == len(sampler) == 2500 and {epoch for epoch, _ in first} == {0}
    assert sorted(index for _, index in first) == list(range(2500))
    assert [index for _, index in first[:4]] == [1631, 1293, 1039, 583]
    sampler.set_epoch(1)
    second = list(sampler)
    assert {epoch for epoch, _ in second} == {1} and [i for _, i in second] != [i for _, i in first]
    assert list(sampler) == second
    assert len(loaders.EpochSampler(2599, 100, seed=3)) == 2500
    plain = loaders.EpochSampler(250, 100, seed=3, shuffle=False)
    assert list(plain) == [(0, index) for index in range(200)]


def test_workers_end_with_the_block():
    """Also after an error, and of those loaders only that have any."""
    ended = []
    iterator = SimpleNamespace(_shutdown_workers=lambda: ended.append("ended"))
    used = {
        "train": SimpleNamespace(_iterator=iterator),
        "val": SimpleNamespace(_iterator=None),
        "x": 1,
    }
    with loaders.ending_workers(used):
        assert ended == []
    assert ended == ["ended"]
    with pytest.raises(KeyError), loaders.ending_workers(used):
        raise KeyError
    assert ended == ["ended"] * 2


# ----------------------------------------------------------------------------------- shared batches


@pytest.fixture
def memory(monkeypatch):
    """Shared memory of a worker and a training process that are one process, none of it in use."""
    own, attached, lent = [], {}, []
    monkeypatch.setattr(shared_batches, "_own", own)
    monkeypatch.setattr(shared_batches, "_attached", attached)
    monkeypatch.setattr(shared_batches, "_lent", lent)
    return own, attached, lent


def sent(value, count=2, height=3):
    """What a worker sends for images of one value, and the batch that is received."""
    images = [torch.full((height, 4, 3), value + i, dtype=torch.uint8) for i in range(count)]
    batch = SharedBatch(images, labels=torch.arange(count), bad=[value])
    receive, (key, buffer, shape, others) = batch.__reduce__()
    return (key, buffer, shape, others), receive(key, buffer, shape, others)


def test_a_batch_arrives_as_it_was_sent(memory):
    own, attached, _ = memory
    (key, buffer, shape, others), batch = sent(7)
    assert key == (os.getpid(), 0) and buffer is own[0] and shape == (2, 3, 4, 3)
    assert type(others["labels"]).__name__ == "ndarray" and own[0].is_shared()
    assert batch["images"].shape == (2, 3, 3, 4) and batch["images"].dtype == torch.uint8
    assert batch["images"].is_contiguous(memory_format=torch.channels_last)
    assert batch["images"].unique(dim=0).flatten(1)[:, 0].tolist() == [7, 8]
    assert batch["labels"].tolist() == [0, 1] and batch["bad"] == [7] and list(attached) == [key]
    assert own[0].numel() == 2 * 3 * 4 * 3 + 1 and own[0][-1] == 1


def test_memory_is_used_again_only_when_no_tensor_refers_to_it(memory):
    own, attached, lent = memory
    _, first = sent(1)
    _, second = sent(2)
    assert len(own) == len(attached) == 2  # the first is still in use
    part = first["images"][0, :, :1]
    del first
    _, third = sent(3)
    assert len(own) == 3 and part.unique().tolist() == [1]
    del part, second
    _, fourth = sent(4)  # this one finds out that two are free
    assert len(own) == 4 and [int(buffer[-1]) for buffer in own] == [0, 0, 1, 1]
    (key, buffer, *_), fifth = sent(5)
    assert (
        len(own) == 4 and key[1] == 0 and buffer is None
    )  # known already: only its number is sent
    assert [batch["images"].flatten()[0].item() for batch in (third, fourth, fifth)] == [3, 4, 5]
    assert len(lent) == 3
    (key, *_), sixth = sent(6, count=1)  # smaller: fits into the other free one
    assert key[1] == 1 and sixth["images"].shape == (1, 3, 3, 4)
    (key, *_), seventh = sent(7, height=9)  # larger than any
    assert key[1] == 4 and seventh["images"].shape == (2, 3, 9, 4)


def test_memory_of_workers_that_have_ended_is_let_go(memory, monkeypatch):
    own, attached, _ = memory
    attached[(123, 0)], attached[(os.getpid(), 9)] = own, own
    monkeypatch.setattr(shared_batches.psutil, "pid_exists", lambda pid: pid != 123)
    sent(1)
    assert list(attached) == [(os.getpid(), 9), (os.getpid(), 0)]


# ------------------------------------------------------------------------------------- Muon, scores


def steps_of(count, weights, **options):
    """The weights after `count` steps of Muon, with gradients that are a function of the step."""
    groups = [dict(params=weights, muon=True, lr=0.1, momentum=0.9, weight_decay=0.2, **options)]
    optimizer = muon.MuonSGD(groups, lr=0.1)
    for step in range(1, count + 1):
        for number, weight in enumerate(weights):
            torch.manual_seed(100 * step + number)
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    return optimizer


def test_a_step_of_muon_by_hand():
    """Nesterov momentum, an orthogonal update, decay, and a scale for tall matrices."""
    weight = torch.nn.Parameter(torch.ones(6, 2, dtype=torch.float64))
    unused = torch.nn.Parameter(torch.ones(6, 2, dtype=torch.float64))
    optimizer = muon.MuonSGD(
        [dict(params=[unused, weight], muon=True, weight_decay=0.2)], lr=0.1, momentum=0.9
    )
    torch.manual_seed(1)
    gradient = torch.randn(6, 2, dtype=torch.float64)
    weight.grad = gradient.clone()
    optimizer.step()
    update = gradient.lerp(0.1 * gradient, 0.9)
    update = muon.orthogonalize(update[None], 5)[0]
    expected = (1 - 0.1 * 0.2) * torch.ones(6, 2, dtype=torch.float64) - 0.1 * 3**0.5 * update
    assert torch.allclose(weight, expected) and weight.grad is None
    assert torch.equal(unused, torch.ones(6, 2, dtype=torch.float64))  # and those after it were not
    assert optimizer.state[weight]["step"] == 1 and torch.allclose(
        optimizer.state[weight]["momentum"], 0.1 * gradient
    )


@pytest.mark.parametrize("shape", [(4, 4), (4, 6), (4, 11), (11, 4)])
def test_an_orthogonal_matrix_has_singular_values_near_one(shape):
    torch.manual_seed(0)
    x = torch.randn(3, *shape, dtype=torch.float64)
    values = torch.linalg.svdvals(muon.orthogonalize(x))
    assert values.min() > 0.3 and values.max() < 1.3
    # Whatever the size of the matrix, also a tiny one.
    assert torch.allclose(muon.orthogonalize(x * 1e-3), muon.orthogonalize(x), atol=1e-9)
    assert torch.equal(muon.orthogonalize(x), muon.orthogonalize(x, 5))
    slow = x / x.norm(dim=(1, 2), keepdim=True)
    for _ in range(5):
        gram = slow @ slow.mT if shape[0] <= shape[1] else slow.mT @ slow
        factor = 3.4445 * torch.eye(len(gram[0])) - 4.7750 * gram + 2.0315 * gram @ gram
        slow = factor @ slow if shape[0] <= shape[1] else slow @ factor
    assert torch.allclose(muon.orthogonalize(x), slow, atol=1e-9)


@pytest.mark.parametrize("iterations", [3, 5])
def test_two_steps_of_muon_by_hand(iterations):
    """Only in the second step do the gradient and its average point in different directions."""
    weight = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    more = {"iterations": 3} if iterations == 3 else {}
    optimizer = steps_of(2, [weight], **more)
    gradients = []
    for step in (1, 2):
        torch.manual_seed(100 * step)
        gradients.append(torch.randn_like(weight))
    expected, momentum = torch.zeros_like(weight), torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.9 * momentum + 0.1 * gradient
        update = 0.1 * gradient + 0.9 * momentum
        update = muon.orthogonalize(update[None], iterations)[0]
        expected = (1 - 0.1 * 0.2) * expected - 0.1 * update
    assert torch.allclose(weight, expected)
    assert torch.allclose(optimizer.state[weight]["momentum"], momentum)


def test_a_gpu_computes_filters_of_as_many_outputs_together_and_in_half_precision(monkeypatch):
    groups, types = [], []
    times = muon._times
    monkeypatch.setattr(muon, "_times", lambda terms, x: types.append(x.dtype) or times(terms, x))
    with FakeTensorMode():
        filters = [torch.empty(4, width, 3, 3, device="cuda") for width in (2, 5)]
        matrices = [torch.empty(4, width, device="cuda") for width in (8, 9)]
        assert all(result.shape == x.shape for result, x in zip(
            muon.orthogonalize_all([*filters, *matrices], 2), [*filters, *matrices], strict=True
        ))  # fmt: skip
        assert set(types) == {torch.float16}
        types.clear()
        muon.orthogonalize_all([x.cpu() for x in filters], 2)
        assert set(types) == {torch.float32}
        monkeypatch.setattr(
            muon, "_orthogonalize_alike", lambda alike, _: groups.append(len(alike)) or alike
        )
        muon.orthogonalize_all([*filters, *matrices], 2)
        assert groups == [2, 1, 1]
        muon.orthogonalize_all([x.cpu() for x in filters], 2)
        assert groups == [2, 1, 1, 1, 1]
        monkeypatch.setattr(muon, "normalize_rows", lambda states, updates, beta2: updates)
        muon.orthogonalize_all(filters, 2, 0.9, [{}, {}])
        assert groups[5:] == [1, 1]  # which normalizes rows of one shape


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


def test_filters_that_are_filled_up_are_updated_as_on_their_own():
    torch.manual_seed(0)
    filters = [torch.randn(4, width, 3, 3, dtype=torch.float64) for width in (2, 5, 1)]
    together = muon._orthogonalize_alike(filters, 3)
    for matrix, update in zip(filters, together, strict=True):
        alone = muon.orthogonalize(matrix.flatten(1)[None], 3)[0]
        assert torch.allclose(update.flatten(1), alone, atol=1e-9)


def test_rows_of_a_tiny_update_are_normalized():
    torch.manual_seed(0)
    update = 1e-3 * torch.randn(4, 8, dtype=torch.float64)
    (normal,) = muon.normalize_rows([{}], [update], 0.9)
    assert torch.allclose(normal.norm(), update.norm())
    assert torch.allclose(normal.norm(dim=1), update.norm() / 2, rtol=1e-6)


@pytest.fixture
def mesh(tmp_path):
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


def test_top_5_needs_five_classes():
    labels = torch.tensor([0, 1, -1])
    losses, top = (
        torch.tensor([1.0, 3.0, 99.0]),
        torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 0, 1], [0] * 5]),
    )
    found = scores.summarize(labels, losses, top)
    assert [found[name] for name in ("loss", "accuracy", "top5")] == [2.0, 0.5, 1.0]
    labels = torch.tensor([0, 9, -1])
    assert scores.summarize(labels, losses, top)["top5"] == 0.5
    assert "top5" not in scores.summarize(labels, losses, top[:, :4])


def test_a_worker_ignores_signals_and_ends_with_its_process(monkeypatch, capsys):
    """Or when it cannot send a batch, which would otherwise be awaited without end."""
    ignored, calls, ended = [], [], []
    library = SimpleNamespace(prctl=lambda *options: calls.append(options))
    monkeypatch.setattr(loaders.signal, "signal", lambda *options: ignored.append(options))
    monkeypatch.setattr(loaders.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(loaders.Queue, "_on_queue_feeder_error", None)
    monkeypatch.setattr(loaders.os, "_exit", ended.append)
    loaders.set_up_worker(0)
    names = {signum.name for signum, handler in ignored if handler == signal.SIG_IGN}
    assert names >= {"SIGTERM", "SIGINT", "SIGUSR1"} and len(names) == len(ignored)
    assert calls == ([(1, signal.SIGKILL)] if sys.platform == "linux" else [])
    loaders.Queue._on_queue_feeder_error(OSError("AF_UNIX path too long\nmore"), "a batch")
    line = capsys.readouterr().err
    assert ended == [1] and line.count("\n") == 1
    assert line.startswith("a data loader worker cannot send its batch: OSError: AF_UNIX path")
