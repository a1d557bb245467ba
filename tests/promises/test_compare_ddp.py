"""compare_ddp.py is itself a test of DDP; these tests check its report.

They also check that it would notice a difference.
"""

import re

import pytest
from harness.launches import results, run_once
from PIL import Image

COMPARE = "scripts/tools/compare_ddp.py"
RUNS = ("replicated", "replicated_single", "ddp", "ddp_single")
ARGUMENTS = "--dataset synthetic --max_train_steps 11"


@pytest.fixture(scope="module")
def compared(made_once):
    """A comparison with two processes: its output, and its folder."""
    return run_once(made_once, "compared", "2cpu", COMPARE, ARGUMENTS)


def test_pairs_agree(compared):
    result = results(compared.folder)
    assert result["num_processes"] == 2
    assert result["pairs"].keys() == {"replicated", "ddp"}
    for pair in result["pairs"].values():
        assert 0 < pair["max_relative_difference"] <= 1e-5  # not 0: they are two computations
        assert pair["max_loss_difference"] < 1e-5


def test_gradients_agree_only_with_the_corrections(compared):
    gradients = results(compared.folder)["gradients"]
    wrong = {case for case in gradients if "uncorrected" in case}
    assert len(wrong) == 2 and len(gradients) == 6
    for case, value in gradients.items():
        assert value > 0.01 if case in wrong else value < 1e-12, case
    # DDP divides the sum by the number of processes.
    assert gradients["sum, uncorrected"] == pytest.approx(0.5)


def test_the_loss_of_the_batch_is_the_mean_of_all_processes(compared):
    losses = results(compared.folder)["losses_of_one_batch"]
    assert len(losses["per_process"]) == 2 and losses["per_process"][0] != losses["per_process"][1]
    assert losses["mean"] == pytest.approx(losses["one_process"], rel=1e-5)


def test_lines_and_plot(compared):
    lines = re.findall(r"^(\w+): 11 steps in [\d.]+ s, last loss ([\d.]+)$", compared.stdout, re.M)
    assert tuple(name for name, _ in lines) == RUNS
    # The two pairs are different experiments: this fails if a run is compared with itself.
    losses = [loss for _, loss in lines]
    assert losses[0] == losses[1] != losses[2] == losses[3]
    assert Image.open(compared.folder / "loss_curves.png").width > 800
