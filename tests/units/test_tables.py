"""Tables of images, as files, in folders, and as metadata.csv: columns, classes, splits and paths."""

import os

import numpy as np
import pytest
import torch
from harness.data import encoded, left_out, noise, sizes, write_images

datasets = pytest.importorskip("datasets")

from utils.images.arrays import load_arrays
from utils.images.sources import find_images, find_to_evaluate
from utils.images.tables import find_columns
from utils.run.failures import UserError

KINDS = ["cat", "dog"]
FLAT = [f"{i}.png" for i in range(20)]
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


def listed(root, values=KINDS, files=FLAT, splits=()):
    """Writes metadata.csv with these values for the files, again and again; returns the folder."""
    write_images(root, *FLAT)
    lines = ["file_name,label,split" if splits else "file_name,label"]
    for i, file in enumerate(files):
        line = f"{file},{values[i % len(values)]}"
        lines.append(f"{line},{splits[i // 2 % len(splits)]}" if splits else line)
    (root / "metadata.csv").write_text("\n".join(lines) + "\n")
    return str(root)


def labeled(folder, kind=NUMBER, **labels):
    """Writes a Parquet file for each keyword, with a column `label` of this type."""
    for place, (name, values) in enumerate(labels.items()):
        images = [encoded(noise(100 * place + i)) for i in range(len(values))]
        columns, file = {"image": images, "label": values}, folder / f"{name}.parquet"
        write_parquet(file, columns, image=BYTES, label=kind)
    return str(folder)


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
        (["10", "007", "7", "-3"], ["-3", "007", "10", "7"]),
        (["2.0", "10", "9007199254740993.0"], ["10", "2.0", "9007199254740993.0"]),
        (["cafe\u0301", "caf\u00e9", "x"], ["caf\u00e9", "x"]),
    ],
)
def test_a_class_is_what_is_written(values, class_names, tmp_path):
    """pandas would read 007 as a number, and NA as nothing."""
    assert find_images(listed(tmp_path, values)).class_names == class_names
    text = (tmp_path / "metadata.csv").read_text().replace("file_name", "image").replace(",", "\t")
    (tmp_path / "metadata.csv").rename(tmp_path / "list.tsv").write_text(text)
    data = find_images(str(tmp_path / "list.tsv"), columns=("image", "label"))
    assert data.class_names == class_names


def test_a_column_says_the_split_and_rows_that_repeat_a_file_count_once(tmp_path):
    name = listed(tmp_path, splits=["test", "train", "validation", "train"])
    data = find_images(name)
    assert sizes(data) == {"train": 10, "val": 4, "test": 6} and next(iter(data.splits)) == "train"
    assert sizes(find_images(f"{name}/metadata.csv", columns=("file_name", None))) == sizes(data)
    evaluated = find_to_evaluate(name, KINDS)
    assert sizes(evaluated) == {"test": 6}
    assert any("images of the train split: 10" in line for line in left_out(evaluated))
    data = find_images(listed(tmp_path, files=FLAT * 3))
    assert sum(sizes(data).values()) == 20
    assert left_out(data) == [f"rows that name a file again: 40 ({tmp_path}/0.png)"]


