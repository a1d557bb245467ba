"""From a script of this collection to one's own: the places to edit, and a worked example."""

import re
import shutil
import subprocess

import pytest
import torch
from harness.launches import ROOT, final_weights, metrics, results, run, status

from utils.run import weights

EXAMPLE = ROOT / "scripts" / "recipes" / "regression.diff"


@pytest.mark.parametrize(
    "script", sorted(path.name for path in (ROOT / "scripts").glob("train_*.py"))
)
def test_the_places_to_edit_are_marked_in_every_script(script):
    source = (ROOT / "scripts" / script).read_text()
    marks = re.findall(r"  # EDIT: (\w+)", source)
    assert set(marks) == {"data", "loss", "metric", "model"}
    # The metric that is the score is named in the loop, too, if the script has a score.
    assert marks.count("metric") == 1 + (
        "score=metrics[" in source and script == "train_minimal.py"
    )


def test_the_worked_example_is_short_and_trains(tmp_path):
    """train_minimal.py becomes a regression on a CSV file."""
    changed = [line for line in EXAMPLE.read_text().splitlines() if re.match(r"[+-](?![+-])", line)]
    assert len(changed) <= 50
    project = tmp_path / "project"
    shutil.copytree(ROOT / "utils", project / "utils", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "scripts" / "train_minimal.py", project)
    subprocess.run(["git", "apply", str(EXAMPLE)], cwd=project, check=True)
    shutil.move(project / "train_minimal.py", project / "regression.py")
    # And a column that is the same in all rows.
    rows = [(i % 31 / 31, i % 17 / 17) for i in range(1000)]
    (project / "numbers.csv").write_text(
        "a,b,c,result\n" + "".join(f"{a},{b},7,{100 * a * b + 2}\n" for a, b in rows)
    )
    run(
        "2cpu",
        "regression.py",
        f"--csv {project / 'numbers.csv'} --epochs 30",
        root=project,
        output_dir=tmp_path / "run",
    )
    assert status(tmp_path / "run")["state"] == "finished"
    errors = [line["rmse"] for line in metrics(tmp_path / "run", "val")]
    # A tenth of the standard deviation of the results.
    assert 0.2 < results(tmp_path / "run")["val_rmse"] == errors[-1] < 2.2
    header = (tmp_path / "run" / "model.safetensors").read_bytes()[:2000]
    assert b"mean" in header and b"std" in header  # without them the model cannot be used
    done = run(
        "2cpu",
        "regression.py",
        "--csv nowhere.csv",
        root=project,
        output_dir=tmp_path / "other",
        check=False,
    )
    assert (
        done.stderr.count("error: cannot read --csv nowhere.csv") == 1
        and "Traceback" not in done.stderr.split("error:")[0]
    )


@pytest.mark.slow
def test_a_schedule_and_accumulation_in_a_copy_of_the_smallest_script(tmp_path):
    """The recipe applies, does not change the result of a step, and resumes exactly."""
    project = tmp_path / "project"
    shutil.copytree(
        ROOT / "utils" / "run",
        project / "utils" / "run",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(ROOT / "scripts" / "train_minimal.py", project)
    diff = ROOT / "scripts" / "recipes" / "schedule_and_accumulation.diff"
    subprocess.run(["git", "apply", str(diff)], cwd=project, check=True)
    arguments = "--max_train_steps 24 --checkpoint_every 8 --log_every 1 --max_grad_norm 1"
    folders = {name: tmp_path / name for name in ("one", "accumulated", "killed")}
    run("cpu", "train_minimal.py", arguments, root=project, output_dir=folders["one"])
    accumulated = f"{arguments} --gradient_accumulation_steps 4"
    run("2cpu", "train_minimal.py", accumulated, root=project, output_dir=folders["accumulated"])
    one, two = (metrics(folders[name], "train") for name in ("one", "accumulated"))
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3) and a["lr"] == b["lr"]
    assert one[11]["lr"] == pytest.approx(0.0025) and one[-1]["lr"] == 0
    script = str(project / "train_minimal.py")
    words = ["die_in_step@44", script, *accumulated.split()]  # in the last micro-batch of step 11
    done = run("2cpu", "tests/harness/wrapped.py", words, output_dir=folders["killed"], check=False)
    assert done.returncode != 0
    run("2cpu", "train_minimal.py", accumulated, root=project, output_dir=folders["killed"])
    assert results(folders["killed"])["resumed_from"] == 8
    assert final_weights(folders["killed"]) == final_weights(folders["accumulated"])


def test_a_copy_writes_to_a_folder_of_its_own_name(tmp_path):
    shutil.copytree(
        ROOT / "utils", tmp_path / "utils", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "scripts" / "train_minimal.py", tmp_path / "spirals.py")
    done = run(None, "spirals.py", "--help", root=tmp_path)
    assert "runs/spirals" in done.stdout and "train_minimal" not in done.stdout.split("options:")[0]


def test_a_change_of_the_script_is_said(tmp_path):
    """A finished run has nothing to do, and says so: that would hide the change."""
    shutil.copytree(
        ROOT / "utils", tmp_path / "utils", ignore=shutil.ignore_patterns("__pycache__")
    )
    copy, arguments = (
        shutil.copy(ROOT / "scripts" / "train_minimal.py", tmp_path / "mine.py"),
        "--max_train_steps 2",
    )
    assert (
        "has changed"
        not in run(None, "mine.py", arguments, root=tmp_path, output_dir=tmp_path / "run").stdout
    )
    assert (
        "has changed"
        not in run(None, "mine.py", arguments, root=tmp_path, output_dir=tmp_path / "run").stdout
    )
    copy.write_text(
        copy.read_text()
        .replace("nn.Linear(64, 64)", "nn.Linear(64, 32)")
        .replace("Linear(64, 2)", "Linear(32, 2)")
    )
    done = run(None, "mine.py", arguments, root=tmp_path, output_dir=tmp_path / "run")
    assert (
        "mine.py has changed since this run started: use another --output_dir" in done.stdout
        and "finished" in done.stdout
    )
    done = run(
        None,
        "mine.py",
        "--max_train_steps 4",
        root=tmp_path,
        output_dir=tmp_path / "run",
        check=False,
    )
    assert (
        done.returncode == 2
        and "size mismatch for 2.weight" in done.stderr
        and "use another --output_dir" in done.stderr
    )


def test_evaluate_names_a_run_that_it_cannot_read(tmp_path):
    run(None, "scripts/train_minimal.py", "--max_train_steps 2", output_dir=tmp_path / "run")
    done = run(None, "scripts/evaluate.py", ["--checkpoint", str(tmp_path / "run")], check=False)
    assert (
        done.returncode == 2
        and "is not a model of train_cifar.py or train_images.py, but 'minimal'" in done.stderr
    )
    weights.export(tmp_path / "run", torch.nn.Linear(2, 2), {"n_embd": 2})
    done = run(None, "scripts/evaluate.py", ["--checkpoint", str(tmp_path / "run")], check=False)
    assert done.returncode == 2 and "does not hold a model of train_gpt.py" in done.stderr
