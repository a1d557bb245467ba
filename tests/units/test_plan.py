"""utils/run/plan.py: which steps are left, and what is due after each step."""

import subprocess
import sys
from argparse import Namespace

import pytest
from harness.launches import ROOT

from utils.run.failures import UserError
from utils.run.plan import Plan


def walk(plan, start=0):
    """(epoch, step, batches) for every step; batches are numbered within their epoch."""
    seen = []
    for epoch, remaining in plan.epochs(start):
        batches = range(remaining.skip, plan.steps_per_epoch * plan.accumulation)
        for step, micro_batches in remaining.accumulated(batches):
            seen.append((epoch, step, list(micro_batches)))
    return seen


def test_every_epoch_has_complete_steps():
    plan = Plan(total_steps=5, steps_per_epoch=2, accumulation=3)
    assert walk(plan) == [
        (0, 1, [0, 1, 2]),
        (0, 2, [3, 4, 5]),
        (1, 3, [0, 1, 2]),
        (1, 4, [3, 4, 5]),
        (2, 5, [0, 1, 2]),
    ]


@pytest.mark.parametrize("start", range(8))
def test_continues_at_any_step_with_the_batches_that_are_left(start):
    plan = Plan(total_steps=7, steps_per_epoch=3, accumulation=2)
    assert walk(plan, start) == walk(plan)[start:]


def test_it_ends_before_the_next_step_once_all_is_done():
    plan, seen = Plan(total_steps=7, steps_per_epoch=3), []
    for epoch, remaining in plan.epochs(done=lambda: len(seen) == 4):
        for step, _ in remaining.steps(range(3)):
            seen.append((epoch, step))
    assert seen == [(0, 1), (0, 2), (0, 3), (1, 4)]
    assert list(plan.epochs(done=lambda: True)) == []


def test_where_it_is_can_be_seen(monkeypatch):
    moves = []
    monkeypatch.setattr("utils.run.plan.place.moved", lambda *where: moves.append(where))
    monkeypatch.setattr("utils.run.plan.place.step", 9)
    walk(Plan(total_steps=2, steps_per_epoch=2, accumulation=2))
    assert moves == [(1,), (9, 1), (9, 2), (2,), (9, 1), (9, 2)]


def test_the_loader_may_have_more_batches_than_the_plan_uses():
    plan, loader = Plan(total_steps=2, steps_per_epoch=3), iter(range(10))
    (_, remaining), *others = plan.epochs()
    assert [list(group) for _, group in remaining.accumulated(loader)] == [[0], [1]] and not others
    assert next(loader) == 2  # nothing was read ahead


@pytest.mark.parametrize(("used", "loaded"), [(0, 6), (1, 6), (2, 3)])
def test_a_step_that_does_not_use_all_micro_batches_is_an_error(used, loaded):
    ((_, remaining),) = Plan(total_steps=2, steps_per_epoch=2, accumulation=2).epochs()
    with pytest.raises(RuntimeError, match="of its 2 micro-batches"):
        for _, group in remaining.accumulated(range(loaded)):
            for _ in range(used):
                next(group, None)


def test_a_loop_may_stop_after_any_step():
    ((_, remaining),) = Plan(total_steps=3, steps_per_epoch=3).epochs()
    for _step, group in remaining.accumulated(range(3)):
        list(group)
        break
    else:
        pytest.fail("no step was taken")


def test_a_loop_without_accumulation_gets_a_batch_for_each_step():
    plan = Plan(total_steps=5, steps_per_epoch=3)
    seen = [
        (epoch, step, batch)
        for epoch, remaining in plan.epochs(start=1)
        for step, batch in remaining.steps("abc"[remaining.skip :])
    ]
    assert seen == [(0, 2, "b"), (0, 3, "c"), (1, 4, "a"), (1, 5, "b")]


def test_a_loader_that_ends_early_is_an_error_in_a_loop_without_accumulation():
    ((_, remaining),) = Plan(total_steps=3, steps_per_epoch=3).epochs()
    with pytest.raises(RuntimeError, match="no batch for step 3"):
        list(remaining.steps("ab"))


def test_a_loop_without_accumulation_refuses_a_plan_that_accumulates():
    ((_, remaining),) = Plan(total_steps=2, steps_per_epoch=2, accumulation=2).epochs()
    with pytest.raises(RuntimeError, match="does not accumulate"):
        next(remaining.steps("abcd"))


def test_what_is_due_when():
    plan = Plan(total_steps=10, steps_per_epoch=5, log_every=3, evaluate_every=4, save_every=6)
    steps = range(1, 11)
    assert [step for step in steps if plan.log_due(step)] == [3, 6, 9, 10]
    assert [step for step in steps if plan.evaluation_due(step)] == [4, 8, 10]
    assert [step for step in steps if plan.save_due(step)] == [6, 10]
    assert [step for step in steps if plan.save_due(step, improved=step == 4)] == [4, 6, 10]
    assert plan.epoch_at(10) == 2 and plan.epoch_at(1) == 0.2


def test_save_every_0_saves_only_at_the_end():
    plan = Plan(total_steps=3, steps_per_epoch=3, save_every=0)
    assert [plan.save_due(step, improved=True) for step in (1, 2, 3)] == [False, False, True]


def arguments(**changes):
    values = dict(epochs=3, max_train_steps=None, batch_size=10, gradient_accumulation_steps=2)
    return Namespace(
        **(values | dict(log_every=7, eval_every=None, checkpoint_every=None) | changes)
    )


def test_reads_the_command_line():
    assert Plan.from_args(arguments(), samples=49) == Plan(12, 4, 2, 7, 4, 4)
    assert Plan.from_args(
        arguments(max_train_steps=5, eval_every=9, checkpoint_every=0), samples=49
    ) == Plan(5, 4, 2, 7, 9, 0)
    assert Plan.from_args(arguments(max_train_steps=50), samples=None) == Plan(50, 50, 2, 7, 50, 50)
    with pytest.raises(UserError, match="--batch_size 10 is more than the 9 training samples"):
        Plan.from_args(arguments(), samples=9)


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (39, 1), (40, 2), (199, 9), (5000, 10)])
def test_a_run_logs_twenty_times_or_every_ten_steps(steps, every):
    """Not every step of a short epoch: the length of the run counts."""
    plan = Plan.from_args(arguments(log_every=None, max_train_steps=steps), samples=49)
    assert plan.log_every == every


def test_needs_no_torch():
    code = "import sys; import utils.run.plan; assert 'torch' not in sys.modules and 'accelerate' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_script_without_the_flag_does_not_accumulate():
    args = Namespace(
        batch_size=10, epochs=1, max_train_steps=None, log_every=None, eval_every=None,
        checkpoint_every=None,
    )  # fmt: skip
    assert Plan.from_args(args, 100).accumulation == 1
