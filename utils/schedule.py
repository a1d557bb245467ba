"""The learning rate schedules of all training scripts."""

import argparse
import math

from utils.run.arguments import number, shown
from utils.run.process import is_main

NAMES = ("cosine", "linear", "wsd", "constant")
DECAY = 0.2  # the share of all steps in which `wsd` falls
LOWEST = number(float, 0, most=1)


def schedule(value):
    """An argparse type: one of `NAMES`, or `NAME:LOWEST` with the lowest multiplier."""
    name, colon, lowest = value.partition(":")
    if name not in NAMES or (colon and name == "constant"):
        raise argparse.ArgumentTypeError(
            f"must be {', '.join(NAMES[:-1])} or {NAMES[-1]}, or a name and a lowest multiplier, "
            f"such as cosine:0.1, not {shown(value)}"
        )
    if colon:
        LOWEST(lowest)
    return value


def multiplier(value, step, total, warmup=0.0):
    """What `--lr` is multiplied by after `step` of `total` optimizer steps.

    It rises linearly over the warm-up. Then it falls to the lowest multiplier (default: 0) at
    `total`: `cosine` as half a cosine wave, `linear` along a line, `wsd` (arXiv:2404.06395) along a
    line over the last fifth of all steps, and `constant` not at all. With `wsd`, a run can be made
    longer without a jump from any step before its last fifth.

    Args: value (str): as `schedule` accepts it; warmup (float): in steps, less than `total`.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    name, _, lowest = value.partition(":")
    lowest, factor = float(lowest or 0), max(0.0, (total - step) / (total - warmup))
    if name == "constant":
        return 1.0
    if name == "wsd":
        factor = min(1.0, max(0, total - step) / (DECAY * total))
    if name == "cosine":
        factor = 0.5 - 0.5 * math.cos(math.pi * factor)
    return lowest + (1 - lowest) * factor


def recompute(scheduler):
    """Computes the learning rates of a prepared `LambdaLR` for the present length of the run.

    A checkpoint has those that were computed for the length that the run had then. Call it after
    `run.start`; it prints a change.
    """
    schedule = scheduler.scheduler  # the LambdaLR inside Accelerate's wrapper
    before = schedule.get_last_lr()[0]
    rates = [
        base * factor(schedule.last_epoch)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
    if before != rates[0] and is_main():
        print(f"the learning rate changes from {before:.3g} to {rates[0]:.3g}")
