"""Patience: a run ends after so many evaluations without a better score."""

import pytest
from harness.launches import load_script, metrics, results, run, status

from utils.run.best import Best
from utils.run.failures import UserError


def scored(best, *scores):
    """Adds evaluations; returns after which of them the run is out of patience."""
    ended = []
    for step, score in enumerate(scores, 1):
        best.add(step, score, None)
        ended.append(best.out_of_patience())
    return ended


def test_a_run_ends_after_so_many_evaluations_without_a_better_score():
    assert scored(Best(2), 0.5, 0.4, 0.6, 0.5, 0.5) == [False, False, False, False, True]
    # Of equal scores the later one is better, so that the run goes on.
    assert scored(Best(1), 0.5, 0.5, 0.5) == [False] * 3
    assert scored(Best(), 0.5, 0.4, 0.3) == [False] * 3
    assert scored(Best(1), 0.5, float("nan")) == [False, True]


def test_nothing_is_the_best_before_the_first_evaluation():
    best = Best(1)
    assert not best.improved_at(0) and not best.improved_at(None) and not best.out_of_patience()
    best.add(4, 0.5, 1.0)
    assert best.improved_at(4) and not best.improved_at(5)


def test_the_count_is_in_the_checkpoint():
    best = Best(3)
    scored(best, 0.5, 0.4, 0.3)
    again = Best(3)
    again.restore(best.record(3), longer=False)
    again.add(4, 0.45, None)
    assert again.out_of_patience() and again.reason() == "no better score for 3 evaluations"
    longer = Best(3)
    longer.restore(best.record(3), longer=True)
    assert scored(longer, 0.4, 0.4, 0.4) == [False, False, True]
    assert longer.record(9) == dict(score=None, loss=None, best=0.5, best_loss=None, stale=3)
    old = Best(1)
    old.restore({"best": 0.5}, longer=False)  # a checkpoint without a count
    assert not old.out_of_patience() and old.reason() == "all steps done"


WORSE = (  # a learning rate with which the score soon gets worse
    "--dataset synthetic --model net --batch_size 100 --val_fraction 0.1 --lr 0.3 --max_train_steps 40 "
    "--log_every 1 --eval_every 2 --checkpoint_every 1000 --lr_schedule constant --track none"
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that ended early, and where."""
    folder = tmp_path_factory.mktemp("patience") / "run"
    done = run("cpu", "scripts/train_cifar.py", f"{WORSE} --patience 2", output_dir=folder)
    step = results(folder)["global_step"]
    assert step < 40 and step % 2 == 0
    assert "finished: no better score for 2 evaluations" in done.stdout
    return folder, step


def test_a_run_that_ended_early_is_finished(ended, tmp_path):
    folder, step = ended
    state = status(folder)
    assert (state["state"], state["step"]) == ("finished", step)
    assert state["reason"] == "no better score for 2 evaluations"
    scores = [line["score"] for line in metrics(folder, "val")]
    best = max(range(len(scores)), key=lambda i: (scores[i], i))
    assert len(scores) == best + 3 == step // 2  # it ends with the second that is not better
    assert results(folder)["best_checkpoint"] == f"step_{2 * (best + 1):08d}"
    assert (folder / "checkpoints" / f"step_{step:08d}").exists()
    for patience in (2, 1):
        again = f"{WORSE} --patience {patience}"
        done = run("cpu", "scripts/train_cifar.py", again, output_dir=folder)
        assert "has already finished" in done.stdout and "or a larger --patience" in done.stdout


@pytest.mark.parametrize("longer", ["--patience 3", "--patience 2 --max_train_steps 60", ""])
def test_it_goes_on_with_more_patience_or_more_steps(longer, ended, tmp_path):
    import shutil

    folder, step = ended
    shutil.copytree(folder, tmp_path / "run")
    run("cpu", "scripts/train_cifar.py", f"{WORSE} {longer}", output_dir=tmp_path / "run")
    assert results(tmp_path / "run")["resumed_from"] == step
    assert results(tmp_path / "run")["global_step"] > step


@pytest.mark.slow
def test_a_killed_run_ends_at_the_same_step(ended, tmp_path):
    _, step = ended
    arguments = f"{WORSE} --patience 2 --checkpoint_every 1"
    words = [f"die_in_step@{step}", "scripts/train_cifar.py", *arguments.split()]
    run("2cpu", "tests/harness/wrapped.py", words, output_dir=tmp_path / "run", check=False)
    assert not (tmp_path / "run" / "results.json").exists()
    done = run("2cpu", "scripts/train_cifar.py", arguments, output_dir=tmp_path / "run")
    assert "continuing from" in done.stdout and results(tmp_path / "run")["global_step"] == step
    assert status(tmp_path / "run")["state"] == "finished"


@pytest.mark.parametrize("script", ["train_cifar", "train_lm"])
def test_patience_needs_held_out_data(script, tmp_path, monkeypatch):
    if script == "train_cifar":
        done = run(
            None,
            "scripts/train_cifar.py",
            "--dataset synthetic --patience 2",
            output_dir=tmp_path / "run",
            check=False,
        )
        assert done.returncode == 2 and done.stderr.count("--patience needs held-out images") == 1
        assert not (tmp_path / "run").exists()
        return
    module = load_script(script)
    data = type("Data", (), {"splits": {"train": None, "test": None}, "kind": "text"})
    monkeypatch.setattr(module, "local_main_first", lambda *_: data)
    monkeypatch.setattr(module, "agree", lambda *_: "")
    names = (
        "subset",
        "loss_on",
        "too_long",
        "packed",
        "block_size",
        "val_fraction",
        "seed",
    )
    given = {"sources": ["a"], "streaming": False, "patience": 1}
    args = type("Args", (), {**dict.fromkeys(names), **given})
    with pytest.raises(UserError, match="--patience needs a validation split"):
        module.load_data(None, None, args)
