"""Every script takes the same sources of data: tables with any columns, folders, 32x32 images."""

import os
import shutil

import numpy as np
import pytest
import torch
from harness.data import encoded, make_photos, noise

from utils.images import columns
from utils.images.arrays import load_arrays
from utils.images.sources import find_images
from utils.run.failures import UserError

datasets = pytest.importorskip("datasets")

KINDS = ["cat", "dog", "yak"]


def pixels_of(seed):
    return torch.from_numpy(np.array(noise(seed))).permute(2, 0, 1)


def sizes(data):
    return {split: len(images) for split, images in data.splits.items()}


def names(images):
    return [os.path.relpath(images.name(i), images.source.root) for i in range(len(images))]


def refused(says, name, load=find_images, **options):
    with pytest.raises(UserError, match=says) as error:
        load(str(name), **options)
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------- tables

STRUCT = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
COLUMNS = {
    "images": (datasets.Image(), lambda data: {"bytes": data, "path": None}),
    "structs": (STRUCT, lambda data: {"bytes": data, "path": None}),
    "bytes": (datasets.Value("binary"), lambda data: data),
    "large bytes": (datasets.Value("large_binary"), lambda data: data),
}


def make_table(file, column="bytes", **others):
    """Writes a Parquet file with the columns `photo` and `kind`, as other tools write it."""
    kind, convert = COLUMNS[column]
    rows = {
        "photo": [convert(encoded(noise(i))) for i in range(30)],
        "kind": [KINDS[i % 3] for i in range(30)],
    }
    features = {"photo": kind, "kind": datasets.Value("string")}
    for name, (feature, values) in others.items():
        rows[name], features[name] = values * 15, feature
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    table = made.with_format("arrow")[:]
    if column != "images":
        table = table.replace_schema_metadata(None)  # without what only `datasets` writes
    datasets.Dataset(table).to_parquet(str(file))
    return str(file)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "arrow"])
def test_the_rows_of_other_tables_name_images_next_to_them(suffix, tmp_path):
    for i in range(8):
        noise(i).save(tmp_path / f"{i}.png")
    values = {"file": [f"{i}.png" for i in range(8)], "label": [10 * (i % 2) for i in range(8)]}
    rows, file = datasets.Dataset.from_dict(values), tmp_path / f"list.{suffix}"
    if suffix == "arrow":
        rows.save_to_disk(str(tmp_path / "saved"))
        os.rename(tmp_path / "saved" / "data-00000-of-00001.arrow", file)
    else:
        {"csv": rows.to_csv, "jsonl": rows.to_json}[suffix](str(file))
    options = dict(image_column="file", val_fraction=0.25)
    data, found = load_arrays(str(file), **options), find_images(str(file), **options)
    assert data.class_names == ["0", "10"] and sizes(data) == {"train": 6, "val": 2}
    for index, row in enumerate(found.splits["val"].rows):
        assert torch.equal(data.splits["val"].images[index], pixels_of(row))
    # A changed file is noticed although its list is the same.
    train = found.splits["train"]
    before = train.fingerprint(stamps=True)
    os.utime(tmp_path / f"{train.rows[0]}.png", (1, 1))
    assert train.fingerprint(stamps=True) != before


BYTES = datasets.Value("binary")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "has several image columns photo, mask: give --columns IMAGE LABEL"),
        ({"image_column": "photo"}, "has no known label column, only photo, kind"),
        ({"image_column": "score"}, "the column score of .* has no images, but Value"),
        ({"image_column": "photo", "label_column": "box"}, "the column box .*, and not one class"),
        ({"image_column": "photo", "label_column": "class"}, "has the columns photo, kind, mask"),
        ({"image_column": "kind", "label_column": "score"}, "names .*/cat with two labels"),
    ],
)
def test_columns_that_cannot_be_told_apart_are_named(options, says, tmp_path):
    integers, struct = datasets.Value("int64"), {"x": datasets.Value("int64")}
    others = dict(
        mask=(BYTES, [b"x", b"y"]), score=(integers, [0, 1]), box=(struct, [{"x": 1}] * 2)
    )
    file = make_table(tmp_path / "photos.parquet", **others)
    refused(says, file, load_arrays, val_fraction=0.2, **options)


