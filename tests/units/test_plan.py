"""What a plan reads from the command line. (Its steps: properties/test_plan_properties.py)"""

import subprocess
import sys
from argparse import Namespace

import pytest
from harness.launches import ROOT

from utils.run.failures import UserError
from utils.run.plan import Plan


def arguments(**changes):
    values = dict(epochs=3, max_train_steps=None, batch_size=10, gradient_accumulation_steps=2)
    values |= dict(log_every=7, eval_every=None, checkpoint_every=None)
    return Namespace(**values | changes)


def test_reads_the_command_line():
    assert Plan.from_args(arguments(), samples=49) == Plan(12, 4, 2, 7, 4, 4, left_out=9)
    given = arguments(max_train_steps=5, eval_every=9, checkpoint_every=0)
    assert Plan.from_args(given, samples=49) == Plan(5, 4, 2, 7, 9, 0, left_out=9)
    streamed = Plan.from_args(arguments(max_train_steps=50), samples=None)
    assert streamed == Plan(50, 50, 2, 7, 50, 50, stream=True)
    assert next(streamed.epochs(5))[1].skip == 0  # it continues at a position of its own
    without = arguments()
    del without.gradient_accumulation_steps
    assert Plan.from_args(without, samples=10) == Plan(3, 1, 1, 7, 1, 1)
    with pytest.raises(UserError, match="--batch_size 10 is more than the 9 training samples"):
        Plan.from_args(arguments(), samples=9)
    assert Plan.from_args(arguments(checkpoint_every=0), 49).save_every == 0
    for steps, every in ((1, 1), (39, 1), (40, 2), (199, 9), (5000, 10)):  # however short an epoch
        plan = Plan.from_args(arguments(log_every=None, max_train_steps=steps), samples=49)
        assert plan.log_every == every


def test_needs_no_torch():
    code = "import sys, utils.run.plan; assert not {'torch', 'accelerate'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
