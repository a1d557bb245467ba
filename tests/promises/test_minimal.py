"""train_minimal.py: the same metrics on any number of processes, exact validation, exact resume."""

import json

import pytest
from harness.launches import Started, final_weights, metrics, results, run, status

MINIMAL = "scripts/train_minimal.py"
ARGUMENTS = "--epochs 8 --log_every 20 --checkpoint_every 60"


def test_help_is_printed_once():
    assert run("2cpu", MINIMAL, "--help").stdout.count("usage:") == 1


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """configuration -> output and folder of an uninterrupted run."""
    folders = {config: tmp_path_factory.mktemp("minimal") / config for config in ("cpu", "2cpu")}
    return {
        config: (run(config, MINIMAL, ARGUMENTS, output_dir=folder), folder)
        for config, folder in folders.items()
    }


def test_learns_and_says_so_once(uninterrupted):
    for processes, (done, folder) in enumerate(uninterrupted.values(), 1):
        result = results(folder)
        assert result["num_processes"] == processes and result["global_step"] == 240
        assert result["val_accuracy"] >= 0.95
        assert status(folder)["state"] == "finished"
        for step in range(20, 241, 20):
            assert done.stdout.count(f"step {step:>3}/240 ") == 1  # one line, not one per process


def test_validates_every_held_out_point_once(uninterrupted):
    for _, folder in uninterrupted.values():
        lines = metrics(folder, "val")
        assert [line["step"] for line in lines] == list(range(30, 241, 30))
        for line in lines:
            # A multiple of 1/997. 997 is prime: with a repeated or missing point the accuracy would
            # not be such a fraction.
            assert line["accuracy"] * 997 == pytest.approx(round(line["accuracy"] * 997), abs=1e-9)
        assert results(folder)["val_accuracy"] == lines[-1]["accuracy"]


def test_the_best_checkpoint_is_kept_and_its_score_is_of_its_own_step(uninterrupted):
    _, folder = uninterrupted["cpu"]
    accuracy = {line["step"]: line["accuracy"] for line in metrics(folder, "val")}
    scores = {}
    for path in (folder / "checkpoints").iterdir():
        progress = json.loads((path / "manifest.json").read_text())["progress"]
        scores[progress["step"]] = progress["score"]
        assert progress["score"] == accuracy.get(progress["step"])
    best = max(accuracy, key=lambda step: (accuracy[step], step))  # of equal ones the newest
    assert best in scores and 240 in scores and len(scores) <= 3
    assert results(folder)["best_checkpoint"] == f"step_{best:08}"


def test_figures_are_of_the_whole_batch(uninterrupted):
    """Metrics of a single process would depend on the number of processes."""
    one, two = (metrics(folder, "train") for _, folder in uninterrupted.values())
    # Only the first steps, because rounding differences grow.
    for a, b in zip(one[:4], two[:4], strict=True):
        assert a["step"] == b["step"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


@pytest.mark.parametrize("config", ["cpu", "2cpu"])
def test_killed_and_relaunched_ends_with_the_same_weights(config, uninterrupted, tmp_path):
    started = Started(config, MINIMAL, ARGUMENTS, output_dir=tmp_path)
    started.wait_for("step 100/")
    started.kill_all()
    assert not (tmp_path / "results.json").exists()
    done = run(config, MINIMAL, ARGUMENTS, output_dir=tmp_path)
    assert "continuing from" in done.stdout
    assert 60 <= results(tmp_path)["resumed_from"] < 240
    assert final_weights(tmp_path) == final_weights(uninterrupted[config][1])
    assert metrics(tmp_path, "train") == metrics(uninterrupted[config][1], "train")


def faulty(fault, folder):
    """Runs the script with a fault; returns its output."""
    done = run(
        "2cpu",
        "tests/harness/wrapped.py",
        [fault, MINIMAL, *ARGUMENTS.split()],
        output_dir=folder,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    return done.stdout + done.stderr


def test_a_signal_to_one_process_saves_and_stops_both(uninterrupted, tmp_path):
    output = faulty("sigterm_in_step@101:1", tmp_path)
    assert output.count("run the same command again") == 1 and "exitcode  : 75" in output
    run_status = status(tmp_path)
    # The processes agree one step later.
    assert run_status["state"] == "preempted" and run_status["step"] == 102
    run("2cpu", MINIMAL, ARGUMENTS, output_dir=tmp_path)
    assert results(tmp_path)["resumed_from"] == 102
    assert final_weights(tmp_path) == final_weights(uninterrupted["2cpu"][1])
    assert metrics(tmp_path, "train") == metrics(uninterrupted["2cpu"][1], "train")


def test_a_non_finite_loss_stops_both(tmp_path):
    output = faulty("nan@64:1", tmp_path)
    assert output.count("error: non-finite loss at step 64;") == 1
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step_{step:08d}" for step in (30, 60)
    ]


def test_a_finished_run_stays_as_it_is(uninterrupted):
    _, folder = uninterrupted["cpu"]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    assert "already finished" in run("cpu", MINIMAL, ARGUMENTS, output_dir=folder).stdout
    assert before == {
        path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"
    }


def test_a_batch_that_does_not_divide_is_one_line(tmp_path):
    done = run("2cpu", MINIMAL, "--batch_size 101", output_dir=tmp_path, check=False)
    errors = [
        line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")
    ]
    assert len(errors) == 1 and "100 or 102" in errors[0]
    assert not list(tmp_path.iterdir())
