"""compare_ddp.py is itself a test of DDP; this checks its report, and that it notices a difference."""

import re

import pytest
from harness.launches import results, run
from PIL import Image

COMPARE = "scripts/tools/compare_ddp.py"
ARGUMENTS = "--dataset synthetic --max_train_steps 11"


def test_pairs_agree_and_gradients_only_with_the_corrections(tmp_path):
    printed = run("2cpu", COMPARE, ARGUMENTS, output_dir=tmp_path).stdout
    result = results(tmp_path)
    assert result["num_processes"] == 2 and result["pairs"].keys() == {"replicated", "ddp"}
    for pair in result["pairs"].values():
        assert 0 < pair["max_relative_difference"] <= 1e-5  # not 0: they are two computations
        assert pair["max_loss_difference"] < 1e-5
    gradients = result["gradients"]
    wrong = {case for case in gradients if "uncorrected" in case}
    assert len(wrong) == 2 and len(gradients) == 6
    for case, value in gradients.items():
        assert value > 0.01 if case in wrong else value < 1e-12, case
    # DDP divides the sum by the number of processes.
    assert gradients["sum, uncorrected"] == pytest.approx(0.5)
    losses = result["losses_of_one_batch"]
    assert len(losses["per_process"]) == 2 and losses["per_process"][0] != losses["per_process"][1]
    assert losses["mean"] == pytest.approx(losses["one_process"], rel=1e-5)
    # The two pairs are different experiments: this fails if a run is compared with itself.
    lines = re.findall(r"^(\w+): 11 steps in [\d.]+ s, last loss ([\d.]+)$", printed, re.M)
    names, losses = zip(*lines, strict=True)
    assert names == ("replicated", "replicated_single", "ddp", "ddp_single")
    assert losses[0] == losses[1] != losses[2] == losses[3]
    assert Image.open(tmp_path / "loss_curves.png").width > 800
