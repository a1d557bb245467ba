"""compare_ddp.py is itself a test of DDP; these tests check its report.

They also check that it would notice a difference.
"""

import pytest
from harness.launches import metrics, results, run_once, status
from PIL import Image
from safetensors.torch import load_file

COMPARE = "scripts/tools/compare_ddp.py"
RUNS = ["replicated", "replicated_single", "ddp", "ddp_single"]
ARGUMENTS = "--dataset synthetic --max_train_steps 11 --proof_steps 8 --log_every 5"


@pytest.fixture(scope="module")
def compared(made_once):
    """A comparison with two processes: its output, and its folder."""
    return run_once(made_once, "compared", "2cpu", COMPARE, ARGUMENTS)


def test_pairs_agree(compared):
    result = results(compared.folder)
    assert result["num_processes"] == 2 and status(compared.folder)["state"] == "finished"
    assert result["pairs"].keys() == {"replicated", "ddp"}
    for pair in result["pairs"].values():
        assert 0 < pair["max_relative_difference"] <= 1e-5  # not 0: they are two computations
        assert pair["max_loss_difference"] < 1e-5
    # The two pairs are different experiments: this fails if weights are compared with themselves.
    records = [load_file(compared.folder / f"{name}.safetensors") for name in ("replicated", "ddp")]
    replicated, ddp = (record["final.fc1.weight"] for record in records)
    assert (replicated - ddp).abs().max() > 1e-4


def test_gradients_agree_only_with_the_corrections(compared):
    gradients = results(compared.folder)["gradients"]
    wrong = {case for case in gradients["float64"] if "uncorrected" in case}
    assert len(wrong) == 2 and len(gradients["float64"]) == 6
    for precision, tolerance in (("float64", 1e-12), ("float32", 1e-4)):
        for case, value in gradients[precision].items():
            assert value > 0.01 if case in wrong else value < tolerance, case
    # DDP divides the sum by the number of processes.
    assert gradients["float64"]["sum, uncorrected"] == pytest.approx(0.5)


def test_the_loss_of_the_batch_is_the_mean_of_all_processes(compared):
    losses = results(compared.folder)["losses_of_one_batch"]
    assert len(losses["per_process"]) == 2 and losses["per_process"][0] != losses["per_process"][1]
    assert losses["mean"] == pytest.approx(losses["one_process"], rel=1e-6)


def test_table_and_plot(compared):
    rows = results(compared.folder)["runs"]
    columns = ("processes", "batch_per_process", "effective_batch", "steps")
    assert {name: tuple(row[column] for column in columns) for name, row in rows.items()} == {
        "replicated": (2, 64, 128, 11),
        "replicated_single": (1, 128, 128, 11),
        "ddp": (2, 32, 64, 11),
        "ddp_single": (1, 64, 64, 11),
    }
    for name, single in (RUNS[:2], RUNS[2:]):
        speed_up = rows[single]["seconds"] / rows[name]["seconds"]
        assert rows[name]["speed_up"] == pytest.approx(speed_up)
        assert rows[name]["efficiency"] == pytest.approx(speed_up / 2)
        assert compared.stdout.count(f"\n{name} ...") == 1
        assert [line["step"] for line in metrics(compared.folder, name)] == [1, 6, 11]
    assert Image.open(compared.folder / "loss_curves.png").width > 800
