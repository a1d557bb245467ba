"""train_images.py: trains on images with any number of workers, and resumes exactly."""

import csv
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from harness.data import make_photos
from harness.launches import final_weights, metrics, results, run, run_once
from PIL import Image
from safetensors import safe_open

IMAGES, EVALUATE = "scripts/train_images.py", "scripts/evaluate.py"
CLASSES = ["cat", "dog", "yak"]
RECIPE = (
    "--model shufflenet_v2_x0_5 --image_size 32 --batch_size 8 --gradient_accumulation_steps 2 "
    "--lr 0.02 --max_train_steps 8 --log_every 1 --eval_every 4 --checkpoint_every 3 "
    "--optimizer sgd --auto_augment trivial --track none --eval_samples 10"
)
TINY = "--model squeezenet1_1 --image_size 32 --batch_size 6"


@pytest.fixture(scope="session")
def photo_folder(made_once):
    return made_once("photos", make_photos)


@pytest.fixture(scope="session")
def reference_run(made_once, photo_folder):
    """With a worker, killed by nobody: 24 images, 3 steps in an epoch."""
    arguments = f"--dataset {photo_folder} {RECIPE}"
    return run_once(made_once, "images_reference", None, IMAGES, f"{arguments} --num_workers 1")


def test_evaluations_take_some_images_always_the_same_and_the_last_one_all(reference_run):
    whole, lines = results(reference_run.folder), metrics(reference_run.folder, "val")
    assert "evaluations: 10 of 24 held-out samples, always the same" in reference_run.stdout
    assert [(line["step"], line["images"]) for line in lines] == [(4, 10), (8, 10)]
    accuracy = whole["val_accuracy"]
    error = math.sqrt(accuracy * (1 - accuracy) / 23)
    assert whole["val_images"] == 24 and "val_top5" not in whole
    assert accuracy * 24 == pytest.approx(round(accuracy * 24))
    assert whole["val_accuracy_standard_error"] == pytest.approx(error)
    assert f"val accuracy {accuracy:.4f} ± {error:.4f}" in reference_run.stdout


