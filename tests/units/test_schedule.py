"""The learning rate schedules."""

import argparse
import math

import pytest

from utils.run.schedule import NAMES, multiplier, schedule


def rates(value, total, warmup=0):
    return [round(multiplier(value, step, total, warmup), 4) for step in range(total + 1)]


def test_each_schedule_rises_and_falls_as_its_name_says():
    rise = [0.3333, 0.6667]
    assert rates("constant", 10, 2) == [*rise, *[1.0] * 9]
    assert rates("linear", 10, 2) == [*rise, *(i / 8 for i in range(8, -1, -1))]
    assert rates("wsd", 10, 2) == [*rise, *[1.0] * 7, 0.5, 0.0]
    cosine = [0.5 + 0.5 * math.cos(math.pi * i / 8) for i in range(9)]
    assert rates("cosine", 10, 2) == [*rise, *(round(x, 4) for x in cosine)]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "constant"])
def test_a_schedule_falls_to_its_lowest_rate_and_stays_there(name):
    assert multiplier(f"{name}:0.1", 20, 20, 3) == pytest.approx(0.1)
    assert multiplier(f"{name}:0.1", 25, 20, 3) == pytest.approx(0.1)
    assert multiplier(f"{name}:0.1", 3, 20, 3) == 1
    for step in range(4, 20):
        low, plain = multiplier(f"{name}:0.1", step, 20, 3), multiplier(name, step, 20, 3)
        assert low == pytest.approx(0.1 + 0.9 * plain)
    assert multiplier(f"{name}:0.1", 1, 20, 3) == 0.5  # the warm-up starts from 0


def test_a_run_goes_on_longer_without_a_jump():
    """Stopped in the constant part of wsd, or with a constant rate."""
    for name, same in (("wsd", 16), ("constant", 20)):
        assert rates(name, 20, 2)[: same + 1] == rates(name, 50, 2)[: same + 1]
    assert rates("wsd", 20, 2)[17] < rates("wsd", 50, 2)[17]


def test_a_warm_up_may_be_a_fraction_of_steps():
    assert rates("linear", 5, 0.5)[:2] == [0.6667, round(4 / 4.5, 4)]
    assert multiplier("linear", 2, 10, 2) == 1  # the first step after it


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
