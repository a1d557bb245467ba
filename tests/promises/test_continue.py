"""What may change when a run continues: the same rule in all scripts, in --help, in the README and
in the error message.
"""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
from harness.launches import CIFAR, ROOT, SMALL, final_weights, metrics, results, run, status

from utils.run.arguments import CONTINUE_RULE

MINIMAL = "scripts/train_minimal.py"
SHORT = "--epochs 2 --log_every 30"  # 60 steps


def words(text):
    """Text with line breaks replaced by spaces."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of train_minimal.py and one of train_cifar.py; tests use copies of them."""
    folders = {
        "minimal": tmp_path_factory.mktemp("finished") / "minimal",
        "cifar": tmp_path_factory.mktemp("finished") / "cifar",
    }
    run("cpu", MINIMAL, SHORT, output_dir=folders["minimal"])
    run(
        "cpu",
        CIFAR,
        SMALL.replace("--max_train_steps 14", "--max_train_steps 8"),
        output_dir=folders["cifar"],
    )
    return folders


def copy(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
    return tmp_path / "run"


def test_a_finished_run_trains_longer(finished, tmp_path):
    folder = copy(finished["minimal"], tmp_path)
    done = run("cpu", MINIMAL, SHORT.replace("--epochs 2", "--epochs 3"), output_dir=folder)
    assert (
        "length changed from 60 to 90 steps: the learning rate does not depend on it" in done.stdout
    )
    assert "changed since that checkpoint" not in done.stdout
    assert results(folder)["global_step"] == 90 and results(folder)["resumed_from"] == 60
    assert [line["step"] for line in metrics(folder, "train")] == [30, 60, 90]


def test_what_else_changed_is_said_and_recorded(finished, tmp_path):
    """Another number of processes or precision is allowed, but the weights are not exactly the
    same.
    """
    folder, longer = copy(finished["minimal"], tmp_path), SHORT.replace("--epochs 2", "--epochs 3")
    done = run("2cpu", MINIMAL, longer, output_dir=folder, launcher=("--mixed_precision", "bf16"))
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


def test_a_folder_of_another_script_is_named(finished, tmp_path):
    folder = copy(finished["cifar"], tmp_path)
    done = run("cpu", MINIMAL, SHORT, output_dir=folder, check=False)
    assert (
        f"error: {folder} holds a run of train_cifar.py, not train_minimal.py: use another --output_dir"
        in done.stderr
    )


def test_the_schedule_spans_the_new_length_from_the_first_step_on(finished, tmp_path):
    """The learning rate after step 8 of 8 is 0.

    From step 8 of 14 on, it is that of a run of 14 steps.
    """
    folder = copy(finished["cifar"], tmp_path)
    done = run("cpu", CIFAR, SMALL, output_dir=folder)
    lr = {step: 0.04 * (1 - step / 14) / 0.8 for step in range(8, 15)}
    assert (
        f"length changed from 8 to 14 steps: the learning rate at step 8 changes from 0 to {lr[8]:.3g}"
        in done.stdout
    )
    logged = {line["step"]: line["lr"] for line in metrics(folder, "train")}
    assert logged[8] == 0 and all(
        math.isclose(logged[step], lr[step], abs_tol=1e-12) for step in range(9, 15)
    )
    assert results(folder)["resumed_from"] == 8 and results(folder)["global_step"] == 14


@pytest.mark.slow
def test_a_run_killed_after_it_was_made_longer_ends_with_the_same_weights(finished, tmp_path):
    folder, other = copy(finished["cifar"], tmp_path), tmp_path / "other"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns(".lock"))
    run("cpu", CIFAR, SMALL, output_dir=folder)
    done = run(
        "cpu",
        "tests/harness/wrapped.py",
        ["die_in_step@3", CIFAR, *SMALL.split()],
        output_dir=other,
        check=False,
    )
    assert done.returncode != 0
    run("cpu", CIFAR, SMALL, output_dir=other)
    assert final_weights(folder) == final_weights(other)


