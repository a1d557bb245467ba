"""Batch norm over several processes, and what is said about it."""

import pytest
import torch
from harness.fakes import accelerator
from harness.worlds import group_of_one
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.run.failures import UserError
from utils.scale import batch_norm


def norm():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


def test_batch_norm_over_all_processes_keeps_the_parameters():
    model = norm()
    model[1].weight.requires_grad_(False)
    before = list(model.parameters())
    for samples in (1, 250):
        synced = batch_norm.synchronize(accelerator(2, device="cuda"), model, samples, wanted=True)
        assert type(synced[1]) is nn.SyncBatchNorm and not synced[1].weight.requires_grad
        assert all(a is b for a, b in zip(before, synced.parameters(), strict=True))


@pytest.mark.parametrize(
    ("samples", "wanted", "facts", "says"),
    [
        (31, False, {"processes": 2}, True),
        (16, False, {"processes": 2, "device": "cuda"}, True),
        (15, False, {"processes": 2}, False),  # a batch of 30 is small by intention
        (31, True, {"device": "cuda"}, False),
        (32, False, {"processes": 2}, False),
        (250, True, {"processes": 2}, True),  # --sync_batchnorm, without GPUs
        (250, True, {"processes": 1}, False),
        (8, False, {"processes": 2, "rank": 1}, False),
    ],
)
def test_who_says_what_about_batch_norm(samples, wanted, facts, says, capsys):
    model = norm()
    assert batch_norm.synchronize(accelerator(**facts), model, samples, wanted) is model
    assert type(model[1]) is nn.BatchNorm2d
    said = capsys.readouterr().err
    assert (f"uses the statistics of the {samples} samples that a process" in said) == says
    assert says or said == ""


def test_one_sample_for_batch_norm_is_refused():
    """Not with frozen statistics, and not without batch norm."""
    with pytest.raises(UserError, match="more than the one sample that each process"):
        batch_norm.synchronize(accelerator(), norm(), 1, wanted=False)
    for model in (norm().eval(), nn.LayerNorm(2)):
        assert batch_norm.synchronize(accelerator(2, device="cuda"), model, 1, wanted=True) is model


def test_ddp_broadcasts_the_statistics_of_batch_norm_only_for_evaluation():
    with group_of_one():
        model = DistributedDataParallel(nn.BatchNorm1d(2))
        batch_norm.broadcast_less(model)
        for training in (True, False, True):
            model.train(training)(torch.ones(4, 2))
            assert model.will_sync_module_buffers() == (not training)
        model.module.eval()  # the wrapper itself stays in training mode
        model(torch.ones(4, 2))
        assert model.training and model.will_sync_module_buffers()

        layers = nn.Sequential(nn.BatchNorm1d(2))
        layers.register_buffer("may_be_read_in_training", torch.ones(2))
        model = DistributedDataParallel(layers)
        batch_norm.broadcast_less(model)
        model(torch.ones(4, 2))
        assert model.will_sync_module_buffers()
