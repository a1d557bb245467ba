"""What is held out of any source of images, and images that are there twice."""

import hashlib
import os
import shutil

import numpy as np
import pytest
import torch
from harness.data import encoded, left_out, make_photos, noise, sizes, write_images
from hypothesis import given
from hypothesis import strategies as st

from utils.images.arrays import load_arrays
from utils.images.decoding import Images
from utils.images.sources import find_duplicates, find_images
from utils.images.storage import Rows
from utils.run.failures import UserError

datasets = pytest.importorskip("datasets")


def names(images):
    return [os.path.relpath(images.name(i), images.source.root) for i in range(len(images))]


# ----------------------------------------------------------------------------------------- splits


def make_folders(root, *splits):
    return str(make_photos(root, 10, splits, ["cat", "dog"]))


def test_no_script_has_to_choose_by_test_data(tmp_path):
    """Without a split for validation, one is taken from `train`; the test split stays as it is."""
    folder = make_folders(tmp_path, "train", "test")
    whole, found = find_images(folder, val_fraction=0), find_images(folder, val_fraction=0.3)
    assert list(whole.splits) == ["train", "test"] and list(found.splits) == [
        "train",
        "val",
        "test",
    ]
    assert names(found.splits["test"]) == names(whole.splits["test"])
    assert np.bincount(found.splits["val"].labels).tolist() == [3, 3]
    taken, kept = names(found.splits["val"]), names(found.splits["train"])
    assert sorted(kept + taken) == sorted(names(whole.splits["train"]))
    assert sizes(load_arrays(folder, val_fraction=0.3)) == sizes(found)
    assert list(load_arrays(folder).splits) == ["train", "test"]


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
    for load in (find_images, load_arrays):
        with pytest.raises(UserError, match="no test split and no val split: give --val_fraction"):
            load(folder, val_fraction=0)
        assert len(load(folder, val_fraction=None).splits["val"]) == 2  # a tenth of each class
    few = write_images(tmp_path / "few", "cat/", "dog/0.png")
    with pytest.raises(UserError, match="class dog has 1 image: at least 2 are needed"):
        find_images(few)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"test-00-of-01.parquet": 4, "train-00-of-01.parquet": 8}, {"train": 8, "test": 4}),
        ({"test/0.parquet": 4, "train/0.parquet": 8}, {"train": 8, "test": 4}),
        # The library's search for key words would drop one of these.
        ({"test_tube.parquet": 4, "trains.parquet": 4, "cat.parquet": 4}, {"train": 8, "val": 4}),
        ({"birds_valid.parquet": 4, "birds_train.parquet": 8}, "rename birds_train.parquet: to tr"),
        ({"notes.parquet": 4, "train.parquet": 8}, "train.parquet is one of its splits, and notes"),
        ({"test.parquet": 4, "val.parquet": 8}, "has no train split, only"),
    ],
)
def test_splits_of_tables_by_the_names_of_files(files, expected, tmp_path):
    for number, (name, count) in enumerate(files.items()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        images = [encoded(noise(100 * number + i)) for i in range(count)]
        rows = {"image": images, "label": [0, 1] * (count // 2)}
        datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / name))
    if isinstance(expected, dict):
        fraction = 0.33 if "test_tube.parquet" in files else 0
        assert sizes(find_images(str(tmp_path), val_fraction=fraction)) == expected
    else:
        with pytest.raises(UserError, match=expected):
            find_images(str(tmp_path))


def test_synthetic_images_depend_on_the_seed_only():
    data, other = find_images("synthetic", seed=3), find_images("synthetic", seed=4)
    assert sizes(data) == {"train": 1000, "val": 200} and len(data.class_names) == 10
    assert find_images("synthetic", seed=3).description == data.description != other.description
    assert data.splits["train"].name(7) == "row 7 of synthetic, train split"
    assert not torch.equal(*(data.splits[split].open(0).pixels() for split in data.splits))


# ------------------------------------------------------------------------------------------ copies

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
