"""Lanes of a stream: which launches can share them."""

from types import SimpleNamespace

import pytest
from harness import fakes

from utils.language.lanes import Share
from utils.run.failures import UserError


def test_the_share_of_a_process_follows_from_the_arguments():
    args = SimpleNamespace(batch_size=64, gradient_accumulation_steps=2)
    position = {str(lane): {"taken": 1} for lane in range(8)}
    expected = Share(8, 16, 1, 4, position, accumulation=2)
    assert Share.from_args(args, fakes.accelerator(4, 1), 8, position) == expected
    assert Share.from_args(args, fakes.accelerator(), 64) == Share(64, 64, accumulation=2)
    with pytest.raises(UserError, match="has 8 lanes, and not 16: keep its --batch_size"):
        Share.from_args(args, fakes.accelerator(), 16, position)
    with pytest.raises(UserError, match="which 3 processes cannot share evenly"):
        Share.from_args(args, fakes.accelerator(3), 8)
    args.batch_size = 20
    with pytest.raises(UserError, match="so --batch_size must be a multiple of 8, not 20"):
        Share.from_args(args, fakes.accelerator(4), 8)
