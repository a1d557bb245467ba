"""What the folders of a data set mean: splits, classes, and what is left out, for all scripts."""

import os
import queue
import socket
import threading

import numpy as np
import pytest
from PIL import Image

from utils.data.scan import read_regular
from utils.images.arrays import load_arrays, load_arrays_to_evaluate
from utils.images.image_folder import unlabeled
from utils.images.sources import find_images, find_to_evaluate
from utils.run.failures import UserError


def write(root, *paths, count=3):
    """Writes small images; of a path that ends in /, several."""
    for path in paths:
        names = [f"{path}{i}.png" for i in range(count)] if path.endswith("/") else [path]
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            seed = sum(map(ord, name))
            pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name, "PNG")
    return str(root)


def counts(data):
    return {split: len(images) for split, images in data.splits.items()}


def left_out(data):
    return [line.removeprefix("left out: ") for line in data.details if "left out" in line]


# ------------------------------------------------------------------------------------------ splits


def test_images_and_arrays_find_the_same_splits(tmp_path):
    classes = [f"{split}/{name}/" for split in ("Training", "dev") for name in "ab"]
    root = write(tmp_path, *classes)
    for load in (find_images, load_arrays):
        data = load(root, val_fraction=0)
        assert data.class_names == ["a", "b"] and counts(data) == {"train": 6, "val": 6}


def test_strays_and_other_folders_are_left_out_and_named(tmp_path):
    root = write(tmp_path, "train/cat/", "train/dog/", "val/cat/", "val/dog/", "train/cover.png")
    write(tmp_path, "extra/", "more/cat/", "logo.png", "val/x.png")
    data = find_images(root)
    assert data.class_names == ["cat", "dog"] and counts(data) == {"train": 6, "val": 6}
    assert left_out(data) == [
        "images in folders beside the splits: 6 (extra/0.png)",
        "images in no class folder: 3 (train/cover.png)",
    ]


def test_a_test_split_without_classes_is_left_out(tmp_path):
    root = write(tmp_path, "train/cat/", "train/dog/", "val/cat/", "val/dog/", "test/")
    data = find_images(root)
    assert counts(data) == {"train": 6, "val": 6}
    (line,) = left_out(data)
    assert line == "images of a test split without classes: 3 (test/0.png)"


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ("train/ test/", "its train split has no class folder with images"),
        ("train_images/cat/ val2017/cat/", "rename train_images: to train if it is a split"),
        ("train/cat/ train/dog/ val_set/cat/", "rename val_set: to val if it is a split"),
        ("cat/ dog/ test/", "by its name test is a split, but beside it are images in cat"),
        ("train/cat/ train/dog/ bus/", "by its name train is a split, but beside it are images in"),
        ("val/cat/ test/cat/ val/dog/ test/dog/", "has no train split, only val, test"),
        ("train/cat/ train/dog/ val/cat/ Valid/dog/", "Valid and val are both its val split"),
        ("cat/train/ cat/test/ dog/train/ dog/test/", "a split in a class, cat/test: give"),
        ("all/train/cat/ all/train/dog/ all/test/cat/", "a split in a class, all/test: give"),
        ("train/cat/ train/dog/ val/", "its val split has no class folder with images"),
        ("train/cat/ train/dog/ test/unknown/", "class 'unknown' of its test split is not in"),
        (
            "train/cat/ train/dog/ test/cat/ test/dog/ test/emu/",
            "class 'emu' of its test split is n",
        ),
        ("train/cat/ train/dog/ test/cat/", "its test split has no image of class 'dog'"),
    ],
)
def test_what_is_ambiguous_is_one_line(paths, says, tmp_path):
    root = write(tmp_path, *paths.split())
    for load in (find_images, load_arrays):
        with pytest.raises(UserError) as error:
            load(root)
        assert says in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------- left out


def test_what_is_not_an_image_of_a_class_is_named(tmp_path):
    root = write(tmp_path, "cat/", "dog/", "cat/@eaDir/0.png/", "dog/.thumbs/")
    write(tmp_path, "__MACOSX/cat/", ".git/x/", "cat/old/")
    for name in ("cat/a.HEIC", "cat/b.heic", "dog/IMG_1", "notes.txt", "cat/Thumbs.db"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "labels").mkdir()
    data = find_images(root, val_fraction=0.3)
    assert data.class_names == ["cat", "dog"] and sum(counts(data).values()) == 9
    assert set(left_out(data)) == {
        ".heic files, which Pillow cannot read (convert them to JPEG): 2 (cat/a.HEIC)",
        ".db files: 1 (cat/Thumbs.db)",
        "empty folders: 1 (labels)",
        ".txt files: 1 (notes.txt)",
        "files without a suffix: 1 (dog/IMG_1)",
        "folders of thumbnails or of the system: 2 (__MACOSX)",
        "hidden files and folders: 2 (.git)",
    }


