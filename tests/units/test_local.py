"""Images on this machine, for all scripts: what folders mean, what a file of arrays has, patterns."""

import os
import socket
import threading

import numpy as np
import pytest
import torch
from harness.data import left_out, sizes, write_images
from harness.launches import load_script

from utils.data.scan import read_regular
from utils.images.arrays import load_arrays
from utils.images.local import CLASSES, draw_patterns
from utils.images.sources import find_images, find_splits
from utils.run.failures import UserError

NAMES = ["cat", "dog", "yak"]
PATTERNS = {
    "rows": [19.8, 28.6],
    "columns": [29.0, 19.8],
    "checks": [25.4, 25.4],
    "rings": [25.3, 25.2],
    "squares": [24.1, 24.0],
    "diamonds": [24.9, 24.9],
    "disk": [20.9, 21.0],
    "block": [20.9, 21.0],
    "plus": [21.4, 21.4],
    "cross": [22.0, 22.1],
}


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


# ------------------------------------------------------------------------------------------- arrays


def arrays(train=30, test=12, shape=(32, 32, 3), **more):
    generator, made = np.random.default_rng(0), {}
    for split, count in (("train", train), ("test", test)):
        made[f"{split}_images"] = generator.integers(0, 256, (count, *shape), dtype=np.uint8)
        made[f"{split}_labels"] = np.arange(count, dtype=np.uint8) % 3
    return made | more


def write(path, arrays, names=NAMES):
    """Writes a file; returns its path as `--dataset` takes it."""
    np.savez_compressed(path, **arrays, **({"class_names": np.array(names)} if names else {}))
    return str(path)


def refused(says, name):
    with pytest.raises(UserError, match=says) as error:
        load_arrays(str(name))
    assert "\n" not in str(error.value)


def test_splits_and_gray_images_of_a_file(tmp_path):
    own = arrays(val_images=np.ones((6, 32, 32, 3), np.uint8), val_labels=np.arange(6) % 3)
    data = load_arrays(write(tmp_path / "own.npz", own, names=None))
    assert sizes(data) == dict(train=30, val=6, test=12) and data.class_names == ["0", "1", "2"]
    gray = arrays(shape=(32, 32))
    held = load_arrays(write(tmp_path / "gray.npz", gray), val_fraction=0.2)
    assert sizes(held) == dict(train=24, val=6, test=12) and held.class_names == NAMES
    for channel in held.splits["test"].images.unbind(1):
        assert np.array_equal(channel, gray["test_images"])
    without = {key: value for key, value in arrays().items() if "train" in key}
    assert list(load_arrays(write(tmp_path / "train.npz", without)).splits) == ["train", "val"]
    own["test_images"][7, 5, 5, 1] ^= 1  # another data set
    assert load_arrays(write(tmp_path / "a.npz", own, names=None)).description != data.description


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (dict(shape=(3, 32, 32)), r"train_images is uint8 \[30, 3, 32, 32\], not .*: transpose it"),
        (dict(train_labels=np.zeros((30, 1), int)), r"train_labels is int64 \[30, 1\], not integ"),
        (dict(train_labels=np.arange(30) - 1), "not integers from 0 on"),
        (dict(train_labels=np.arange(29) % 3), r"\[29\], .* for each of the 30 train_images"),
        (dict(train_labels=np.arange(30) % 4), "has a label 3, but 3 class names"),
        (dict(test_labels=None), "has test_images, but no test_labels"),
        (dict(train_images=None), "has no train split, only test"),
        (
            dict(train_images=None, test_images=None, x=np.zeros(1)),
            "no array train_images, only class_names, test_labels, train_labels, x: save",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(made, says, tmp_path):
    given = {key: value for key, value in arrays(**made).items() if value is not None}
    refused(says, write(tmp_path / "a.npz", given))


def test_a_model_is_evaluated_on_its_own_classes(tmp_path):
    """By name where the file has names: their order may differ."""
    name = write(tmp_path / "a.npz", arrays(), ["yak", "cat", "dog"])
    splits, _, _ = find_splits(name, class_names=[*NAMES, "zebu"])
    assert splits["test"].labels.tolist() == [2, 0, 1] * 4
    splits, _, _ = find_splits(write(tmp_path / "b.npz", arrays(), None), class_names=NAMES)
    assert splits["test"].labels.tolist() == [0, 1, 2] * 4
    with pytest.raises(UserError, match=r"class 'yak' of its train split .* those of the model"):
        find_splits(name, class_names=["cat", "dog"])


def test_damaged_files_are_refused_and_nothing_in_a_file_is_executed(tmp_path):
    path = tmp_path / "a.npz"
    write(path, arrays(shape=(4, 4, 3)))
    whole = path.read_bytes()
    for length in (0, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused("cannot be read", path)
    for place in range(0, len(whole), len(whole) // 30):  # any byte: read as it is, or refused
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            find_images(str(path))
        except UserError as error:
            assert "\n" not in str(error)
    for name in ("train_labels", "class_names"):
        np.savez(path, **arrays() | {name: np.array([object()] * 30)})  # a pickle
        refused("cannot be read: Object arrays cannot be loaded", path)


def test_synthetic_images_depend_on_the_seed_only_and_are_all_different():
    data, other = find_images("synthetic", seed=3), find_images("synthetic", seed=4)
    assert sizes(data) == {"train": 1000, "val": 200} and len(data.class_names) == 10
    assert find_images("synthetic", seed=3).description == data.description != other.description
    assert data.splits["train"].name(7) == "synthetic, train split, row 7"
    whole = load_arrays("synthetic", seed=3)
    divided = load_arrays("synthetic", seed=3, val_fraction=0.1)
    assert sizes(divided) == {"train": 4500, "val": 500, "test": 1000}
    assert torch.equal(divided.splits["test"].images, whole.splits["test"].images)
    images = torch.cat([split.images for split in divided.splits.values()]).numpy()
    assert len({image.tobytes() for image in images}) == 6000
    assert whole.splits["train"].labels.bincount(minlength=10).min() > 350


def test_patterns_stay_the_same():
    """Of each class, how much neighbors differ: to the right, and below."""
    images, labels = draw_patterns(5, 400)
    right, down = (images.float().diff(dim=axis).abs().mean((1, 2, 3)) for axis in (3, 2))
    found = {name: [] for name in CLASSES}
    for label, name in enumerate(CLASSES):
        found[name] += [round(values[labels == label].mean().item(), 1) for values in (right, down)]
    assert found == {name: pytest.approx(values, abs=0.2) for name, values in PATTERNS.items()}
