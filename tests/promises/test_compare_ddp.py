"""compare_ddp.py is itself a test of DDP; these tests check its report.

They also check that it would notice a difference.
"""

import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from harness.launches import Started, load_script, metrics, results, run, status
from PIL import Image
from safetensors.torch import load_file

COMPARE = "scripts/compare_ddp.py"
RUNS = ["replicated", "replicated_single", "ddp", "ddp_single"]
ARGUMENTS = "--dataset synthetic --max_train_steps 25 --proof_steps 20 --log_every 5"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The output of a comparison with two processes, and its folder."""
    folder = tmp_path_factory.mktemp("compare")
    return run("2cpu", COMPARE, ARGUMENTS, output_dir=folder), folder


def test_pairs_agree(compared):
    result = results(compared[1])
    assert result["num_processes"] == 2 and status(compared[1])["state"] == "finished"
    assert result["pairs"].keys() == {"replicated", "ddp"}
    for pair in result["pairs"].values():
        assert 0 < pair["max_relative_difference"] <= 1e-5  # not 0: they are two computations
        assert pair["max_loss_difference"] < 1e-5
    # The two pairs are different experiments: this fails if weights are compared with themselves.
    records = [load_file(compared[1] / f"{name}.safetensors") for name in ("replicated", "ddp")]
    replicated, ddp = (record["final.fc1.weight"] for record in records)
    assert (replicated - ddp).abs().max() > 1e-4


def test_gradients_agree_only_with_the_corrections(compared):
    gradients = results(compared[1])["gradients"]
    wrong = {case for case in gradients["float64"] if "uncorrected" in case}
    assert len(wrong) == 2 and len(gradients["float64"]) == 6
    for case, value in gradients["float64"].items():
        assert value > 0.01 if case in wrong else value < 1e-12, case
    for case, value in gradients["float32"].items():
        assert value > 0.01 if case in wrong else value < 1e-4, case
    # DDP divides the sum by the number of processes.
    assert gradients["float64"]["sum, uncorrected"] == pytest.approx(0.5)


def test_the_loss_of_the_batch_is_the_mean_of_all_processes(compared):
    losses = results(compared[1])["losses_of_one_batch"]
    assert len(losses["per_process"]) == 2 and losses["per_process"][0] != losses["per_process"][1]
    assert losses["mean"] == pytest.approx(losses["one_process"], rel=1e-6)


def test_table_and_plot(compared):
    done, folder = compared
    rows = results(folder)["runs"]
    assert list(rows) == RUNS
    columns = ("processes", "batch_per_process", "effective_batch")
    shapes = {name: tuple(row[column] for column in columns) for name, row in rows.items()}
    assert shapes == {
        "replicated": (2, 64, 128),
        "replicated_single": (1, 128, 128),
        "ddp": (2, 32, 64),
        "ddp_single": (1, 64, 64),
    }
    for name, single in (RUNS[:2], RUNS[2:]):
        speed_up = rows[single]["seconds"] / rows[name]["seconds"]
        assert rows[name]["speed_up"] == pytest.approx(speed_up)
        assert rows[name]["efficiency"] == pytest.approx(rows[name]["speed_up"] / 2)
        assert done.stdout.count(f"\n{name} ...") == 1
        assert [line["step"] for line in metrics(folder, name)] == [1, 6, 11, 16, 21]
    assert Image.open(folder / "loss_curves.png").width > 800


@pytest.mark.parametrize(
    ("steps", "steps_per_epoch", "epochs", "final_loss"),
    [(4, 10, 0.4, 2.5), (10, 10, 1, 5.5), (25, 10, 2.5, 20.5), (1, 32, 0.031, 1)],
)
def test_epochs_and_final_loss_are_those_of_the_steps(steps, steps_per_epoch, epochs, final_loss):
    args = SimpleNamespace(batch_size=64, epochs=5, ddp_epochs=2)
    record = {"losses": torch.arange(1.0, steps + 1)[None], "seconds": torch.ones(1)}
    script = load_script("compare_ddp")
    row = script.row_of("ddp_single", record, 2, steps_per_epoch, args)
    assert (row["steps"], row["epochs"], row["final_loss"]) == (steps, epochs, final_loss)
    assert f"  {epochs:6g}  {steps:5}  " in script.table({"ddp_single": row})


def test_each_step_is_progress():
    script, steps = load_script("compare_ddp"), []
    args = SimpleNamespace(dataset="synthetic", batch_size=8, ddp_epochs=1, max_train_steps=3)
    args.seed, args.lr, args.momentum, args.proof_steps = 0, 0.1, 0.9, 1

    def should_stop(step, *_):
        steps.append((script.place.step, step))

    data = script.load_arrays("synthetic", seed=0)
    accelerator = SimpleNamespace(device=torch.device("cpu"), backward=lambda loss: loss.backward())
    script.train(accelerator, "ddp_single", data, args, should_stop)
    assert steps == [(1, 1), (2, 2), (3, 3)]


def test_one_process_compares_with_itself(tmp_path):
    arguments = "--dataset synthetic --max_train_steps 3 --batch_size 8"
    run("cpu", COMPARE, arguments, output_dir=tmp_path)
    pairs = results(tmp_path)["pairs"].values()
    assert [pair["max_relative_difference"] for pair in pairs] == [0, 0]


def test_runs_of_other_versions_are_not_compared(tmp_path):
    """A run of an interrupted comparison counts only if the machine and the versions are the same."""
    arguments = "--dataset synthetic --max_train_steps 3 --batch_size 8"
    run("cpu", COMPARE, arguments, output_dir=tmp_path)
    (tmp_path / "results.json").unlink()  # as if it had been interrupted before its end
    (tmp_path / "status.json").write_text('{"state": "running"}')
    assert not (tmp_path / "unfinished.json").exists()
    (tmp_path / "unfinished.json").write_text(
        json.dumps({"conditions": {"versions": {"torch": "0.1"}}, "values": {"ddp": 1.0}})
    )
    done = run("cpu", COMPARE, arguments, output_dir=tmp_path)
    assert "starts over: another " in done.stdout and "already finished" not in done.stdout
    assert done.stdout.count(" left\n") == 4 and "about 0:00:00 left" in done.stdout


@pytest.mark.slow
def test_killed_comparison_keeps_its_finished_runs(compared, tmp_path):
    started = Started("2cpu", COMPARE, ARGUMENTS, output_dir=tmp_path)
    started.wait_for("ddp ...")
    for worker in started.workers().values():
        os.kill(worker, signal.SIGKILL)
    started.kill_all()

    def times():
        paths = tmp_path.glob("replicated*.safetensors")
        return {path.name: path.stat().st_mtime_ns for path in paths}

    kept = times()
    assert len(kept) == 2
    done = run("2cpu", COMPARE, ARGUMENTS, output_dir=tmp_path)
    assert "replicated: already finished" in done.stdout and "ddp_single ..." in done.stdout
    assert times() == kept
    for name in RUNS:
        again, before = (load_file(out / f"{name}.safetensors") for out in (tmp_path, compared[1]))
        assert all(again[key].equal(before[key]) for key in before if key != "seconds")
    assert metrics(tmp_path, "ddp") == metrics(compared[1], "ddp")