@pytest.mark.parametrize(
    ("kind", "labels", "found", "line"),
    [
        (DECLARED, dict(train=[3, 0] * 6, test=[0, 3]), (KINDS, [10, 2, 2]), "bird"),
        (NUMBER, dict(train=[9, 10] * 6, test=[-1] * 3), (["9", "10"], [10, 2]), "test split wit"),
        (TRUTH, dict(train=[True, False] * 6), (["False", "True"], [10, 2]), ""),
        (TEXT, dict(train=["b", "a "] * 6), (["a ", "b"], [10, 2]), ""),
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
    ("write", "rows", "says"),
    [
        (listed, dict(values=["-1", "007", "7"]), "7 of 20 rows .* have no label, or -1"),
        (labeled, dict(kind=TEXT, train=["a", " "] * 4), "4 of 8 rows .* have no label"),
        (
            labeled,
            dict(kind=NAMED, train=[0, 1, -1, None] * 3),
            r"6 of 12 rows of the train split .*, in the column label \(the first is row 2\)",
        ),
        (labeled, dict(kind=datasets.List(NUMBER), train=[[0], [1]]), "has List.*, and not one cl"),
        (labeled, dict(kind=datasets.Value("float64"), train=[0.0]), "float64.*, and not one clas"),
        (
            labeled,
            dict(kind=DECLARED, train=[3, 0], test=[1]),
            r"class 'bird' of its test split \(",
        ),
        (labeled, dict(birds_valid=[0], birds_train=[0]), "rename birds_train.parquet: to train"),
        (labeled, dict(notes=[0], train=[0]), "train.parquet is one of its splits, and notes"),
        (listed, dict(files=[*FLAT, "../1.png"]), "row 20 of .*: ../1.png is not in the folder of"),
        (listed, dict(files=[*FLAT, ""]), "row 20 of .*, train split has no image: remove it"),
        # A file with two meanings, under another spelling of its path, too.
        (listed, dict(values="abc", files=[*FLAT, "./0.png"]), "names .*/0.png with two labels"),
        (
            listed,
            dict(files=FLAT * 2, splits=["train"] * 10 + ["val"]),
            "names .*/0.png in its train split and in its val split: remove it from one",
        ),
        (listed, dict(splits=["train", "holdout"]), "is holdout: it must be train, val or test"),
    ],
)
def test_a_table_that_is_ambiguous_or_has_no_labels_is_one_line(write, rows, says, tmp_path):
    refused(says, write(tmp_path, **rows), val_fraction=0.2)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (None, "has several image columns photo, mask: give --columns IMAGE LABEL"),
        (("photo", None), "has no known label column, only photo, kind, mask, score: give"),
        (("score", None), "the column score of .* has no images, but Value"),
        (("photo", "class"), "--columns class: .* has the columns photo, kind, mask"),
        (("kind", "score"), "names .*/cat with two labels"),
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
    assert val.labels.tolist() == [0, 1] * 3 and "row 4" in val.name(4)
    assert torch.equal(val.open(4).pixels(), torch.tensor(np.array(noise(4))).permute(2, 0, 1))
    for name in ("label", "labels", "class", "cls", "target", "fine_label"):
        for kind in (BYTES, datasets.Value("large_binary"), STRUCT):
            some = datasets.Features({"a": kind, name: NUMBER})
            assert find_columns("d", some, None, None) == ("a", name)
    two = datasets.Features(a=BYTES, fine=NAMED, coarse=NAMED)
    with pytest.raises(UserError, match="several label columns fine, coarse: give --columns IMAGE"):
        find_columns("d", two, None, None)


# ------------------------------------------------------------------------------------------- paths

OPTIONS = dict(columns=("image", None), val_fraction=0.25)


def rows_with_paths(folder, paths, suffix="parquet"):
    """Writes a list of eight images that are there, as 0.png to 7.png, of which some may be paths."""
    folder.mkdir(exist_ok=True)
    for i in range(8):
        noise(i).save(folder / f"{i}.png")
    names = [*map(str, paths), *(f"{i}.png" for i in range(8 - len(paths)))]
    table = datasets.Dataset.from_dict({"image": names, "label": [0, 10] * 4})
    if suffix == "arrow":
        table.save_to_disk(str(folder))
        return str(folder / "data-00000-of-00001.arrow")
    write = {"parquet": table.to_parquet, "csv": table.to_csv, "jsonl": table.to_json}
    write[suffix](str(folder / f"list.{suffix}"))
    return str(folder / f"list.{suffix}")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "arrow", "parquet"])
def test_the_rows_of_tables_name_images_next_to_them(suffix, tmp_path):
    file = rows_with_paths(tmp_path / "d", [], suffix)
    data, found = load_arrays(file, **OPTIONS), find_images(file, **OPTIONS)
    assert data.class_names == ["0", "10"] and sizes(data) == {"train": 6, "val": 2}
    for index, row in enumerate(found.splits["val"].rows):
        pixels = torch.from_numpy(np.array(noise(row))).permute(2, 0, 1)
        assert torch.equal(data.splits["val"].images[index], pixels)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/dev/zero", "row 0 of .* is not in the folder of the table"),
        ("inside/../../1.png", "is not in the folder of the table"),
        ("{outside}", "is not in the folder of the table"),
        ("fifo.png", "not a regular file"),
        ("nul\0byte", "null|NUL"),
    ],
)
def test_the_rows_of_others_name_regular_files_of_their_folder_only(path, says, tmp_path):
    """In a list that a person wrote, paths may lead anywhere."""
    noise(1).save(tmp_path / "1.png")
    paths = [path.format(outside=tmp_path / "1.png")]
    file = rows_with_paths(tmp_path / "d", paths)
    os.mkfifo(tmp_path / "d" / "fifo.png")
    refused(says, file, **OPTIONS)
    if "1.png" in paths[0]:
        found = find_images(rows_with_paths(tmp_path / "d", paths, "csv"), **OPTIONS)
        assert sum(sizes(found).values()) == 8


def test_rows_may_name_files_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    """As those of a data set that has images in files; a table may have them without bytes."""
    rows_with_paths(tmp_path / "hub", [])
    images = [{"bytes": None, "path": str(tmp_path / "hub" / f"{i}.png")} for i in range(8)]
    rows, kinds = {"image": images, "label": [0, 1] * 4}, dict(image=STRUCT, label=NUMBER)
    file = write_parquet(tmp_path / "d" / "a.parquet", rows, typed=False, **kinds)
    refused("is not in the folder of the table", file)
    with monkeypatch.context() as patch:  # a table of the Hub may name none where the script runs
        features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
        table = datasets.Dataset.from_dict(rows, features=features)
        found = datasets.DatasetDict(train=table)
        patch.setattr("utils.images.tables.load_table", lambda *_, **__: found)
        patch.chdir(tmp_path)
        refused("is not in the folder of the table", "someone/rows")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    assert sum(sizes(find_images(file, val_fraction=0.25)).values()) == 8
