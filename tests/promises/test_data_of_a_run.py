"""A run continues with the data that it started with; evaluate.py scores all of another data set."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
from harness.data import make_photos
from harness.launches import metrics, results, run
from PIL import Image

EVALUATE = "scripts/evaluate.py"
SMALL_GPT = "--n_layer 1 --n_head 1 --n_embd 16 --block_size 16 --sample_length 4"


def write_images(root, count=8):
    return make_photos(root, count, splits=("",), classes=("cat", "dog"))


def change_an_image(folder):
    """Another image under the same name."""
    file = folder / "dog" / "3.jpg"
    Image.open(file).rotate(180).save(file)


def write_lines(folder):
    folder.mkdir()
    rows = [json.dumps({"text": f"the text of row {i} is short"}) + "\n" for i in range(400)]
    (folder / "a.jsonl").write_text("".join(rows))
    return folder


def change_a_line(folder):
    text = (folder / "a.jsonl").read_text()
    (folder / "a.jsonl").write_text(text.replace("row 7 is", "row 7 at"))


IMAGES = "--batch_size 4 --checkpoint_every 1 --track none --val_fraction 0.25"
SCRIPTS = {
    "train_cifar.py": (f"--model net {IMAGES}", write_images, change_an_image),
    "train_images.py": (
        f"--model squeezenet1_1 --image_size 32 --lr 0.01 {IMAGES}",
        write_images,
        change_an_image,
    ),
    "train_gpt.py": (f"{SMALL_GPT} --track none --checkpoint_every 1", write_lines, change_a_line),
    "train_lm.py": (
        "--streaming --block_size 32 --batch_size 4 --track none --checkpoint_every 1",
        write_lines,
        change_a_line,
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_continues_with_the_same_data_only(name, tmp_path):
    arguments, make, change = SCRIPTS[name]
    folder = make(tmp_path / "data")
    script = f"scripts/{name.split()[0]}"

    def attempt(check=True):
        words = f"--dataset {folder} {arguments} --max_train_steps 1"
        return run(None, script, words, output_dir=tmp_path / "run", check=check)

    first = attempt()
    assert first.stdout.count("data: ") == 1 and "(fingerprint " in first.stdout
    if name in ("train_images.py", "train_lm.py"):
        os.utime(next(folder.rglob("*.*")), (1, 1))  # the same data, copied
        assert "this run has already finished" in attempt().stdout
    change(folder)
    done = attempt(check=False)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1
    assert "belongs to a run with other arguments: data " in done.stderr


def test_another_data_set_is_scored_as_a_whole(tmp_path):
    """Also if it has a folder that is a link, and one of the classes only."""
    folder = write_images(tmp_path / "data")
    arguments = f"--dataset {folder} {SCRIPTS['train_cifar.py'][0]} --max_train_steps 8"
    run(None, "scripts/train_cifar.py", arguments, output_dir=tmp_path / "run")
    assert metrics(tmp_path / "run", "val")

    def score(data, check=True):
        words = [str(tmp_path / "run"), "--dataset", str(data)]
        done = run(None, EVALUATE, words, output_dir=tmp_path / "scores", check=check)
        return (done.stdout, results(tmp_path / "scores")) if check else done

    shutil.copytree(folder, tmp_path / "copy")
    output, found = score(tmp_path / "copy")  # the same data
    assert "of 4 val images correct" in output
    assert found["val_loss"] == pytest.approx(results(tmp_path / "run")["val_loss"], abs=1e-4)

    new = write_images(tmp_path / "new", count=5)
    shutil.move(new / "dog", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", new / "dog")
    shutil.rmtree(new / "cat")
    (new / "dog" / "broken.png").write_bytes(b"no image")
    output, found = score(new)
    assert "of 5 images correct" in output and "1 of 6 images could not be read" in output
    assert f"unreadable, and left out: {new / 'dog' / 'broken.png'}\n" in output
    rows = list(csv.DictReader((tmp_path / "scores" / "predictions.csv").open()))
    assert [Path(row["file"]).name for row in rows] == [
        *(f"{i}.jpg" for i in range(5)),
        "broken.png",
    ]
    assert [row["true_class"] for row in rows] == ["dog"] * 5 + [""] and rows[5]["class_1"] == ""
    right = sum(row["class_1"] == "dog" for row in rows)
    assert right / 5 == pytest.approx(found["all_accuracy"])
    for image in (new / "dog").glob("?.jpg"):
        image.write_bytes(b"no image")
    done = score(new, check=False)
    assert done.returncode == 2 and "error: none of the 6 images can be read\n" in done.stderr
    change_an_image(folder)
    assert "warning: trained on other data" in score(folder)[0]
