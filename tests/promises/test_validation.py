"""No script chooses by test data: only validation data, held out of training, has a score."""

import json
from types import SimpleNamespace

import pytest
import torch
from harness.data import make_folder
from harness.launches import CIFAR, SMALL, metrics, results, run, status

from utils.data.arrays import load_arrays
from utils.run.folder import RunFolder


def scores(folder):
    """step -> score of every checkpoint that was kept."""
    found = {}
    for path in (folder / "checkpoints").iterdir():
        progress = json.loads((path / "manifest.json").read_text())["progress"]
        found[progress["step"]] = progress["score"]
    return found


def test_without_validation_data_the_newest_checkpoint_counts(reference):
    folder = reference("cpu").folder
    assert all("score" not in line for line in metrics(folder, "test"))
    assert [line["step"] for line in metrics(folder, "test")] == [7, 14]
    assert scores(folder) == {12: None, 14: None}  # none of step 7, which is only an evaluation
    assert results(folder)["best_checkpoint"] is None and "val_accuracy" not in results(folder)


def test_validation_data_chooses_and_the_test_split_is_shown_once(tmp_path):
    run("2cpu", CIFAR, f"{SMALL} --val_fraction 0.2", output_dir=tmp_path)
    lines = metrics(tmp_path, "val")
    assert [line["step"] for line in lines] == [7, 14] and not metrics(tmp_path, "test")
    assert all(line["score"] == line["accuracy"] for line in lines)
    best = max(lines, key=lambda line: line["score"])
    assert results(tmp_path)["best_checkpoint"] == f"step_{best['step']:08}"
    assert scores(tmp_path)[best["step"]] == best["accuracy"]
    assert results(tmp_path)["val_accuracy"] == lines[-1]["accuracy"]
    assert results(tmp_path)["test_accuracy"] != results(tmp_path)["val_accuracy"]
    assert status(tmp_path)["state"] == "finished"


def test_validation_images_are_held_out_of_training():
    whole, split = (
        load_arrays("synthetic", seed=0),
        load_arrays("synthetic", seed=0, val_fraction=0.2),
    )
    train, val = split.splits["train"], split.splits["val"]
    assert len(train) + len(val) == len(whole.splits["train"])
    assert len(val) == pytest.approx(0.2 * len(whole.splits["train"]), rel=0.02)
    assert torch.equal(split.splits["test"].images, whole.splits["test"].images)
    kept = {image.numpy().tobytes() for image in train.images}
    assert not kept & {image.numpy().tobytes() for image in val.images}
    shares = torch.bincount(val.labels) / torch.bincount(whole.splits["train"].labels)
    assert shares.min() > 0.19 and shares.max() < 0.21  # of every class


def test_a_score_of_a_test_split_is_refused(tmp_path):
    accelerator = SimpleNamespace(is_main_process=True, device=torch.device("cpu"))
    folder = RunFolder(SimpleNamespace(output_dir=str(tmp_path), resume="auto"), accelerator)
    with pytest.raises(ValueError, match="a test split never chooses"):
        folder.log("test", 1, score=0.5, accuracy=0.5)


def test_a_fraction_that_cannot_be_is_one_line(tmp_path):
    done = run(
        None, CIFAR, "--dataset synthetic --val_fraction 1", output_dir=tmp_path, check=False
    )
    assert done.returncode == 2 and "--val_fraction: must be at least 0 and below 1" in done.stderr


@pytest.mark.parametrize(
    "script", ["train_cifar.py --model net", "train_model_parallel.py --width 8"]
)
def test_data_with_a_validation_split_and_no_test_split_trains_and_is_evaluated(script, tmp_path):
    (tmp_path / "data").mkdir()
    made = make_folder(tmp_path / "data", train=120, test=100)
    (made / "test-00000-of-00001.parquet").rename(made / "validation-00000-of-00001.parquet")
    name, *options = script.split()
    words = [*options, "--dataset", str(made), *"--batch_size 40 --max_train_steps 2".split()]
    run("cpu", f"scripts/{name}", words, output_dir=tmp_path / "run")
    assert results(tmp_path / "run").keys() >= {"val_accuracy", "val_loss"}
    assert "test_accuracy" not in results(tmp_path / "run")
    if name == "train_cifar.py":
        done = run(None, "scripts/evaluate.py", ["--checkpoint", str(tmp_path / "run")])
        assert "of 100 val images correct" in done.stdout
