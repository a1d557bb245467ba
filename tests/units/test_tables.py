"""Tables of images, as files, in folders, and as metadata.csv: columns, classes, splits and paths."""

import os

import numpy as np
import pytest
import torch
from harness.data import encoded, left_out, noise, sizes, write_images

datasets = pytest.importorskip("datasets")

from utils.images import tables
from utils.images.arrays import load_arrays
from utils.images.sources import find_images, find_to_evaluate
from utils.run.failures import UserError

KINDS = ["cat", "dog"]
FLAT = [f"{i}.png" for i in range(20)]
BYTES = datasets.Value("binary")
NAMED = datasets.ClassLabel(names=KINDS)
DECLARED = datasets.ClassLabel(names=["cat", "bird", "cow", "dog"])


def refused(says, name, **options):
    for load in (find_images, load_arrays):
        with pytest.raises(UserError, match=says) as error:
            load(str(name), **options)
        assert "\n" not in str(error.value)


def pixels_of(seed):
    return torch.from_numpy(np.array(noise(seed))).permute(2, 0, 1)


# ------------------------------------------------------------------------------------ metadata.csv


def listed(root, values=KINDS, files=FLAT, header="file_name,label", splits=()):
    """Writes metadata.csv with these values for the files, again and again; returns the folder."""
    write_images(root, *FLAT)
    lines = [f"{file},{values[i % len(values)]}" for i, file in enumerate(files)]
    lines = [
        f"{line},{splits[i // 2 % len(splits)]}" if splits else line for i, line in enumerate(lines)
    ]
    (root / "metadata.csv").write_text("\n".join([header, *lines]) + "\n")
    return str(root)


@pytest.mark.parametrize("folder", ["images/", "by_day\\monday\\"])
def test_the_classes_are_in_the_table_and_not_in_the_folders(folder, tmp_path):
    """Also if Windows wrote the paths."""
    files = [f"{folder}{file}" for file in FLAT]
    write_images(tmp_path, *(file.replace("\\", "/") for file in files))
    data = find_images(listed(tmp_path, files=files), val_fraction=0.2)
    assert data.class_names == KINDS and left_out(data) == []
    assert sizes(data) == {"train": 16, "val": 4}
    for images in data.splits.values():
        for index, label in enumerate(images.labels):
            assert int(images.portable_name(index).removesuffix(".png")) % 2 == label
            assert images.open(index).width == 8


@pytest.mark.parametrize(
    ("values", "class_names"),
    [
        (["None", "NA", "Ring"], ["NA", "None", "Ring"]),
        (["007", "7", "0070"], ["007", "0070", "7"]),
        (["10", "9", "-3"], ["-3", "10", "9"]),
        (["2.0", "10", "9007199254740993.0"], ["10", "2.0", "9007199254740993.0"]),
    ],
)
def test_a_class_is_what_is_written(values, class_names, tmp_path):
    """pandas would read 007 as a number, and NA as nothing."""
    assert find_images(listed(tmp_path, values)).class_names == class_names
    text = (tmp_path / "metadata.csv").read_text().replace("file_name", "image").replace(",", "\t")
    (tmp_path / "metadata.csv").rename(tmp_path / "list.tsv").write_text(text)
    data = find_images(str(tmp_path / "list.tsv"), columns=("image", "label"))
    assert data.class_names == class_names


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"values": ["-1", "007", "7"]}, "7 of 20 rows .* have no label, or -1"),
        ({"values": ["a", "", "b"]}, "7 of 20 rows .* have no label"),
        (
            {"files": [*FLAT, "../1.png"]},
            "row 20 of .*: ../1.png is not in the folder of the table",
        ),
        ({"files": [*FLAT, "/etc/1.png"]}, "/etc/1.png is not in the folder of the table"),
        ({"files": [*FLAT, ""]}, "row 20 of .*, train split has no image: remove it"),
        # A file with two meanings, under another spelling of its path, too.
        (
            {"values": ["a", "b", "c"], "files": [*FLAT, "./0.png"]},
            "names .*/0.png with two labels",
        ),
        (
            {
                "files": FLAT * 2,
                "header": "file_name,label,split",
                "splits": ["train"] * 10 + ["val"],
            },
            r"names .*/0.png in its train split and in its val split: remove it from one",
        ),
        (
            {"header": "file_name,label,split", "splits": ["train", "holdout"]},
            "is holdout: it must be train, val or test",
        ),
    ],
)
def test_a_list_that_contradicts_itself_is_one_line(options, says, tmp_path):
    refused(says, listed(tmp_path, **options))


