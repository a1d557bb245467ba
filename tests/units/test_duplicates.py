"""Images that are in a data set twice, whatever their names."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from utils.images.decoding import Images
from utils.images.duplicates import find_duplicates
from utils.images.sources import find_images
from utils.images.storage import Rows

CONTENTS = st.lists(st.binary(min_size=1, max_size=2), max_size=12)


def images_of(contents, labels=None, place="train"):
    labels = np.zeros(len(contents), np.int64) if labels is None else np.array(labels)
    return Images(Rows(list(contents), place, "v"), np.arange(len(contents)), labels)


@given(CONTENTS, CONTENTS)
def test_two_images_are_equal_if_their_bytes_are(train, val):
    splits = {"train": images_of(train), "val": images_of(val)}
    first, lines = find_duplicates(splits)
    everything = train + val
    assert np.concatenate(list(first.values())).tolist() == list(map(everything.index, everything))
    assert [len(numbers) for numbers in first.values()] == [len(train), len(val)]
    assert bool(lines) == (len(set(everything)) < len(everything))


def test_of_many_images_of_the_same_size_only_some_are_compared():
    """Those first whose size is rare: photos of one size are seldom different."""
    same_size = [b"%04d" % number for number in range(1500)]
    splits = {"train": images_of([*same_size, b"rare", b"copies", b"copies"])}
    first, lines = find_duplicates(splits)
    assert first["train"][-1] == 1501
    assert lines == [
        "equal images: twice in train: 1 (row 1502 of train)",
        "1,103 images of the same size were not compared with others",
    ]


def test_the_report_tells_splits_and_classes_apart():
    splits = {"train": images_of([b"a", b"b", b"b"], [0, 0, 1])}
    splits["val"] = images_of([b"a", b"b"], [0, 0], "val")
    assert find_duplicates(splits)[1] == [
        "equal images: twice in train and val: 2 (row 0 of val)",
        "equal images: twice in train, with different classes: 1 (row 2 of train)",
    ]


def write(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(path)


@pytest.mark.parametrize("seed", range(3))
def test_copies_are_on_one_side_of_the_automatic_split(seed, tmp_path):
    """Under any name; what is in two classes is not held out."""
    for number in range(20):
        for name in (f"{number}.png", f"{number} (1).png"):
            write(tmp_path / ("cat", "dog")[number % 2] / name, number)
    for name in ("cat", "dog"):
        write(tmp_path / name / "same.png", 99)
    data = find_images(str(tmp_path), seed=seed, val_fraction=0.3)
    train, val = (
        {hashlib.sha256(images.source.read(row)).digest() for row in images.rows}
        for images in data.splits.values()
    )
    assert len(train | val) == 21 and not train & val and len(data.splits["val"]) == 12
    assert "equal images: twice in train: 20" in " ".join(data.details)
