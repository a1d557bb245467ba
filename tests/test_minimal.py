"""The smallest loop: the same figures on any number of processes, and exact resuming."""

import pytest
from conftest import Started, final_weights, metrics, results, run, status

MINIMAL = "scripts/train_minimal.py"
ARGUMENTS = "--epochs 16 --log_every 20 --checkpoint_every 60"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What whole runs printed, and their folders, by configuration."""
    folders = {config: tmp_path_factory.mktemp("minimal") / config for config in ("cpu", "2cpu")}
    return {config: (run(config, MINIMAL, ARGUMENTS, output_dir=folder), folder) for config, folder in folders.items()}


def test_learns_and_says_so_once(uninterrupted):
    for processes, (done, folder) in enumerate(uninterrupted.values(), 1):
        found = results(folder)
        assert found["num_processes"] == processes and found["global_step"] == 480
        assert found["train_accuracy"] >= 0.95
        assert status(folder)["state"] == "finished"
        for step in range(20, 481, 20):
            assert done.stdout.count(f"step {step}/480 ") == 1  # one line, not one per process
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_00000420", "step_00000480"]


def test_figures_are_of_the_whole_batch(uninterrupted):
    """Were they one process' own, they would differ with the number of processes."""
    one, two = (metrics(folder, "train") for _, folder in uninterrupted.values())
    # Later on, rounding has grown; 1 of 100 points may then fall on the other side.
    for a, b in zip(one[:4], two[:4], strict=True):
        assert (a["step"], a["accuracy"]) == (b["step"], b["accuracy"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


@pytest.mark.parametrize("config", ["cpu", "2cpu"])
def test_killed_and_relaunched_ends_with_the_same_weights(config, uninterrupted, tmp_path):
    started = Started(config, MINIMAL, ARGUMENTS, output_dir=tmp_path)
    started.wait_for("step 200/")
    started.kill_all()
    assert not (tmp_path / "results.json").exists()
    done = run(config, MINIMAL, ARGUMENTS, output_dir=tmp_path)
    assert "continuing from" in done.stdout
    assert 180 <= results(tmp_path)["resumed_from"] < 480
    assert final_weights(tmp_path) == final_weights(uninterrupted[config][1])
    assert metrics(tmp_path, "train") == metrics(uninterrupted[config][1], "train")


def faulty(fault, folder):
    """Runs it with a fault in it; returns all that was printed."""
    done = run("2cpu", "tests/wrapped.py", [fault, MINIMAL, *ARGUMENTS.split()], output_dir=folder, check=False)
    assert done.returncode != 0, done.stdout
    return done.stdout + done.stderr


def test_a_signal_to_one_process_saves_and_stops_both(uninterrupted, tmp_path):
    output = faulty("sigterm_in_step@101:1", tmp_path)
    assert output.count("the same command continues") == 1 and "exitcode  : 75" in output
    found = status(tmp_path)
    assert found["state"] == "preempted" and found["step"] == 102  # agreed on while the next step computes
    run("2cpu", MINIMAL, ARGUMENTS, output_dir=tmp_path)
    assert results(tmp_path)["resumed_from"] == 102
    assert final_weights(tmp_path) == final_weights(uninterrupted["2cpu"][1])
    assert metrics(tmp_path, "train") == metrics(uninterrupted["2cpu"][1], "train")


def test_a_loss_that_is_no_number_stops_both(tmp_path):
    output = faulty("nan@64:1", tmp_path)  # three of these calls are of logged steps
    assert output.count("error: the loss is not a finite number at step 61;") == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000060"]


def test_a_finished_run_stays_as_it_is(uninterrupted):
    _, folder = uninterrupted["cpu"]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    assert "finished already" in run("cpu", MINIMAL, ARGUMENTS, output_dir=folder).stdout
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}


def test_a_batch_that_does_not_divide_is_one_line(tmp_path):
    done = run("2cpu", MINIMAL, "--batch_size 101", output_dir=tmp_path, check=False)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "100 or 102" in errors[0]
    assert not list(tmp_path.iterdir())


def test_help_is_printed_once():
    assert run("2cpu", MINIMAL, "--help").stdout.count("usage:") == 1
