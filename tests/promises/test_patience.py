"""Patience: a run ends after so many evaluations without a better score."""

import shutil

import pytest
from harness.launches import CIFAR, metrics, results, run, run_once, status

WORSE = (  # a learning rate with which the score soon gets worse
    "--dataset synthetic --model net --batch_size 100 --val_fraction 0.1 --lr 0.3 --max_train_steps 40 "
    "--log_every 1 --eval_every 2 --checkpoint_every 1000 --lr_schedule constant --track none"
)


@pytest.fixture
def ended(made_once):
    """A run that ended early, and at which step."""
    done = run_once(made_once, "patience", "cpu", CIFAR, f"{WORSE} --patience 2")
    step = results(done.folder)["global_step"]
    assert step < 40 and step % 2 == 0
    assert "finished: no better score for 2 evaluations" in done.stdout
    return done.folder, step


def test_a_run_that_ended_early_is_finished(ended):
    folder, step = ended
    state = status(folder)
    assert (state["state"], state["step"]) == ("finished", step)
    assert state["reason"] == "no better score for 2 evaluations"
    scores = [line["score"] for line in metrics(folder, "val")]
    best = max(range(len(scores)), key=lambda i: (scores[i], i))
    assert len(scores) == best + 3 == step // 2  # it ends with the second that is not better
    assert results(folder)["best_checkpoint"] == f"step_{2 * (best + 1):08d}"
    assert (folder / "checkpoints" / f"step_{step:08d}").exists()
    done = run("cpu", CIFAR, f"{WORSE} --patience 1", output_dir=folder)
    assert "has already finished" in done.stdout and "or a larger --patience" in done.stdout


@pytest.mark.parametrize(
    "longer",
    [
        "--patience 3",
        pytest.param("--patience 2 --max_train_steps 60", marks=pytest.mark.slow),
    ],
)
def test_it_goes_on_with_more_patience_or_more_steps(longer, ended, tmp_path):
    folder, step = ended
    shutil.copytree(folder, tmp_path / "run")
    run("cpu", CIFAR, f"{WORSE} {longer}", output_dir=tmp_path / "run")
    assert results(tmp_path / "run")["resumed_from"] == step
    assert results(tmp_path / "run")["global_step"] > step


@pytest.mark.slow
def test_a_killed_run_ends_at_the_same_step(ended, tmp_path):
    _, step = ended
    arguments = f"{WORSE} --patience 2 --checkpoint_every 1"
    words = [f"die_in_step@{step}", CIFAR, *arguments.split()]
    run("2cpu", "tests/harness/wrapped.py", words, output_dir=tmp_path / "run", check=False)
    assert not (tmp_path / "run" / "results.json").exists()
    done = run("2cpu", CIFAR, arguments, output_dir=tmp_path / "run")
    assert "continuing from" in done.stdout and results(tmp_path / "run")["global_step"] == step
    assert status(tmp_path / "run")["state"] == "finished"
