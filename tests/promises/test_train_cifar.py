"""train_cifar.py with the real launcher: what it leaves, its models, and bad input."""

import shutil

import pytest
import torch
from harness.launches import CIFAR, SMALL, Started, metrics, results, run, scores
from PIL import Image
from safetensors.torch import load_file

FILES = (
    "args.json metrics.jsonl results.json status.json model.safetensors tensorboard "
    "predictions.png confusion_matrix.png curves.png"
)


def test_leaves_everything_it_promises(reference):
    """And without validation data, the newest checkpoints: a test split has no score."""
    done, folder = reference("cpu"), reference("cpu").folder
    for name in FILES.split():
        assert (folder / name).exists(), name
        if name.endswith(".png"):
            assert min(Image.open(folder / name).size) > 300
    lines = metrics(folder, "test")
    assert [line["step"] for line in lines] == [7, 14] and "score" not in lines[0]
    assert scores(folder) == {12: None, 14: None}  # none of step 7, which is only an evaluation
    assert results(folder)["best_checkpoint"] is None and "val_accuracy" not in results(folder)
    assert "global batch 60 = 1 process x 60 samples x 1 accumulation step" in done.stdout


def test_two_processes_say_each_thing_once_and_export_what_one_does(reference):
    output = reference("2cpu", 2).stdout
    for step in range(1, 15):
        assert output.count(f"step {step:>2}/14 ") == 1
    assert output.count("global batch 60 = 2 processes x 30 samples") == 1
    first, second = (
        load_file(reference(*words).folder / "model.safetensors")
        for words in (("cpu",), ("2cpu", 2))
    )
    assert first.keys() == second.keys() and not any("module." in name for name in first)
    for name in first:
        assert torch.allclose(first[name], second[name], atol=1e-4), name


def test_validation_data_chooses_and_the_test_split_is_shown_once(tmp_path):
    run("2cpu", CIFAR, f"{SMALL} --val_fraction 0.2", output_dir=tmp_path)
    lines, result = metrics(tmp_path, "val"), results(tmp_path)
    assert [line["step"] for line in lines] == [7, 14] and not metrics(tmp_path, "test")
    assert all(line["score"] == line["accuracy"] for line in lines)
    best = max(lines, key=lambda line: line["score"])
    assert result["best_checkpoint"] == f"step_{best['step']:08}"
    assert scores(tmp_path)[best["step"]] == best["accuracy"]
    assert lines[-1]["accuracy"] == result["val_accuracy"] != result["test_accuracy"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_run_computes_the_same_and_saves_plain_names(reference, tmp_path):
    arguments = f"{SMALL} --compile"
    started = Started("cpu", CIFAR, arguments, output_dir=tmp_path / "run")
    started.wait_for("step  7/14")
    started.kill_all()
    run("2cpu", CIFAR, arguments, output_dir=tmp_path / "run")
    assert 0 < results(tmp_path / "run")["resumed_from"] < 14
    lines = metrics(reference("cpu").folder, "train"), metrics(tmp_path / "run", "train")
    for a, b in zip(*lines, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
    exported = load_file(tmp_path / "run" / "model.safetensors")
    assert not any("_orig_mod" in name for name in exported)


@pytest.mark.slow
def test_learns(tmp_path):
    """The first command of the README, with another seed."""
    words = "--dataset synthetic --epochs 2 --batch_size 100 --lr 0.06 --seed 1"
    run("cpu", CIFAR, words, output_dir=tmp_path / "run")
    assert results(tmp_path / "run")["test_accuracy"] > 0.95


def test_an_error_is_printed_once_and_last(tmp_path):
    done = run("cpu", CIFAR, "--batch_size 0", output_dir=tmp_path, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("error: argument --batch_size")
    done = run("2cpu", CIFAR, "--dataset ./nowhere", output_dir=tmp_path, check=False)
    assert done.returncode != 0 and done.stderr.count("error: ") == 1
    # Of rank 0, in the launcher's report; the launcher itself always exits with 1.
    report = done.stderr[done.stderr.index("scripts/train_cifar.py FAILED") :]
    assert "To enable traceback see" not in report and len(report.splitlines()) < 16
    assert "exitcode  : 2" in report
    assert "--dataset ./nowhere: there is no such file or folder" in report