def test_leaves_everything_it_promises(reference_run):
    folder = reference_run.folder
    for name in ("README.md", "metrics.jsonl"):
        assert (folder / name).exists(), name
    for name in ("predictions.png", "mistakes.png", "confusion_matrix.png", "curves.png"):
        assert min(Image.open(folder / name).size) > 200, name
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = json.loads(file.metadata()["config"])
    assert stored["class_names"] == CLASSES and stored["model"] == "shufflenet_v2_x0_5"
    colors = dict(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    expected = dict(resize=37, crop=32, interpolation="bilinear", **colors)
    assert stored["preprocessing"] == expected


@pytest.fixture(scope="session")
def predicted(made_once, reference_run, photo_folder):
    """The folder with what evaluate.py says of a folder of images, from the last checkpoint."""

    def make(folder):
        shutil.copytree(photo_folder / "val" / "dog", folder / "holiday" / "day 1")
        (folder / "holiday" / "broken.jpg").write_bytes(b"no image")
        (folder / "holiday" / "a.heic").write_bytes(b"x")
        checkpoint = reference_run.folder / "checkpoints" / "step_00000008"
        words = [str(checkpoint), "--images", str(folder / "holiday")]
        done = run(None, EVALUATE, [*words, "--num_workers", "0"], output_dir=folder / "out")
        assert "9 images in" in done.stdout and "left out: .heic files" in done.stdout
        return folder

    return made_once("predicted", make)


def test_the_model_card_loads_the_model_without_these_scripts(
    reference_run, predicted, tmp_path, monkeypatch
):
    """Its probabilities are those of evaluate.py, from a checkpoint."""
    card = (reference_run.folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: torchvision\n") and "| val accuracy | " in card
    code = card.split("```python\n")[1].split("```")[0]
    shutil.copy(reference_run.folder / "model.safetensors", tmp_path)
    shutil.copy(predicted / "holiday" / "day 1" / "5.jpg", tmp_path / "image.jpg")
    (tmp_path / "card.py").write_text(f"{code}\nprint(probabilities.tolist())")
    monkeypatch.chdir(tmp_path)
    found = json.loads(run(None, "card.py", root=tmp_path).stdout)
    lines = csv.reader((predicted / "out" / "predictions.csv").open())
    (row,) = (line for line in lines if line[0].endswith("5.jpg"))
    expected = {name: float(share) for name, share in zip(row[1::2], row[2::2], strict=True)}
    assert found == pytest.approx([expected[name] for name in CLASSES], abs=0.02)


def test_evaluate_classifies_a_folder(predicted):
    header, *rows = csv.reader((predicted / "out" / "predictions.csv").open())
    columns = [f"{what}_{i}" for i in (1, 2, 3) for what in ("class", "probability")]
    assert header == ["file", *columns]
    names = [os.path.relpath(row[0], predicted / "holiday") for row in rows]
    assert names == ["broken.jpg", *(f"day 1/{i}.jpg" for i in range(8))]
    assert set(rows[0][1:]) == {""}
    for row in rows[1:]:
        assert set(row[1::2]) == set(CLASSES)
        assert sum(map(float, row[2::2])) == pytest.approx(1, abs=1e-4)


def test_evaluate_finds_the_same_accuracy_on_two_processes(reference_run, tmp_path):
    done = results(reference_run.folder)
    run("2cpu", EVALUATE, [str(reference_run.folder)], output_dir=tmp_path)
    again = results(tmp_path)
    assert again["val_accuracy"] == done["val_accuracy"]
    assert again["val_loss"] == pytest.approx(done["val_loss"], rel=1e-5)
    assert again["per_class"] == done["per_class"] and len(done["per_class"]) == 3
    scored = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert list(scored[0])[:4] == ["file", "true_class", "class_1", "probability_1"]
    assert len(scored) == 24
    assert all(Path(row["file"]).parent.name == row["true_class"] for row in scored)
    right = sum(row["true_class"] == row["class_1"] for row in scored)
    assert right / len(scored) == pytest.approx(done["val_accuracy"])


def test_a_skipped_step_in_fp16_does_not_move_the_schedule(photo_folder, tmp_path):
    words = ["fp16@2:", IMAGES, "--dataset", str(photo_folder), *TINY.split()]
    words += "--max_train_steps 3 --checkpoint_every 3 --num_workers 0".split()
    run("cpu", "tests/harness/wrapped.py", words, output_dir=tmp_path)
    schedule = tmp_path / "checkpoints" / "step_00000003" / "scheduler.bin"
    assert torch.load(schedule, weights_only=True)["last_epoch"] == 2


@pytest.mark.slow
def test_killed_mid_accumulation_with_workers_ends_with_the_same_bytes(
    reference_run, photo_folder, tmp_path
):
    """Killed in the second micro-batch of the sixth step; continues with other workers."""
    arguments, folder = f"--dataset {photo_folder} {RECIPE}", tmp_path / "run"
    fault = ["die_in_step@12", IMAGES, *arguments.split(), "--num_workers", "2"]
    killed = run(None, "tests/harness/wrapped.py", fault, output_dir=folder, check=False)
    assert killed.returncode != 0 and not (folder / "model.safetensors").exists()
    run(None, IMAGES, f"{arguments} --num_workers 3", output_dir=folder)
    assert 0 < results(folder)["resumed_from"] < 6
    assert final_weights(folder) == final_weights(reference_run.folder)
    for split in ("train", "val"):
        assert metrics(folder, split) == metrics(reference_run.folder, split)


def test_a_bad_image_in_a_run(tmp_path):
    photos, folder = make_photos(tmp_path / "photos", 4), tmp_path / "run"
    broken = [photos / name for name in ("train/cat/1.jpg", "train/cat/2.jpg", "val/yak/3.jpg")]
    for path in broken:
        path.write_bytes(b"no image")
    arguments = f"--dataset {photos} {TINY} --epochs 1 --num_workers 1"
    done = run(None, IMAGES, arguments, output_dir=folder, check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("***")]
    assert done.returncode == 2 and len(lines) <= 2, done.stderr
    assert lines[0].startswith("error: cannot read ") and "it is not an image" in lines[0]
    # Continues, or starts again.
    done = run(None, IMAGES, f"{arguments} --on_bad_image skip", output_dir=folder)
    for path in broken:
        assert f"left out: cannot read {path}: it is not an image" in done.stderr
    found = results(folder)
    assert found["val_images"] == 11
    assert found["val_accuracy"] * 11 == pytest.approx(round(found["val_accuracy"] * 11))
