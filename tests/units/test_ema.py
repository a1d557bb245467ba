"""Averages of weights rise from the present ones, and go on where a checkpoint was written."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from utils.ema import MovingAverage


@given(
    st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=12),
    st.integers(0, 11),
    st.floats(0, 1),
)
def test_an_average_is_that_of_a_plain_formula_and_outlives_a_restart(values, restart, most):
    model = torch.nn.Linear(1, 1, bias=False)
    model.register_buffer("statistics", torch.zeros(1))
    model.register_buffer("batches", torch.tensor(0))
    asked = []

    def decay_at(updates):
        asked.append(updates)
        return most * updates / (updates + 1)

    average, expected = MovingAverage(model, decay_at), 0.0
    for update, value in enumerate(values):
        with torch.no_grad():
            model.weight.fill_(value)
            model.statistics.fill_(-value)
            model.batches.fill_(update)
        if update == restart:
            state, average = average.state_dict(), MovingAverage(model, decay_at)
            assert state["n_averaged"] == update
            state["n_averaged"] = torch.tensor(update)  # as `AveragedModel` has it
            average.load_state_dict(state)
        average.update(model)
        decay = most * update / (update + 1) if update else 0.0
        expected = decay * expected + (1 - decay) * value
        assert average.module.weight.item() == pytest.approx(expected, abs=1e-4)
        assert average.module.statistics.item() == pytest.approx(-expected, abs=1e-4)
        assert average.module.batches == update and average.updates == update + 1
        assert model.weight.item() == value
    assert asked == list(range(1, len(values)))
