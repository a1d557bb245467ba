"""Tables of images, as files and in folders: columns, classes, splits and files."""

import os

import numpy as np
import pytest
import torch
from harness.data import encoded, left_out, noise, sizes

datasets = pytest.importorskip("datasets")

from utils.images.arrays import load_arrays
from utils.images.sources import find_images
from utils.images.tables import find_columns
from utils.run.failures import UserError

KINDS = ["cat", "dog"]
BYTES, TEXT = datasets.Value("binary"), datasets.Value("string")
NUMBER, TRUTH = datasets.Value("int64"), datasets.Value("bool")
STRUCT = {"bytes": BYTES, "path": TEXT}
NAMED = datasets.ClassLabel(names=KINDS)
DECLARED = datasets.ClassLabel(names=["cat", "bird", "cow", "dog"])


def refused(says, name, **options):
    with pytest.raises(UserError, match=says) as error:
        load_arrays(str(name), **options)
    assert "\n" not in str(error.value)


def write_parquet(file, columns, typed=True, **kinds):
    """Writes a file; not `typed`: without what only `datasets` writes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    if not typed:
        bare = table.with_format("arrow")[:].replace_schema_metadata(None)
        table = datasets.Dataset(bare)
    table.to_parquet(str(file))
    return str(file)


def labeled(folder, kind=NUMBER, **labels):
    """Writes a Parquet file for each keyword, with a column `label` of this type."""
    for place, (name, values) in enumerate(labels.items()):
        images = [encoded(noise(100 * place + i)) for i in range(len(values))]
        columns, file = {"image": images, "label": values}, folder / f"{name}.parquet"
        write_parquet(file, columns, image=BYTES, label=kind)
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "labels", "found", "line"),
    [
        (DECLARED, dict(train=[3, 0] * 6, test=[0, 3]), (KINDS, [10, 2, 2]), "bird"),
        (NUMBER, dict(train=[9, 10] * 6, test=[-1] * 3), (["9", "10"], [10, 2]), "test split wit"),
        (TRUTH, dict(train=[True, False] * 6), (["False", "True"], [10, 2]), ""),
        (TEXT, dict(train=["b", "a "] * 6), (["a ", "b"], [10, 2]), ""),
        (
            TEXT,
            dict(train=["cafe\u0301", "caf\u00e9", "007"] * 4),
            (["007", "caf\u00e9"], [9, 3]),
            "",
        ),
        # The library's search for key words would drop one of these.
        (NUMBER, dict(test_tube=[0, 1], trains=[0, 1] * 4, cat=[0]), (["0", "1"], [9, 2]), ""),
    ],
)
def test_each_value_of_a_column_is_a_class(kind, labels, found, line, tmp_path):
    """A declared class without images is left out and named, and so is a test split without labels."""
    data = find_images(labeled(tmp_path, kind, **labels), val_fraction=0.2)
    assert (data.class_names, list(sizes(data).values())) == found
    assert len(left_out(data)) == bool(line) and line in "".join(left_out(data))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (dict(kind=TEXT, train=["a", "-1", " "] * 4), "8 of 12 rows .* have no label, or -1"),
        (
            dict(kind=NAMED, train=[0, 1, -1, None] * 3),
            r"6 of 12 rows of the train split .*, in the column label \(the first is row 2\)",
        ),
        (dict(kind=datasets.List(NUMBER), train=[[0], [1]]), "has List.*, and not one cl"),
        (dict(kind=datasets.Value("float64"), train=[0.0]), "float64.*, and not one clas"),
        (
            dict(kind=DECLARED, train=[3, 0], test=[1]),
            r"class 'bird' of its test split \(",
        ),
        (dict(birds_valid=[0], birds_train=[0]), "rename birds_train.parquet: to train"),
        (dict(notes=[0], train=[0]), "train.parquet is one of its splits, and notes"),
    ],
)
def test_a_table_that_is_ambiguous_or_has_no_labels_is_one_line(rows, says, tmp_path):
    refused(says, labeled(tmp_path, **rows), val_fraction=0.2)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (None, "has several image columns photo, mask: give --columns IMAGE LABEL"),
        (("photo", None), "has no known label column, only photo, kind, mask, score: give"),
        (("score", None), "the column score of .* has no images, but Value"),
        (("photo", "class"), "--columns class: .* has the columns photo, kind, mask"),
        (("kind", "score"), "the column kind of .* has no images, but Value"),
    ],
)
def test_columns_that_cannot_be_told_apart_are_named(columns, says, tmp_path):
    rows = {"photo": [b"x"] * 8, "kind": KINDS * 4, "mask": [{"bytes": b"x", "path": None}] * 8}
    rows["score"] = [i // 2 % 2 for i in range(8)]
    kinds = dict(photo=BYTES, kind=TEXT, mask=STRUCT, score=NUMBER)
    file = write_parquet(tmp_path / "photos.parquet", rows, typed=False, **kinds)
    refused(says, file, val_fraction=0.2, columns=columns)


def test_the_types_of_columns_say_what_they_are(tmp_path):
    """As in data sets of the Hub: typed columns are taken before those with a well-known name."""
    rows = {"img": [noise(i) for i in range(6)], "mask": [b""] * 6, "label": ["x"] * 6}
    rows["fine"] = [0, 1] * 3
    for split in ("train", "validation"):
        kinds = dict(img=datasets.Image(), mask=BYTES, label=TEXT, fine=NAMED)
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", rows, **kinds)
    val = find_images(str(tmp_path)).splits["val"]
    assert val.labels.tolist() == [0, 1] * 3 and val.name(4).endswith("val split, row 4")
    assert torch.equal(val.open(4).pixels(), torch.tensor(np.array(noise(4))).permute(2, 0, 1))
    for name in ("label", "labels", "class", "cls", "target", "fine_label"):
        for kind in (BYTES, datasets.Value("large_binary"), STRUCT):
            some = datasets.Features({"a": kind, name: NUMBER})
            assert find_columns("d", some, None, None) == ("a", name)
    two = datasets.Features(a=BYTES, fine=NAMED, coarse=NAMED)
    with pytest.raises(UserError, match="several label columns fine, coarse: give --columns IMAGE"):
        find_columns("d", two, None, None)


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("{hub}/7.png", ""),
        ("{hub}/../secret.png", "train split, row 7 has no image, only "),
        ("/dev/zero", "has no image, only "),
        ("secret.png", "has no image, only "),  # where the script runs
        (None, "has no image, only "),
        ("{hub}/fifo.png", "not a regular file"),
        ("{hub}/nul\0byte", "null|NUL"),
    ],
)
def test_rows_name_regular_files_in_the_cache_of_the_hub_only(path, says, tmp_path, monkeypatch):
    """As a data set of the Hub that has images in files; others could name any file of this machine."""
    hub = tmp_path / "hub"
    hub.mkdir()
    for i in range(8):
        noise(i).save(hub / f"{i}.png")
    noise(9).save(tmp_path / "secret.png")
    os.mkfifo(hub / "fifo.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "linked")
    (tmp_path / "linked").symlink_to(hub)
    paths = [*(str(hub / f"{i}.png") for i in range(7)), path and path.format(hub=hub)]
    images = [{"bytes": None, "path": path} for path in paths]
    file = write_parquet(
        tmp_path / "a.parquet",
        {"image": images, "label": [0, 10] * 4},
        typed=False,
        **dict(image=STRUCT, label=NUMBER),
    )
    if says:
        return refused(says, file, val_fraction=0.25)
    data = load_arrays(file, val_fraction=0.25)
    found = find_images(file, val_fraction=0.25)
    assert data.class_names == ["0", "10"] and sizes(data) == {"train": 6, "val": 2}
    for index, row in enumerate(found.splits["val"].rows):
        pixels = torch.from_numpy(np.array(noise(row))).permute(2, 0, 1)
        assert torch.equal(data.splits["val"].images[index], pixels)
