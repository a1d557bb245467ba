"""What the folders of a data set mean: splits, classes, and what is left out, for all scripts."""

import os
import socket
import threading

import pytest
from harness.data import left_out, sizes, write_images
from harness.launches import load_script

from utils.data.scan import read_regular
from utils.images.arrays import load_arrays
from utils.images.sources import find_images
from utils.run.failures import UserError


@pytest.mark.parametrize(
    ("paths", "classes", "splits", "lines"),
    [
        ("Training/a/ Training/b/ dev/a/ dev/b/", "a b", {"train": 6, "val": 6}, []),
        ("cat/images/ dog/images/", "cat dog", {"train": 4, "val": 2}, []),
        # Only names that are exactly those of splits are.
        (
            "train/test/ train/dog_train/ val/test/ val/dog_train/",
            "dog_train test",
            {"train": 6, "val": 6},
            [],
        ),
        ("train_station/ cat/", "cat train_station", {"train": 4, "val": 2}, []),
        (
            "train/cat/ train/dog/ val/cat/ val/dog/ test/ train/cover.png logo.png v.png",
            "cat dog",
            {"train": 6, "val": 6},
            [
                "images in no class folder: 3 (train/cover.png)",
                "images of a test split without classes: 3 (test/0.png)",
            ],
        ),
        # macOS writes accents as letters of their own.
        (
            "train/cafe\u0301/ train/x/ val/caf\u00e9/ val/x/",
            "caf\u00e9 x",
            dict(train=6, val=6),
            [],
        ),
    ],
)
def test_folders_are_splits_or_classes(paths, classes, splits, lines, tmp_path):
    root = write_images(tmp_path, *paths.split(" "))
    for load in (find_images, load_arrays):
        data = load(root, val_fraction=0.3)
        assert " ".join(data.class_names) == classes and sizes(data) == splits
        assert left_out(data) == lines


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ("train/ test/", "its train split has no class folder with images"),
        ("train_images/cat/ val2017/cat/", "rename train_images: to train if it is a split"),
        ("cat/ dog/ test/", "by its name test is a split, but beside it are images in 'cat'"),
        ("train/cat/ train/dog/ hold/cat/ hold/dog/", "in 'hold': rename that if it is a split"),
        ("val/cat/ test/cat/ val/dog/ test/dog/", "has no train split, only val, test"),
        ("train/cat/ train/dog/ val/cat/ Valid/dog/", "Valid and val are both its val split"),
        ("cat/train/ cat/test/ dog/train/ dog/test/", "a split in a class, cat/test: give"),
        ("all/train/cat/ all/train/dog/ all/test/cat/", "a split in a class, all/test: give"),
        ("train/cat/ train/dog/ test/emu/", "class 'emu' of its test split ("),
        ("train/cat/ train/dog/ test/cat/", "its test split has no image of class 'dog'"),
        ("train/dog/ train/cat/ val/dog/ val/dog\u00a0/", "class 'dog\u00a0' of its val split"),
        ("fold1/cat/ fold1/dog/ fold2/cat/ fold2/dog/", "'fold2' have the same sub-folders"),
        ("fit/cat/ fit/dog/ holdout/cat/ holdout/dog/", "rename 'fit', since a split is"),
        ("cat/", "has only one class, cat"),
        ("a.png b.png metadata.csv", "metadata.csv is not read: make a folder for each class, as"),
        ("a.png .git/x/", "(left out: hidden files and folders: 1 (.git); left out: images in no"),
    ],
)
def test_what_is_ambiguous_is_one_line(paths, says, tmp_path):
    with pytest.raises(UserError) as error:
        find_images(write_images(tmp_path, *paths.split(" ")))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_what_is_not_an_image_of_a_class_is_named(tmp_path):
    root = write_images(tmp_path, "cat/", "dog/", "cat/@eaDir/0.png/", "dog/.thumbs/", "Dog /")
    write_images(tmp_path, "__MACOSX/cat/", ".git/x/", "cat/old/", "do\u00a0g/")
    for name in ("cat/a.HEIC", "cat/b.heic", "dog/IMG_1", "notes.txt", "cat/Thumbs.db"):
        (tmp_path / name).write_bytes(b"x")
    data = find_images(root, val_fraction=0.3)
    assert sum(sizes(data).values()) == 15
    assert set(left_out(data)) == {
        ".heic files (convert them to JPEG): 2 (cat/a.HEIC)",
        ".db files: 1 (cat/Thumbs.db)",
        ".txt files: 1 (notes.txt)",
        "files without a suffix: 1 (dog/IMG_1)",
        "folders of thumbnails or of the system: 2 (__MACOSX)",
        "hidden files and folders: 2 (.git)",
    }
    line = "classes whose names differ only in case or space: 'Dog ', 'dog', 'do\u00a0g'"
    assert line in data.details and any("'Dog ' 2" in line for line in data.details)


