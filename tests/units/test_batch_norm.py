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


@pytest.mark.parametrize(
    ("samples", "facts", "says"),
    [
        (31, {"processes": 2}, True),
        (15, {"processes": 2}, False),  # a batch of 30 is small by intention
        (31, {}, False),
        (32, {"processes": 2}, False),
        (8, {"processes": 4, "rank": 1}, False),
    ],
)
def test_few_samples_for_batch_norm_are_said_once(samples, facts, says, capsys):
    batch_norm.check(accelerator(**facts), norm(), samples)
    said = capsys.readouterr().err
    assert (f"uses the statistics of the {samples} samples that a process" in said) == says
    assert says or said == ""


def test_one_sample_for_batch_norm_is_refused():
    """Not with frozen statistics, nor those of all processes, and not without batch norm."""
    with pytest.raises(UserError, match="more than the one sample that each process"):
        batch_norm.check(accelerator(), norm(), 1)
    for model in (norm().eval(), nn.LayerNorm(2), nn.SyncBatchNorm(3)):
        batch_norm.check(accelerator(32), model, 1)


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
