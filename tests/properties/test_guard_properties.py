"""Whatever happens to any process: all stop and save after the same step, and nothing that diverged
is saved.
"""

import math

import torch
from harness.worlds import run_guards
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from utils.run import guard
from utils.run.failures import RunFailed

STEPS = 6
BAD = [math.nan, math.inf, -math.inf]


@st.composite
def runs(draw):
    """What happens in a run of some processes."""
    size = draw(st.integers(1, 3))
    step, rank, value = st.integers(1, STEPS), st.integers(0, size - 1), st.sampled_from(BAD)
    rarely = st.sampled_from([None] * 7) | step  # else most runs would end early
    return {
        "size": size,
        "scaler": draw(st.sampled_from([None, None, "fp16"])),
        "norms": draw(st.booleans()),
        "loss": (draw(rarely), draw(rank), draw(value), draw(st.integers(0, 1))),
        "norm": (draw(rarely), draw(rank), draw(value)),
        "weight": (draw(rarely), draw(rank), draw(value)),
        "signal": (draw(st.none() | step), draw(rank)),
        "checks": draw(st.sets(st.integers(0, STEPS), max_size=3)),
    }


class Voter:
    """Votes, as the watchdog does, and hears the maxima of all processes."""

    def __init__(self, rank, size):
        self.rank, self.size, self.heard, self.checked = rank, size, 0, []

    def votes(self):
        return [self.rank, -self.rank]

    def hear(self, votes):
        assert votes == [self.size - 1, 0]
        self.heard += 1

    def check(self, model):
        self.checked.append(model)


def train(happens, watched, rank):
    """The steps after which this process saved, and the one after which it stopped, or the error."""
    saved, model, voter = [], nn.Linear(1, 2), Voter(rank, happens["size"])
    watched.attach(voter)
    if 0 in happens["checks"]:
        watched.check(model)
        assert watched.agreed == 0
    try:
        for step in range(1, STEPS + 1):
            guard.process.signaled |= happens["signal"] == (step, rank)
            losses, norm = [torch.tensor(0.5), torch.tensor(0.25)], None
            at, on, value, part = happens["loss"]
            if (at, on) == (step, rank):
                losses[part].fill_(value)
            if happens["norms"]:
                norm = torch.tensor(
                    happens["norm"][2] if happens["norm"][:2] == (step, rank) else 1.0
                )
            at, on, value = happens["weight"]
            if (at, on) == (step, rank):
                model.bias.data[1] = value
            ids = [torch.tensor([10 * step + rank])]
            stops = watched.should_stop(step, losses, ids, norm)
            assert stops == guard.process.stopping
            assert watched.step == step and watched.agreed in (step, step - 1)
            if stops or step in happens["checks"]:
                watched.check(model)
                assert voter.checked.pop() is model
                saved.append(step)
            assert voter.heard >= step - 1
            if stops:
                return saved, step, None
    except RunFailed as error:
        assert not error.retry
        return saved, step, str(error)
    return saved, None, None


def expected(happens):
    """As the documentation of Guard has it."""
    delay = int(happens["size"] > 1)
    never = STEPS + 10
    stop = (happens["signal"][0] or never) + delay
    saves = {*happens["checks"], stop} - {0}
    bad = {"loss at": happens["loss"][0] or never}
    if happens["norms"] and happens["scaler"] is None:
        bad["gradient norm at"] = happens["norm"][0] or never
    what = min(bad, key=bad.get)  # of two in one step, the loss
    weights = min(
        (step for step in saves if step >= (happens["weight"][0] or never)), default=never
    )
    checked = min((step for step in saves if step >= bad[what]), default=never)
    ends = min(bad[what] + 1 + delay, checked)
    named = bad[what]
    if weights < ends:
        what, ends, named = "weights after", weights, weights
    if ends <= min(stop, STEPS):
        return sorted(step for step in saves if step < ends), ends, (what, named)
    last = min(stop, STEPS)
    return sorted(step for step in saves if step <= last), stop if stop <= STEPS else None, None


@settings(max_examples=100)
@given(runs())
def test_all_processes_agree_and_save_nothing_that_diverged(happens):
    results = run_guards(
        happens["size"],
        lambda watched, rank: train(happens, watched, rank),
        scaler=happens["scaler"],
    ).results
    saved, last, failure = expected(happens)
    assert results == [results[0]] * happens["size"]
    assert results[0][:2] == (saved, last)
    if failure is None:
        assert results[0][2] is None
    else:
        what, step = failure
        samples = [10 * step + rank for rank in range(happens["size"])]
        line = results[0][2]
        assert line.startswith(f"non-finite {what} step {step}; no checkpoint includes it")
        assert line.endswith(f"Samples of that step: {samples}")
