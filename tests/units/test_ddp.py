"""What is warmed up, named and refused before training; the seeds of steps."""

import contextlib
from itertools import product

import pytest
import torch
from harness.fakes import accelerator
from harness.worlds import group_of_one
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from utils.run import ddp
from utils.run.failures import UserError


class Counting(nn.Module):
    """Counts its forward passes in a buffer, and makes other ones in the first of them."""

    def __init__(self, persistent=True):
        super().__init__()
        self.layer, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("cache", torch.empty(0), persistent=False)
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, x):
        self.calls += 1
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.cache = torch.ones(len(x))  # longer than before
        return self.layer(x)


def warm_up(model):
    ddp.warm_up(model, lambda: model(torch.ones(3, 2)).sum())


def test_a_warm_up_of_one_or_several_models_changes_nothing(monkeypatch):
    """It computes the loss twice, wherever it runs, so that a mistake in it shows on one process,
    too. The loss of the generator of a GAN has gradients for the discriminator.
    """
    stances = []
    monkeypatch.setattr(
        torch.compiler, "set_stance", lambda how: stances.append(how) or contextlib.nullcontext()
    )
    models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    before = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]
    ddp.warm_up(tuple(models), lambda: models[1](models[0](torch.randn(4, 2))).sum())
    assert stances == ["force_eager"] * 2  # compiles nothing
    ddp.warm_up(models[0], lambda: models[0](torch.randn(4, 2)).square().sum())
    for model, values in zip(models, before, strict=True):
        assert all(weight.grad is None for weight in model.parameters())
        assert all(torch.equal(value, values[k]) for k, value in model.state_dict().items())


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_warm_up_names_what_a_restart_or_ddp_would_not_take(
    persistent, rank, capsys, monkeypatch
):
    monkeypatch.setenv("RANK", rank)
    model = Counting(persistent)
    warm_up(model)
    said = capsys.readouterr().err
    assert model.calls == 0 and model.mask.tolist() == [1, 1]
    unused = said.count("no gradient reaches unused.weight (2 without): several processes")
    changed = said.count("buffer calls changes in the forward pass")
    assert (unused, changed) == ((1, int(not persistent)) if rank == "0" else (0, 0))
    model.unused.requires_grad_(False)
    warm_up(model)
    assert "no gradient" not in capsys.readouterr().err


def test_ddp_refuses_an_unused_parameter_in_one_line(capsys):
    with group_of_one():
        for how in (dict(find_unused_parameters=True), dict(static_graph=True)):
            warm_up(DistributedDataParallel(Counting(), **how))
        with pytest.raises(UserError, match=r"reaches module.unused.weight .*find_unused"):
            warm_up(DistributedDataParallel(Counting()))
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        warm_up(fully_shard(Counting(), mesh=mesh))  # shards may have no gradient
    assert capsys.readouterr().err == ""


def test_a_step_draws_the_same_again_and_no_other_step_does():
    def drawn(seed, step, micro_batch, rank):
        ddp.seed_step(accelerator(rank=rank), seed, step, micro_batch)
        return tuple(torch.rand(4).tolist())

    places = list(product((0, 1), (1, 2), (0, 1), (0, 1)))
    first = [drawn(*place) for place in places]
    assert first == [drawn(*place) for place in places] and len(set(first)) == 16


def test_the_seed_of_a_step(monkeypatch):
    """Runs resume exactly with later versions: the formula stays. It fits into 32 bits."""
    seen = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seen.append)
    ddp.seed_step(accelerator(rank=2), 10, 100, 3)
    seed = torch.default_generator.initial_seed()
    assert seed == 10 + 1_000_003 * 100 + 7_919 * 2 + 104_729 * 3 and seen == []
    ddp.seed_step(accelerator(device="cuda"), 2**32 - 1, 1000)  # the first micro-batch
    assert torch.default_generator.initial_seed() == 1_000_002_999
    assert seen == [1_000_002_999] and seen[0] + 2**32 == 2**32 - 1 + 1_000_003 * 1000
