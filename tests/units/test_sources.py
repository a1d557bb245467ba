"""What is held out of any source of images, images that are there twice, and what is said of both."""

import hashlib
import shutil

import numpy as np
import pytest
from harness.data import left_out, make_photos, noise, sizes, write_images
from hypothesis import given
from hypothesis import strategies as st

from utils.images.arrays import load_arrays
from utils.images.decoding import Images, Rows
from utils.images.sources import find_duplicates, find_images
from utils.run.failures import UserError


def names(images):
    return [images.portable_name(i) for i in range(len(images))]


def make_folders(root, *splits):
    return str(make_photos(root, 10, splits, ["cat", "dog"]))


def test_no_script_has_to_choose_by_test_data(tmp_path):
    """Without a split for validation, one is taken from `train`; the test split stays as it is."""
    folder = make_folders(tmp_path, "train", "test")
    whole, found = find_images(folder, val_fraction=0), find_images(folder, val_fraction=0.3)
    assert list(whole.splits) == ["train", "test"]
    assert list(found.splits) == ["train", "val", "test"]
    assert names(found.splits["test"]) == names(whole.splits["test"])
    assert np.bincount(found.splits["val"].labels).tolist() == [3, 3]
    taken, kept = names(found.splits["val"]), names(found.splits["train"])
    assert sorted(kept + taken) == sorted(names(whole.splits["train"]))
    assert sizes(load_arrays(folder, val_fraction=0.3)) == sizes(found)
    assert list(load_arrays(folder).splits) == ["train", "test"]
    start = "14 train, 6 val and 20 test images of 2 classes (fingerprint "
    assert found.description.startswith(start) and len(found.description) == len(start) + 13
    assert found.details == ["train 14: cat 7, dog 7", "val   6: cat 3, dog 3"] + [
        "test  20: cat 10, dog 10"
    ]


def test_a_split_depends_on_names_and_seed_only(tmp_path):
    """The same images wherever the folder is; at least one of a class, and never all."""
    folder = make_folders(tmp_path / "a", "")
    other = shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "b")
    data, again = (find_images(str(path), val_fraction=0.2) for path in (folder, other))
    held_out = names(data.splits["val"])
    assert names(again.splits["val"]) == held_out and again.description == data.description
    assert names(find_images(folder, seed=1, val_fraction=0.2).splits["val"]) != held_out
    for fraction, count in ((0.01, 2), (0.99, 18)):
        found = find_images(folder, val_fraction=fraction)
        assert sizes(found) == {"train": 20 - count, "val": count}
    with pytest.raises(UserError, match="no test split and no val split: give --val_fraction"):
        find_images(folder, val_fraction=0)
    assert len(find_images(folder, val_fraction=None).splits["val"]) == 2  # a tenth of each class
    few = write_images(tmp_path / "few", "cat/", "dog/0.png")
    with pytest.raises(UserError, match="class dog has 1 image: at least 2 are needed"):
        find_images(few)


# ------------------------------------------------------------------------------------------ copies

CONTENTS = st.lists(st.binary(min_size=1, max_size=2), max_size=12)


def images_of(contents, labels=None, place="train"):
    labels = np.zeros(len(contents), np.int64) if labels is None else np.array(labels)
    return Images(Rows(list(contents), place, "v"), np.arange(len(contents)), labels)


@given(CONTENTS, CONTENTS)
def test_two_images_are_equal_if_their_bytes_are(train, val):
    first, lines = find_duplicates({"train": images_of(train), "val": images_of(val)})
    assert first.tolist() == list(map(train.index, train))
    assert bool(lines) == (len({*train, *val}) < len(train + val))


def test_the_report_tells_splits_and_classes_apart_and_says_what_was_not_compared():
    """Compared first are images whose size is rare: photos of one size are seldom different."""
    splits = {"train": images_of([b"a", b"b", b"b"], [0, 0, 1])}
    splits["val"] = images_of([b"a", b"b"], [0, 0], "val")
    assert find_duplicates(splits)[1] == [
        "equal images: twice in train and val: 2 (val, row 0)",
        "equal images: twice in train, with different classes: 1 (train, row 2)",
    ]
    same_size = [b"%04d" % number for number in range(1500)]
    splits = {"train": images_of([*same_size, b"rare", b"copies", b"copies"])}
    first, lines = find_duplicates(splits)
    assert first[-1] == 1501
    assert lines == [
        "equal images: twice in train: 1 (train, row 1502)",
        "1,103 images of the same size were not compared with others",
    ]


@pytest.mark.parametrize("seed", range(3))
def test_copies_are_on_one_side_of_the_automatic_split(seed, tmp_path):
    """Under any name; what is in two classes is not held out."""
    for number in range(20):
        for name in (f"{number}.png", f"{number} (1).png"):
            path = tmp_path / ("cat", "dog")[number % 2] / name
            path.parent.mkdir(exist_ok=True)
            noise(number, (8, 8)).save(path)
    for name in ("cat", "dog"):
        noise(99, (8, 8)).save(tmp_path / name / "same.png")
    data = find_images(str(tmp_path), seed=seed, val_fraction=0.3)
    train, val = (
        {hashlib.sha256(images.source.read(row)).digest() for row in images.rows}
        for images in data.splits.values()
    )
    assert len(train | val) == 21 and not train & val and len(data.splits["val"]) == 12
    assert "equal images: twice in train: 20" in " ".join(data.details) and not left_out(data)
