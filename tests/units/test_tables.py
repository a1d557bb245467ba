"""Folders of images whose classes are in metadata.csv."""

import pytest
from PIL import Image

datasets = pytest.importorskip("datasets")

from utils.images import tables
from utils.images.sources import find_images, find_to_evaluate
from utils.run.failures import UserError

KINDS = ["cat", "dog"]
FLAT = [f"{i}.png" for i in range(20)]


def make(root, files=FLAT):
    for number, file in enumerate(files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (number, 0, 0)).save(root / file)


def table(root, values=KINDS, files=FLAT, header="file_name,label", more=lambda i: ""):
    """Writes metadata.csv with these values for the files, again and again; returns the folder."""
    lines = [f"{file},{values[i % len(values)]}{more(i)}" for i, file in enumerate(files)]
    (root / "metadata.csv").write_text("\n".join([header, *lines]) + "\n")
    return str(root)


def sizes(data):
    return {split: len(images) for split, images in data.splits.items()}


def refused(says, name):
    with pytest.raises(UserError, match=says):
        find_images(str(name))


@pytest.mark.parametrize("folder", ["", "images/", "by_day/monday/"])
def test_the_classes_are_in_the_table_and_not_in_the_folders(folder, tmp_path):
    files = [f"{folder}{file}" for file in FLAT]
    make(tmp_path, files)
    data = find_images(table(tmp_path, files=files), val_fraction=0.2)
    assert data.class_names == KINDS and not any("left out" in line for line in data.details)
    assert sizes(data) == {"train": 16, "val": 4}
    for images in data.splits.values():
        for index, label in enumerate(images.labels):
            assert images.open(index).pixels()[0, 0, 0] % 2 == label  # the number of the file


@pytest.mark.parametrize(
    ("values", "class_names"),
    [
        (["None", "NA", "Ring"], ["NA", "None", "Ring"]),
        (["007", "7", "0070"], ["007", "0070", "7"]),
        (["1E5", "2E5"], ["1E5", "2E5"]),
        (["10", "9", "-3"], ["-3", "10", "9"]),
        (["2.0", "10", "9007199254740993.0"], ["10", "2.0", "9007199254740993.0"]),
    ],
)
def test_a_class_is_what_is_written(values, class_names, tmp_path):
    """pandas would read 007 as a number, and NA as nothing."""
    make(tmp_path)
    assert find_images(table(tmp_path, values)).class_names == class_names
    text = (tmp_path / "metadata.csv").read_text().replace("file_name", "image").replace(",", "\t")
    (tmp_path / "metadata.csv").rename(tmp_path / "list.tsv").write_text(text)
    data = find_images(str(tmp_path / "list.tsv"), image_column="image", label_column="label")
    assert data.class_names == class_names


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["-1", "0", "1"], "7 of 20 rows .* have no label, or -1"),
        (["a", "", "b"], "7 of 20 rows .* have no label"),
        (["-1", "007", "7"], "7 of 20 rows .* have no label, or -1"),
    ],
)
def test_what_is_no_class_is_refused(values, says, tmp_path):
    make(tmp_path)
    refused(says, table(tmp_path, values))


def test_an_empty_cell_is_no_image(tmp_path):
    make(tmp_path)
    text = (tmp_path / table(tmp_path) / "metadata.csv").read_text()
    (tmp_path / "metadata.csv").write_text(text.replace("\n3.png", "\n"))
    refused("row 3 of .*, train split has no image: remove it", tmp_path)


def test_a_column_says_the_split(tmp_path):
    make(tmp_path)
    columns = "file_name,label,split"
    split = ["train", "validation", "test", "train"]
    name = table(tmp_path, header=columns, more=lambda i: f",{split[i // 2 % 4]}")
    data = find_images(name)
    assert sizes(data) == {"train": 10, "val": 6, "test": 4}
    assert sizes(find_images(f"{name}/metadata.csv", image_column="file_name")) == sizes(data)
    assert sizes(find_to_evaluate(name, KINDS)) == {"test": 4}
    split[1] = "holdout"
    table(tmp_path, header=columns, more=lambda i: f",{split[i // 2 % 4]}")
    refused("is holdout: it must be train, val or test", name)


@pytest.mark.parametrize("path", ["../1.png", "/etc/1.png", "a/../../1.png"])
def test_no_file_outside_of_the_folder_is_read(path, tmp_path):
    make(tmp_path, ["1.png"])
    make(tmp_path / "photos")
    name = table(tmp_path / "photos", files=[*FLAT, path])
    refused(f"row 20 of .*: {path} is not in the folder of the table", name)


def test_rows_that_repeat_a_file_count_once(tmp_path):
    make(tmp_path)
    files = [file for file in FLAT for _ in range(3)]
    data = find_images(table(tmp_path, [KINDS[i // 3 % 2] for i in range(60)], files))
    assert sum(sizes(data).values()) == 20
    assert f"left out: rows that name a file again: 40 ({tmp_path}/0.png)" in data.details


@pytest.mark.parametrize(
    ("header", "more", "says"),
    [
        ("file_name,label", lambda i: "", r"names .*/0.png with two labels: remove one of them"),
        (
            "file_name,label,split",
            lambda i: ",train" if i < 20 else ",val",
            r"names .*/0.png in its train split and in its val split: remove it from one",
        ),
    ],
)
def test_a_file_with_two_meanings_is_refused(header, more, says, tmp_path):
    """Under another spelling of its path, too."""
    make(tmp_path)
    files = [*FLAT, *(f"./{file}" for file in FLAT)]
    values = KINDS if "split" in header else [KINDS[i % 2 ^ i // 20] for i in range(40)]
    refused(says, table(tmp_path, values, files, header, more))


def test_paths_of_windows_are_read(tmp_path):
    make(tmp_path, [f"a/{file}" for file in FLAT])
    table(tmp_path, files=[f"a\\{file}" for file in FLAT])
    file = tmp_path / "metadata.csv"
    splits, names, left_out = tables.find(str(file), file, "file_name", "label", "or else")
    assert names == KINDS and splits["train"].labels.tolist() == [0, 1] * 10
    assert not left_out.lines() and splits["train"].open(0).width == 20
    assert splits["train"].portable_name(0) == "0.png"  # wherever the folder is