def test_a_length_below_the_steps_taken_is_refused(finished, tmp_path):
    folder = copy(finished["minimal"], tmp_path)
    done = run(
        None, MINIMAL, SHORT.replace("--epochs 2", "--epochs 1"), output_dir=folder, check=False
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1
    assert "ask for 30 steps, but the run has taken 60 already" in errors[0]
    assert status(folder)["state"] == "finished"


def test_where_and_how_it_runs_may_change(finished, tmp_path):
    folder = copy(finished["cifar"], tmp_path)
    other = "--checkpoint_every 5 --keep_checkpoints 1 --log_every 2 --eval_every 4 --timeout 99 --track none --tta"
    done = run("cpu", CIFAR, f"{SMALL} {other} --gradient_accumulation_steps 2", output_dir=folder)
    assert "continuing from" in done.stdout and results(folder)["global_step"] == 14


def test_any_other_change_is_an_error_that_says_what_to_do(finished, tmp_path):
    folder = copy(finished["cifar"], tmp_path)
    done = run(None, CIFAR, f"{SMALL} --lr 0.5 --seed 3", output_dir=folder, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1
    for part in (
        "--lr 0.5 (was 0.04)",
        "--seed 3 (was 0)",
        CONTINUE_RULE,
        "another --output_dir",
        f"--init_from {folder}",
    ):
        assert part in errors[0], part


@pytest.mark.parametrize(
    "script", sorted(path.name for path in (ROOT / "scripts").glob("train_*.py"))
)
def test_help_states_the_rule_and_no_default_is_none(script):
    text = words(run(None, f"scripts/{script}", "--help").stdout)
    assert CONTINUE_RULE in text and "None" not in text


def test_the_pages_state_the_rule():
    assert CONTINUE_RULE in words((ROOT / "scripts" / "README.md").read_text())


@pytest.mark.parametrize(("model", "epochs"), [("fastnet", 14), ("resnet18", 30), ("net", 20)])
def test_help_shows_the_defaults_of_the_chosen_model(model, epochs):
    text = words(run(None, CIFAR, f"--model {model} --help").stdout)
    assert f"passes over the training set (default: {epochs})" in text
    assert "None" not in text


def test_the_last_lines_name_the_next_command(finished, tmp_path):
    folder = copy(finished["minimal"], tmp_path)
    done = run("cpu", MINIMAL, SHORT, output_dir=folder)
    assert "run the same command with a larger --epochs or --max_train_steps" in done.stdout


def test_an_error_that_would_come_again_does_not_say_to_run_the_same_command(tmp_path):
    done = run(
        "cpu",
        "tests/harness/wrapped.py",
        ["out_of_memory@40", MINIMAL, *SHORT.split()],
        output_dir=tmp_path,
        check=False,
    )
    assert done.returncode != 0 and "out of memory" in done.stderr
    assert "run the same command again" not in done.stderr
    assert status(tmp_path)["next"] is None


def test_the_report_of_the_launcher_names_the_error(tmp_path):
    done = run(
        "2cpu",
        CIFAR,
        "--dataset ./nowhere",
        output_dir=tmp_path,
        check=False,
        launcher=("--num_processes", "3"),
    )
    report = done.stderr[done.stderr.index("scripts/train_cifar.py FAILED") :]
    assert "To enable traceback see" not in report
    assert (
        "--dataset ./nowhere: there is no such file or folder" in report
        and len(report.splitlines()) < 16
    )


def test_scripts_that_only_run_models_say_nothing_about_bf16(monkeypatch, capsys):
    import torch

    from utils.run import cpu, launch, launcher

    monkeypatch.setattr(cpu, "has_bf16", lambda: True)
    monkeypatch.setattr(launcher, "option", lambda name: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    launch.check()
    assert capsys.readouterr().err == ""
    launch.check(SimpleNamespace())
    assert "1.5x to 4x faster" in capsys.readouterr().err


def test_status_of_a_finished_run_is_kept_with_its_length(finished):
    assert json.loads((finished["cifar"] / "args.json").read_text())["total_steps"] == 8