def test_a_column_says_the_split_and_rows_that_repeat_a_file_count_once(tmp_path):
    splits = ["test", "train", "validation", "train"]
    name = listed(tmp_path, files=FLAT, header="file_name,label,split", splits=splits)
    data = find_images(name)
    assert sizes(data) == {"train": 10, "val": 4, "test": 6} and next(iter(data.splits)) == "train"
    assert sizes(find_images(f"{name}/metadata.csv", columns=("file_name", None))) == sizes(data)
    evaluated = find_to_evaluate(name, KINDS)
    assert sizes(evaluated) == {"test": 6}
    assert any("images of the train split: 10" in line for line in left_out(evaluated))
    data = find_images(listed(tmp_path, files=FLAT * 3))
    assert sum(sizes(data).values()) == 20
    assert left_out(data) == [f"rows that name a file again: 40 ({tmp_path}/0.png)"]


# ---------------------------------------------------------------------------------- labels in rows


def make_labels(folder, kind, **labels):
    """Writes a Parquet file for each keyword, a split, with a column `label` of this type."""
    folder.mkdir(exist_ok=True)
    kind = datasets.Value(kind) if isinstance(kind, str) else kind
    features = datasets.Features(image=BYTES, label=kind)
    for split, values in labels.items():
        rows = {"image": [encoded(noise(i)) for i in range(len(values))], "label": values}
        made = datasets.Dataset.from_dict(rows, features=features)
        made.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "labels", "class_names", "lines"),
    [
        (DECLARED, dict(train=[3, 0] * 6, test=[0, 3]), KINDS, ["bird"]),
        (
            "int64",
            dict(train=[9, 10] * 6, test=[-1] * 3),
            ["9", "10"],
            ["test split without classes: 3"],
        ),
        ("bool", dict(train=[True, False] * 6), ["False", "True"], []),
        ("string", dict(train=["b", "a "] * 6), ["a ", "b"], []),
    ],
)
def test_each_value_of_a_column_is_a_class(kind, labels, class_names, lines, tmp_path):
    """A declared class without images is left out and named, and so is a test split without labels."""
    data = find_images(make_labels(tmp_path / "d", kind, **labels), val_fraction=0.2)
    assert data.class_names == class_names
    assert len(left_out(data)) == len(lines)
    assert all(word in line for word, line in zip(lines, left_out(data), strict=True))
    assert ("test" in data.splits) == (kind is DECLARED)


@pytest.mark.parametrize(
    ("kind", "labels", "says"),
    [
        (NAMED, dict(train=[0, 1, None] * 4), r"4 of 12 rows of the train split .* have no label"),
        (NAMED, dict(train=[0, 1, -1] * 4), r"or -1, in the column label \(the first is row 2\)"),
        (datasets.List(datasets.Value("int64")), dict(train=[[0], [1]] * 4), "has List.*, and not"),
        ("string", dict(train=["a", " ", "b"] * 4), r"4 of 12 rows .* have no label"),
        ("float64", dict(train=[0.0, 1.0] * 4), "float64.*, and not one class for each image"),
        ("int64", dict(train=[None] * 4), "4 of 4 rows of the train split .* have no label"),
        (
            "int64",
            dict(train=[0, 1] * 4, test=[0, 1, 2]),
            r"class '2' of its test split \(row 2 of",
        ),
        ("string", dict(train=["a", "b"] * 4, validation=["c"]), "class 'c' of its val split"),
        (DECLARED, dict(train=[3, 0] * 6, test=[0, 1]), r"class 'bird' of its test split \(row 1"),
    ],
)
def test_labels_that_are_no_classes_are_one_line(kind, labels, says, tmp_path):
    refused(says, make_labels(tmp_path / "d", kind, **labels), val_fraction=0.2)


# ----------------------------------------------------------------------------------------- columns