def test_a_folder_without_images_says_what_it_holds(tmp_path):
    write(tmp_path, "a.png")
    (tmp_path / "bird").mkdir()
    (tmp_path / "bird" / "a.heic").write_bytes(b"x")
    says = (
        r"no class folder with images \(left out: \.heic files, which Pillow .*: 1 \(bird/a.heic\)"
    )
    with pytest.raises(
        UserError, match=says + r"; .* in no class folder: 1 \(a.png\)\); use a folder"
    ):
        find_images(str(tmp_path))


# ----------------------------------------------------------------------------------- links, devices


@pytest.mark.parametrize(
    ("link", "target", "says"),
    [
        ("bird", "/nowhere/bird", "nowhere: remove it"),
        ("cat/linked.png", "/nowhere/1.png", "nowhere: remove it"),
        ("cat/all", "..", "to a folder that it is in: remove it"),
    ],
)
def test_a_link_that_leads_nowhere_or_upwards_is_refused(link, target, says, tmp_path):
    root = write(tmp_path, "cat/", "dog/")
    os.symlink(tmp_path / "dog", tmp_path / "emu")
    assert find_images(root, val_fraction=0.3).class_names == ["cat", "dog", "emu"]
    os.symlink(target, tmp_path / link)
    with pytest.raises(UserError, match=f"the link .*/{link} leads {says}"):
        find_images(root)


@pytest.mark.skipif(os.name != "posix", reason="has no such files")
def test_devices_and_fifos_are_never_opened(tmp_path, monkeypatch):
    root = write(tmp_path / "d", "cat/", "dog/")
    os.mkfifo(tmp_path / "d" / "cat" / "fifo.png")
    os.symlink("/dev/zero", tmp_path / "d" / "cat" / "zero.png")
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(tmp_path / "d" / "dog")  # a path of a socket is at most 107 bytes long
        listening.bind("socket.png")
    data = find_images(root, val_fraction=0.3)
    assert sum(counts(data).values()) == 6
    assert left_out(data) == ["devices, FIFOs or sockets: 3 (cat/fifo.png)"]
    assert len(unlabeled(root)[0]) == 6


def test_what_became_a_device_is_not_read(tmp_path):
    """Nor does it wait for one who writes."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        answers = queue.Queue()
        threading.Thread(target=attempt, args=(path, answers), daemon=True).start()
        assert answers.get(timeout=20) == "not a regular file"


def attempt(path, answers):
    try:
        answers.put(read_regular(path))
    except OSError as error:
        answers.put(error.strerror)


# ---------------------------------------------------------------------------- fingerprint, evaluate


def test_other_data_is_evaluated_as_a_whole_with_the_labels_of_the_model(tmp_path):
    model = ["bird", "cat", "dog"]
    cases = [
        ("dog/ cat/", {"all": 6}),
        ("train/cat/ train/dog/ test/dog/ test/cat/", {"test": 6}),
        ("test/cat/ test/dog/", {"test": 6}),
        ("cat/", {"all": 3}),
    ]
    for number, (paths, expected) in enumerate(cases):
        root = write(tmp_path / str(number), *paths.split())
        arrays = load_arrays_to_evaluate(root, model)
        for data in (find_to_evaluate(root, model), arrays):
            assert counts(data) == expected and data.class_names == model
            labels = next(iter(data.splits.values())).labels.tolist()
            assert labels == [1, 1, 1] + [2, 2, 2] * ("dog/" in paths)
    other = write(tmp_path / "other", "cat/", "emu/")
    with pytest.raises(UserError, match="class 'emu' of its train split is not in those of the"):
        find_to_evaluate(other, model)
    with pytest.raises(UserError, match="class 'emu' of its train split is not in those of the"):
        load_arrays_to_evaluate(other, model)


# ------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("parts", [("fold1", "fold2"), ("fit", "holdout"), ("train", "holdout")])
def test_folders_with_the_same_classes_in_them_are_no_classes(parts, tmp_path):
    root = write(tmp_path, *(f"{part}/{name}/" for part in parts for name in ("cat", "dog")))
    wrong = next(part for part in parts if part != "train")
    with pytest.raises(
        UserError, match=f"same sub-folders, .*: rename '{wrong}', since a split is"
    ):
        find_images(root)


def test_one_folder_inside_each_class_is_no_split(tmp_path):
    data = find_images(write(tmp_path, "cat/images/", "dog/images/"))
    assert data.class_names == ["cat", "dog"]


def test_accents_have_one_form(tmp_path):
    """macOS writes them as letters of their own."""
    names = {"train": "cafe\u0301", "val": "caf\u00e9"}
    root = write(tmp_path, *(f"{s}/{name}/" for s in names for name in (names[s], "dog")))
    assert find_images(root).class_names == ["caf\u00e9", "dog"]
    write(tmp_path, "val/dog /")
    with pytest.raises(UserError, match="class 'dog ' of its val split is not in its train"):
        find_images(root)


def test_classes_that_look_alike_are_named(tmp_path):
    data = find_images(write(tmp_path, "dog/", "Dog /", "do\u00a0g/", "cat/"))
    line = "classes whose names differ only in case or space: 'Dog ', 'dog', 'do\u00a0g'"
    assert line in data.details
    assert any("'Dog ' 2" in line for line in data.details)
