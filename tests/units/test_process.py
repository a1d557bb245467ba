"""When `utils.run.process` collects garbage. (Launches show all else that it does.)"""

import argparse
import gc
import os
import weakref

import pytest
from harness.worlds import in_forks

from utils.run import process


def test_garbage_is_collected_again_after_the_imports():
    def run(_rank):
        os.environ.pop("RANK", None)
        process.handle_signals()
        seen = [gc.isenabled()]
        process.run(lambda: seen.append(gc.isenabled()))
        return seen

    assert in_forks(run) == [[False, True]]


@pytest.mark.parametrize("installed", [True, False])  # False: in a notebook
def test_training_starts_without_garbage(installed):
    def run(_rank):
        if installed:
            process.handle_signals()
        cycle = argparse.Namespace()
        cycle.itself, seen = cycle, weakref.ref(cycle)
        del cycle
        gc.unfreeze()
        process.training_starts()
        return gc.get_freeze_count() > 1000, seen() is None

    ((frozen, collected),) = in_forks(run)
    assert frozen == installed and (collected or not installed)