STRUCT = {"bytes": BYTES, "path": datasets.Value("string")}


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (None, "has several image columns photo, mask: give --columns IMAGE LABEL"),
        (("photo", None), "has no known label column, only photo, mask"),
        (("score", None), "the column score of .* has no images, but Value"),
        (("photo", "box"), "the column box .*, and not one class"),
        (("photo", "class"), "has the columns photo, mask, box"),
        (("kind", "score"), "names .*/cat with two labels"),
    ],
)
def test_columns_that_cannot_be_told_apart_are_named(columns, says, tmp_path):
    features = datasets.Features(
        photo=BYTES, kind=datasets.Value("string"), mask=STRUCT, score=datasets.Value("int64"),
        box={"x": datasets.Value("int64")},
    )  # fmt: skip
    row = {"photo": b"x", "mask": {"bytes": b"x", "path": None}, "box": {"x": 1}}
    rows = [row | {"kind": KINDS[i % 2], "score": i // 2 % 2} for i in range(8)]
    file = tmp_path / "photos.parquet"
    table = datasets.Dataset.from_list(rows, features=features).with_format("arrow")[:]
    # Without what only `datasets` writes.
    datasets.Dataset(table.replace_schema_metadata(None)).to_parquet(str(file))
    refused(says, file, val_fraction=0.2, columns=columns)


def test_the_types_of_columns_say_what_they_are(tmp_path):
    """As in data sets of the Hub: typed columns are taken before those with a well-known name."""
    features = datasets.Features(
        img=datasets.Image(), mask=BYTES, label=datasets.Value("string"), fine=NAMED
    )
    rows = {"img": [noise(i) for i in range(6)], "mask": [b""] * 6, "label": ["x"] * 6}
    rows["fine"] = [0, 1] * 3
    for split in ("train", "validation"):
        made = datasets.Dataset.from_dict(rows, features=features)
        made.to_parquet(str(tmp_path / f"{split}-00000-of-00001.parquet"))
    val = find_images(str(tmp_path)).splits["val"]
    assert val.labels.tolist() == [0, 1] * 3 and "row 4" in val.name(4)
    assert torch.equal(val.open(4).pixels(), pixels_of(4))
    for name in ("label", "labels", "class", "cls", "target", "fine_label"):
        for kind in (BYTES, datasets.Value("large_binary"), STRUCT):
            some = datasets.Features({"a": kind, name: datasets.Value("int64")})
            assert tables.find_columns("d", some, None, None) == ("a", name)
    again = made.add_column("coarse", [0, 1] * 3).cast_column("coarse", NAMED)
    again.to_parquet(str(tmp_path / "train-00000-of-00001.parquet"))
    (tmp_path / "validation-00000-of-00001.parquet").unlink()
    refused("several label columns fine, coarse: give --columns IMAGE LABEL", tmp_path)


# ------------------------------------------------------------------------------------------- paths


def rows_with_paths(folder, paths, suffix="parquet"):
    """Writes a list of eight images that are there, as 0.png to 7.png, of which some may be paths."""
    folder.mkdir(exist_ok=True)
    for i in range(8):
        noise(i).save(folder / f"{i}.png")
    names = [*map(str, paths), *(f"{i}.png" for i in range(8 - len(paths)))]
    rows, file = {"image": names, "label": [0, 10] * 4}, folder / f"list.{suffix}"
    table = datasets.Dataset.from_dict(rows)
    if suffix == "arrow":
        table.save_to_disk(str(folder / "saved"))
        os.rename(folder / "saved" / "data-00000-of-00001.arrow", file)
    else:
        {"parquet": table.to_parquet, "csv": table.to_csv, "jsonl": table.to_json}[suffix](
            str(file)
        )
    return str(file)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "arrow", "parquet"])
def test_the_rows_of_tables_name_images_next_to_them(suffix, tmp_path):
    options = dict(columns=("image", None), val_fraction=0.25)
    file = rows_with_paths(tmp_path / "d", [], suffix)
    data, found = load_arrays(file, **options), find_images(file, **options)
    assert data.class_names == ["0", "10"] and sizes(data) == {"train": 6, "val": 2}
    for index, row in enumerate(found.splits["val"].rows):
        assert torch.equal(data.splits["val"].images[index], pixels_of(row))
    # A changed file is noticed although its list is the same.
    train = found.splits["train"]
    before = train.fingerprint(stamps=True)
    os.utime(tmp_path / "d" / f"{train.rows[0]}.png", (1, 1))
    assert train.fingerprint(stamps=True) != before


@pytest.mark.parametrize("path", ["/dev/zero", "../1.png", "inside/../../1.png", "{outside}"])
def test_the_rows_of_others_name_files_of_their_folder_only(path, tmp_path):
    """In a list that a person wrote, paths may lead anywhere."""
    outside = tmp_path / "1.png"
    noise(1).save(outside)
    options, paths = (
        dict(columns=("image", None), val_fraction=0.25),
        [path.format(outside=outside)],
    )
    refused(
        r"row 0 of .* is not in the folder of the table",
        rows_with_paths(tmp_path / "d", paths),
        **options,
    )
    if "dev" not in path:
        found = find_images(rows_with_paths(tmp_path / "d", paths, "csv"), **options)
        assert sum(sizes(found).values()) == 8


@pytest.mark.parametrize(
    ("path", "says"), [("fifo.png", "not a regular file"), ("nul\0byte", "null|NUL")]
)
def test_rows_name_regular_files_only(path, says, tmp_path):
    file = rows_with_paths(tmp_path / "d", [path])
    os.mkfifo(tmp_path / "d" / "fifo.png")
    with pytest.raises(UserError, match=says) as error:
        load_arrays(file, columns=("image", None), val_fraction=0.25)
    assert "\n" not in str(error.value)


def test_rows_may_name_files_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    """As those of a data set that has images in files; a table may have them without bytes."""
    rows_with_paths(tmp_path / "hub", [])
    paths = [str(tmp_path / "hub" / f"{i}.png") for i in range(8)]
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    rows = {"image": [{"bytes": None, "path": path} for path in paths], "label": [0, 1] * 4}
    table = datasets.Dataset.from_dict(rows, features=features).with_format("arrow")[:]
    (tmp_path / "d").mkdir()
    file = str(tmp_path / "d" / "a.parquet")
    datasets.Dataset(table.replace_schema_metadata(None)).to_parquet(file)
    refused("is not in the folder of the table", file)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    assert sum(sizes(find_images(file, val_fraction=0.25)).values()) == 8
