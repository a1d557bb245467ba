"""A plan says which steps are left: a continued run is the rest of the whole run."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from utils.run.plan import Plan

COUNTS = st.integers(1, 7)
PLANS = st.builds(Plan, total_steps=st.integers(1, 30), steps_per_epoch=COUNTS, accumulation=COUNTS)


def walk(plan, start=0, done=lambda: False):
    """Yields each step that is left, with its batches as (epoch, number within the epoch)."""
    for epoch, remaining in plan.epochs(start, done):
        numbers = range(remaining.skip, plan.steps_per_epoch * plan.accumulation)
        for step, micro_batches in remaining.accumulated((epoch, number) for number in numbers):
            yield step, list(micro_batches)


@given(PLANS, st.data())
def test_a_run_continues_after_any_step_with_exactly_what_is_left(plan, data):
    per_epoch, size = plan.steps_per_epoch * plan.accumulation, plan.accumulation
    sequence = [divmod(number, per_epoch) for number in range(plan.total_steps * size)]
    steps = range(1, plan.total_steps + 1)
    whole = [(step, sequence[(step - 1) * size : step * size]) for step in steps]
    start = data.draw(st.integers(0, plan.total_steps), "start")
    assert list(walk(plan)) == whole and list(walk(plan, start)) == whole[start:]
    assert [plan.epoch_at(step) for step in steps] == pytest.approx(
        [step * size / per_epoch for step in steps]
    )


@given(PLANS, st.data())
def test_a_run_ends_before_the_next_step_once_all_is_done(plan, data):
    enough, taken = data.draw(st.integers(0, plan.total_steps), "enough"), []
    for step, _ in walk(plan, done=lambda: len(taken) == enough):
        taken.append(step)
    assert taken == list(range(1, enough + 1))


@given(st.integers(1, 30), COUNTS, st.data())
def test_a_loop_without_accumulation_gets_a_batch_for_each_step(total, per_epoch, data):
    plan, start = Plan(total, per_epoch), data.draw(st.integers(0, total), "start")
    seen = []
    for epoch, remaining in plan.epochs(start):
        # Of a loader: whole without an interruption.
        batches = DataLoader(range(epoch * per_epoch, (epoch + 1) * per_epoch), 1)
        seen += remaining.steps(remaining.rest(batches))
    expected = [(step, step - 1) for step in range(start + 1, total + 1)]
    assert [(step, batch.item()) for step, batch in seen] == expected


@given(PLANS, st.booleans(), st.data())
def test_a_step_that_does_not_use_all_its_micro_batches_is_an_error(plan, ends, data):
    """The loop left some, or the loader ends; nothing is read ahead."""
    size, (_, remaining) = plan.accumulation, next(plan.epochs())
    wrong, used = data.draw(st.integers(1, remaining.last)), data.draw(st.integers(0, size - 1))
    before = (wrong - 1) * size + used
    loader = iter(range(before if ends else before + size))
    with pytest.raises(RuntimeError, match=f"step {wrong} used {used} of its {size} micro-batches"):
        for step, group in remaining.accumulated(loader):
            list(islice(group, used if step == wrong else size))
    assert len(list(loader)) == (0 if ends else size)
    if size > 1:
        with pytest.raises(RuntimeError, match="does not accumulate"):
            next(remaining.steps("abcd"))


@given(st.integers(1, 30), st.lists(st.integers(1, 31), min_size=3, max_size=3), st.booleans())
def test_what_is_due_every_so_often_is_also_due_at_the_end(total, every, saves):
    log, evaluate, save = every
    plan = Plan(total, 9, 1, log, evaluate, save * saves)
    steps = range(1, total + 1)

    def due(count):
        return sorted({*range(count, total, count), total})

    assert [step for step in steps if plan.log_due(step)] == due(log)
    assert [step for step in steps if plan.evaluation_due(step)] == due(evaluate)
    saved = [step for step in steps if plan.save_due(step)]
    # An evaluation follows a checkpoint; with `--checkpoint_every 0` only the last one does.
    assert saved == (sorted({*due(save), *due(evaluate)}) if saves else [total])
