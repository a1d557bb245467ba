"""Learning rate schedules of all lengths, and the multipliers of every script."""

import math
from types import SimpleNamespace

import pytest
from harness.launches import load_script
from hypothesis import given
from hypothesis import strategies as st

from utils.schedule import NAMES, multiplier

TOTALS, SHARES = st.integers(1, 300), st.floats(0, 0.8)
FALLING = [name for name in NAMES if name != "constant"]
# How much of the way down is left at a share of the steps after the warm-up.
SHAPES = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: math.cos(share * math.pi / 2) ** 2,
}


@given(st.sampled_from(NAMES), TOTALS, SHARES, st.floats(0, 1))
def test_a_rate_rises_over_the_warm_up_then_falls_to_its_lowest(name, total, share, lowest):
    value, warmup = name if name == "constant" else f"{name}:{lowest}", share * total
    rates = [multiplier(value, step, total, warmup) for step in range(total + 3)]
    rise = [(step + 1) / (warmup + 1) for step in range(math.ceil(warmup))]
    assert rates[: len(rise)] == pytest.approx(rise)
    fall = rates[len(rise) :]
    if name == "constant":
        assert set(fall) == {1.0}
        return
    assert fall == sorted(fall, reverse=True) and fall[-3:] == pytest.approx([lowest] * 3)
    shape = SHAPES.get(name, lambda _: 1)
    expected = [shape((step - warmup) / (total - warmup)) for step in range(len(rise), total)]
    if name == "wsd":  # constant, then a line over the last fifth of all steps
        expected = [min(1, 5 - 5 * step / total) for step in range(len(rise), total)]
    assert fall[:-3] == pytest.approx([lowest + (1 - lowest) * part for part in expected])


@pytest.mark.parametrize(
    ("script", "flag", "warmup"),
    [
        ("train_gpt", "warmup_steps", lambda given, plan: min(given, plan.total_steps // 10)),
        ("train_lm", "warmup_steps", lambda given, plan: min(given, plan.total_steps // 10)),
        ("train_cifar", "warmup", lambda given, plan: given / 101 * plan.total_steps),
        (
            "train_images",
            "warmup_epochs",
            lambda given, plan: min(given * plan.steps_per_epoch, plan.total_steps / 5),
        ),
        ("train_model_parallel", None, lambda given, plan: plan.total_steps / 10),
    ],
)
def test_the_warm_up_of_a_script_is_a_bounded_share_of_its_run(script, flag, warmup):
    lr_multiplier = load_script(script).lr_multiplier

    @given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 100), st.sampled_from(FALLING))
    def check(total, per_epoch, given_warmup, name):
        plan = SimpleNamespace(total_steps=total, steps_per_epoch=per_epoch)
        args = SimpleNamespace(lr_schedule=name)
        name = "linear" if flag is None else name
        setattr(args, flag or "none", given_warmup / 101 if flag == "warmup" else given_warmup)
        expected = [
            multiplier(name, step, total, warmup(given_warmup, plan)) for step in range(total + 1)
        ]
        assert [lr_multiplier(step, plan, args) for step in range(total + 1)] == pytest.approx(
            expected
        )

    check()
