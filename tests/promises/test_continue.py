"""What may change when a run continues: the same rule in all scripts. (test_readme.py has its text.)"""

import json
import shutil

import pytest
from harness.launches import CIFAR, SMALL, final_weights, metrics, results, run, status

MINIMAL, WRAPPED = "scripts/train_minimal.py", "tests/harness/wrapped.py"
SHORT = "--epochs 2 --log_every 30"  # 60 steps


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of train_minimal.py and one of train_cifar.py; tests use copies of them."""
    short = SMALL.replace("--max_train_steps 14", "--max_train_steps 8")
    folders = {}
    for name, arguments in (("minimal", SHORT), ("cifar", short)):
        folders[name] = tmp_path_factory.mktemp("finished")
        run(None, f"scripts/train_{name}.py", arguments, output_dir=folders[name])
    return folders


def copy(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
    return tmp_path / "run"


def test_what_else_changed_is_said_and_recorded(finished, tmp_path):
    """Another number of processes or precision is allowed, but the weights are not exactly the
    same.
    """
    folder, longer = copy(finished["minimal"], tmp_path), SHORT.replace("--epochs 2", "--epochs 3")
    done = run("2cpu", MINIMAL, longer, output_dir=folder, launcher=("--mixed_precision", "bf16"))
    assert "length changed from 60 to 90 steps" in done.stdout
    assert "processes 1 -> 2" in done.stdout and "mixed precision no -> bf16" in done.stdout
    assert (
        done.stdout.count("The final weights will not be exactly those of an uninterrupted run")
        == 1
    )
    starts = json.loads((folder / "args.json").read_text())["starts"]
    assert [(start["step"], start["processes"], start["mixed_precision"]) for start in starts] == [
        (0, 1, "no"),
        (60, 2, "bf16"),
    ]


def test_where_and_how_it_runs_may_change(finished, tmp_path):
    folder = copy(finished["cifar"], tmp_path)
    other = "--checkpoint_every 5 --keep_checkpoints 1 --log_every 2 --eval_every 4 --timeout 99 --track none"
    done = run("cpu", CIFAR, f"{SMALL} {other} --gradient_accumulation_steps 2", output_dir=folder)
    assert "continuing from" in done.stdout and results(folder)["global_step"] == 14


@pytest.mark.parametrize(("name", "arguments"), [("minimal", SHORT), ("cifar", SMALL)])
def test_a_fork_keeps_the_optimizer_and_may_change_how_it_trains(
    name, arguments, finished, tmp_path
):
    """With a learning rate of 0 the weights stay as they were."""
    source = max((finished[name] / "checkpoints").glob("step_*"))
    seed = " --seed 7" if name == "cifar" else ""  # of train_minimal.py it makes the data
    words = f"{arguments} --epochs 3 --lr 0{seed} --resume {source}"
    done = run("cpu", f"scripts/train_{name}.py", words, output_dir=tmp_path / "fork")
    assert "--lr 0 (was 0.0" in done.stdout and ("--seed 7 (was 0)" in done.stdout) == bool(seed)
    assert ("the rest of this epoch has other samples" in done.stdout) == bool(seed)
    assert {line["lr"] for line in metrics(tmp_path / "fork", "train")} == {0}
    newest = max((tmp_path / "fork" / "checkpoints").glob("step_*"))
    assert newest.name > source.name and final_weights(newest) == final_weights(source)
    recorded = json.loads((newest / "manifest.json").read_text())["arguments"]
    assert (recorded["lr"], recorded["resume"]) == (0, str(source))


REFUSED = {
    "a length below the steps taken": (
        "minimal",
        f"{SHORT} --epochs 1",
        ("ask for 30 steps, but the run has taken 60 already",),
    ),
    "another script": (
        "cifar",
        SHORT,
        ("holds a run of train_cifar.py, not train_minimal.py: use another --output_dir",),
    ),
    "any other change": (
        "cifar",
        f"{SMALL} --lr 0.5 --seed 3",
        (
            "--lr 0.5 (was 0.04)",
            "--seed 3 (was 0)",
            "To continue a run, keep its arg",
            "another --output_dir",
            "--init_from ",
        ),
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_may_not_change_is_one_line_that_says_what_to_do(change, finished, tmp_path):
    name, arguments, says = REFUSED[change]
    folder = copy(finished[name], tmp_path)
    script = MINIMAL if change == "another script" else f"scripts/train_{name}.py"
    done = run(None, script, arguments, output_dir=folder, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1
    assert all(part in errors[0] for part in says), errors
    assert status(folder)["state"] == "finished"


@pytest.mark.parametrize("place", ["", "checkpoints/step_00000008"])
def test_a_run_starts_with_the_weights_of_another_and_nothing_else(place, finished, tmp_path):
    trained, folder = finished["cifar"], tmp_path / "run"
    words = (
        f"{SMALL} --lr 0 --max_train_steps 1 --init_from {trained / place}"  # changes no weights
    )
    run("2cpu" if place else None, CIFAR, words, output_dir=folder)
    # So every process had the same weights.
    assert final_weights(folder) == final_weights(trained)
    assert results(folder)["resumed_from"] == 0 and results(folder)["global_step"] == 1
    recorded = json.loads((folder / "args.json").read_text())["arguments"]["init_from"]
    assert recorded == str((trained / place).resolve())