def test_the_types_of_columns_say_what_they_are(tmp_path):
    """As in data sets of the Hub: typed columns are taken before those with a well-known name."""
    features = datasets.Features(
        img=datasets.Image(), mask=BYTES, label=datasets.Value("string"),
        fine=datasets.ClassLabel(names=KINDS),
    )  # fmt: skip
    images = [noise(i) for i in range(6)]
    rows = {"img": images, "mask": [b""] * 6, "label": ["x"] * 6, "fine": [0, 1, 2] * 2}
    for split in ("train", "validation"):
        made = datasets.Dataset.from_dict(rows, features=features)
        made.to_parquet(str(tmp_path / f"{split}-00000-of-00001.parquet"))
    val = find_images(str(tmp_path)).splits["val"]
    assert val.labels.tolist() == [0, 1, 2] * 2 and "row 4" in val.name(4)
    assert torch.equal(val.open(4).pixels(), pixels_of(4))
    for name in ("label", "labels", "class", "cls", "target", "fine_label"):
        some = datasets.Features({"a": BYTES, name: datasets.Value("int64")})
        assert columns.find_columns("d", some, None, None) == ("a", name)
    again = made.add_column("coarse", [0, 1, 2] * 2).cast_column("coarse", features["fine"])
    again.to_parquet(str(tmp_path / "train-00000-of-00001.parquet"))
    (tmp_path / "validation-00000-of-00001.parquet").unlink()
    refused("several label columns fine, coarse: give --columns IMAGE LABEL", tmp_path)


# ----------------------------------------------------------------------------------------- splits


def make_folders(root, *splits):
    return str(make_photos(root, 10, splits, KINDS[:2]))


def test_no_script_has_to_choose_by_test_data(tmp_path):
    """Without a split for validation, one is taken from `train`; the test split stays as it is."""
    folder = make_folders(tmp_path, "train", "test")
    whole, found = find_images(folder, val_fraction=0), find_images(folder, val_fraction=0.3)
    assert list(whole.splits) == ["train", "test"] and len(whole.splits["train"]) == 20
    assert list(found.splits) == ["train", "val", "test"]
    assert names(found.splits["test"]) == names(whole.splits["test"])
    assert np.bincount(found.splits["val"].labels).tolist() == [3, 3]
    taken, kept = names(found.splits["val"]), names(found.splits["train"])
    assert sorted(kept + taken) == sorted(names(whole.splits["train"]))
    assert list(sizes(load_arrays(folder, val_fraction=0.3)).values()) == [14, 6, 20]
    assert list(load_arrays(folder).splits) == ["train", "test"]


def test_something_is_held_out(tmp_path):
    folder = make_folders(tmp_path, "train")
    for load in (find_images, load_arrays):
        refused("no test split and no val split: give --val_fr", folder, load, val_fraction=0)
        assert len(load(folder, val_fraction=None).splits["val"]) == 2  # a tenth of each class


def test_a_split_depends_on_names_and_seed_only(tmp_path):
    """The same images wherever the folder is; at least one of a class, and never all."""
    folder = make_folders(tmp_path / "a", "")
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "b")
    data, again = (
        find_images(str(path), val_fraction=0.2) for path in (folder, tmp_path / "elsewhere" / "b")
    )
    held_out = names(data.splits["val"])
    assert names(again.splits["val"]) == held_out and again.description == data.description
    assert names(find_images(folder, seed=1, val_fraction=0.2).splits["val"]) != held_out
    assert sizes(find_images(folder, val_fraction=0.01)) == {"train": 18, "val": 2}
    assert sizes(find_images(folder, val_fraction=0.99)) == {"train": 2, "val": 18}


def make_splits(folder, files):
    """Writes Parquet files with so many rows each."""
    for number, (name, count) in enumerate(files.items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        images = [encoded(noise(100 * number + i)) for i in range(count)]
        rows = {"image": images, "label": [0, 1] * (count // 2)}
        datasets.Dataset.from_dict(rows).to_parquet(str(folder / name))
    return str(folder)


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
    folder = make_splits(tmp_path / "d", files)
    if isinstance(expected, dict):
        fraction = 0.33 if "test_tube.parquet" in files else 0
        assert sizes(find_images(folder, val_fraction=fraction)) == expected
    else:
        refused(expected, folder)


@pytest.mark.slow
def test_synthetic_images_depend_on_the_seed_only():
    data, other = find_images("synthetic", seed=3), find_images("synthetic", seed=4)
    assert sizes(data) == {"train": 1000, "val": 200} and len(data.class_names) == 10
    assert find_images("synthetic", seed=3).description == data.description != other.description
    shapes = [data.splits["val"].open(i).pixels().shape for i in range(20)]
    assert len(set(shapes)) > 10 and all(40 <= side <= 160 for _, *s in shapes for side in s)
    train = data.splits["train"]
    gray, color = train.open(3).pixels(), train.open(4).pixels()
    assert torch.equal(gray[0], gray[1]) and not torch.equal(color[0], color[1])
    assert train.source.read(7).startswith(b"\x89PNG") and "row 7 of synthetic" in train.name(7)