@pytest.mark.parametrize(
    ("link", "target", "says"),
    [
        ("bird", "/nowhere/bird", "nowhere: remove it"),
        ("cat/all", "..", "to a folder that it is in: remove it"),
    ],
)
def test_a_link_that_leads_nowhere_or_upwards_is_refused(link, target, says, tmp_path):
    root = write_images(tmp_path, "cat/", "dog/")
    os.symlink(tmp_path / "dog", tmp_path / "emu")
    assert find_images(root, val_fraction=0.3).class_names == ["cat", "dog", "emu"]
    os.symlink(target, tmp_path / link)
    with pytest.raises(UserError, match=f"the link .*/{link} leads {says}"):
        find_images(root)


@pytest.mark.skipif(os.name != "posix", reason="has no such files")
def test_devices_and_fifos_are_never_opened(tmp_path, monkeypatch):
    root = write_images(tmp_path / "d", "cat/", "dog/")
    os.mkfifo(tmp_path / "d" / "cat" / "fifo.png")
    os.symlink("/dev/zero", tmp_path / "d" / "cat" / "zero.png")
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(tmp_path / "d" / "dog")  # a path of a socket is at most 107 bytes long
        listening.bind("socket.png")
    data, errors = find_images(root, val_fraction=0.3), []
    assert left_out(data) == ["devices, FIFOs or sockets: 3 (cat/fifo.png)"]

    def read(path):
        try:
            read_regular(path)
        except OSError as error:
            errors.append(error.strerror)

    for name in ("fifo.png", "zero.png"):  # what became a device: nor does it wait for a writer
        path = tmp_path / "d" / "cat" / name
        reader = threading.Thread(target=read, args=(path,), daemon=True)
        reader.start()
        reader.join(20)
    assert errors == ["not a regular file"] * 2


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("dog/ cat/", {"all": 6}),
        ("train/cat/ train/dog/ test/dog/ test/cat/", {"test": 6}),
        ("test/cat/ test/dog/", {"test": 6}),
        ("cat/", {"all": 3}),
    ],
)
def test_other_data_is_evaluated_as_a_whole_with_the_labels_of_the_model(paths, expected, tmp_path):
    root, model = write_images(tmp_path, *paths.split()), ["bird", "cat", "dog"]
    find_to_evaluate = load_script("evaluate").find_to_evaluate
    data = find_to_evaluate(root, model)
    assert sizes(data) == expected and data.class_names == model
    assert len(left_out(data)) == ("train/" in paths)
    start = " test" if "test" in expected else ""
    assert f"{sum(expected.values())}{start} images of 3 classes (" in data.description
    labels = next(iter(data.splits.values())).labels.tolist()
    assert labels == [1, 1, 1] + [2, 2, 2] * ("dog/" in paths)
    with pytest.raises(UserError, match=r"class 'cat' of its .* is not in those of the model"):
        find_to_evaluate(root, ["bird", "emu"])
