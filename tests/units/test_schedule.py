"""What a learning rate schedule is called; its curves are in tests/properties."""

import argparse

import pytest

from utils.schedule import NAMES, multiplier, schedule


@pytest.mark.parametrize("value", [*NAMES, "cosine:0.1", "wsd:0", "linear:1"])
def test_what_a_schedule_may_be(value):
    assert schedule(value) == value
    assert multiplier(value, 0, 10) == 1


@pytest.mark.parametrize(
    "value", ["", "step", "constant:0.1", "cosine:", "cosine:2", "wsd:-1", "cosine:0.1:2"]
)
def test_what_a_schedule_may_not_be(value):
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        schedule(value)
