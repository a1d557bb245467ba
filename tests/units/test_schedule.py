"""What a learning rate schedule is called; its curves are in tests/properties."""

import argparse
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils.schedule import NAMES, multiplier, recompute, schedule


def test_what_a_schedule_is_called():
    for value in (*NAMES, "cosine:0.1", "wsd:0", "linear:1"):
        assert schedule(value) == value and multiplier(value, 0, 10) == 1
    for value in ("", "step", "constant:0.1", "cosine:", "cosine:2", "wsd:-1", "cosine:0.1:2"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            schedule(value)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_learning_rate_follows_the_length_of_the_run(rank, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [dict(params=[weights[0]], lr=1.0), dict(params=[weights[1]], lr=0.5)]
    optimizer = torch.optim.SGD(groups)
    length = SimpleNamespace(steps=10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / length.steps)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    prepared = SimpleNamespace(scheduler=scheduler)
    recompute(prepared)
    assert capsys.readouterr().out == ""
    length.steps = 20
    recompute(prepared)
    change = "the learning rate changes from 0.5 to 0.75\n"
    assert capsys.readouterr().out == (change if rank == "0" else "")
    assert [group["lr"] for group in optimizer.param_groups] == [0.75, 0.375]
    assert scheduler.get_last_lr() == [0.75, 0.375]
