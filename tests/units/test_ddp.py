"""What `utils.run.ddp` warms up, names and refuses, and batch norm over several processes."""

import contextlib
import re

import pytest
import torch
from harness.fakes import accelerator
from harness.worlds import group_of_one
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from utils.run import ddp
from utils.run.failures import UserError
from utils.scale.pace import pace


@pytest.fixture
def alone():
    with group_of_one():
        yield


# ---------------------------------------------------------------------------------------- warm-up


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
    watched, stances = [], []
    monkeypatch.setattr(pace, "watch", watched.append)
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
    assert watched == [models[0]] * 2  # the time of the first one's passes is measured


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


def test_ddp_refuses_an_unused_parameter_in_one_line(alone, capsys):
    for how in (dict(find_unused_parameters=True), dict(static_graph=True)):
        warm_up(DistributedDataParallel(Counting(), **how))
    with pytest.raises(UserError, match=r"reaches module.unused.weight .*find_unused"):
        warm_up(DistributedDataParallel(Counting()))
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    warm_up(fully_shard(Counting(), mesh=mesh))  # shards may have no gradient
    assert capsys.readouterr().err == ""


def test_ddp_broadcasts_the_statistics_of_batch_norm_only_for_evaluation(alone):
    model = DistributedDataParallel(nn.BatchNorm1d(2))
    warm_up(model)
    for training in (True, False, True):
        model.train(training)(torch.ones(4, 2))
        assert model.will_sync_module_buffers() == (not training)
    model.module.eval()  # the wrapper itself stays in training mode
    model(torch.ones(4, 2))
    assert model.training and model.will_sync_module_buffers()

    layers = nn.Sequential(nn.BatchNorm1d(2))
    layers.register_buffer("may_be_read_in_training", torch.ones(2))
    model = DistributedDataParallel(layers)
    warm_up(model)
    model(torch.ones(4, 2))
    assert model.will_sync_module_buffers()


# ------------------------------------------------------------------------------------- batch norm


def norm():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


def test_batch_norm_over_all_processes_keeps_the_parameters():
    model = norm()
    model[1].weight.requires_grad_(False)
    before = list(model.parameters())
    for samples in (1, 250):
        synced = ddp.sync_batch_norm(accelerator(2, device="cuda"), model, samples, wanted=True)
        assert type(synced[1]) is nn.SyncBatchNorm and not synced[1].weight.requires_grad
        assert all(a is b for a, b in zip(before, synced.parameters(), strict=True))


FEW, NEEDS = "the statistics of the 31 samples", "--sync_batchnorm needs GPUs: .* uses the 250 sam"


@pytest.mark.parametrize(
    ("samples", "wanted", "facts", "says"),
    [
        (31, False, {}, FEW),
        (31, True, {}, FEW),
        (31, False, {"processes": 2, "device": "cuda"}, FEW),
        (31, True, {"device": "cuda"}, FEW),
        (32, False, {}, None),
        (32, True, {}, None),
        (250, False, {"processes": 2}, None),
        (250, True, {"processes": 2}, NEEDS),
        (8, True, {"processes": 2, "rank": 1}, None),
        (8, False, {"processes": 2, "rank": 1}, None),
    ],
)
def test_who_says_what_about_batch_norm(samples, wanted, facts, says, capsys):
    model = norm()
    assert ddp.sync_batch_norm(accelerator(**facts), model, samples, wanted) is model
    assert type(model[1]) is nn.BatchNorm2d
    said = capsys.readouterr().err
    assert re.search(says, said) if says else said == ""


def test_one_sample_for_batch_norm_is_refused():
    """Not with frozen statistics, and not without batch norm."""
    with pytest.raises(UserError, match="more than the one sample that each process"):
        ddp.sync_batch_norm(accelerator(), norm(), 1, wanted=False)
    for model in (norm().eval(), nn.LayerNorm(2)):
        assert ddp.sync_batch_norm(accelerator(2, device="cuda"), model, 1, wanted=True) is model
