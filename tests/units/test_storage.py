"""Images in files and in rows that name files: which may be read, and what their names are."""

import os

import numpy as np
import pytest
from harness.data import encoded, noise

from utils.images.arrays import load_arrays
from utils.images.decoding import BadImage
from utils.images.sources import find_images
from utils.images.storage import Files, Pixels, Rows
from utils.run.failures import UserError

datasets = pytest.importorskip("datasets")


def rows_with_paths(folder, paths, suffix="parquet"):
    folder.mkdir(exist_ok=True)
    rows = {"image": [str(path) for path in paths], "label": [0, 1] * (len(paths) // 2)}
    file = folder / f"list.{suffix}"
    table = datasets.Dataset.from_dict(rows)
    {"parquet": table.to_parquet, "csv": table.to_csv, "jsonl": table.to_json}[suffix](str(file))
    return str(file)


def read_all(file):
    found = find_images(file, image_column="image", val_fraction=0.25)
    return [i.open(k).pixels() for i in found.splits.values() for k in range(len(i))]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("fifo.png", "not a regular file"),
        ("zero.png", "not a regular file"),
        ("nul\0byte", "null|NUL"),
    ],
)
def test_rows_name_regular_files_only(path, says, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    os.mkfifo(folder / "fifo.png")
    os.symlink("/dev/zero", folder / "zero.png")
    names = [f"{number}.png" for number in range(7)]
    for number, name in enumerate(names):
        noise(number).save(folder / name)
    file = rows_with_paths(folder, [path, *names])
    with pytest.raises(BadImage, match=says):
        read_all(file)
    with pytest.raises(UserError, match=says) as error:
        load_arrays(file, image_column="image", val_fraction=0.25)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["/dev/zero", "../1.png", "inside/../../1.png", "{outside}"])
def test_the_rows_of_others_name_files_of_their_folder_only(path, tmp_path):
    """In a list that a person wrote, paths may lead anywhere."""
    outside = tmp_path / "1.png"
    for place in (tmp_path, tmp_path / "d"):
        place.mkdir(exist_ok=True)
        for i in range(8):
            noise(i).save(place / f"{i}.png")
    paths = [path.format(outside=outside), *(f"{i}.png" for i in range(7))]
    with pytest.raises(UserError, match=r"row 0 of .* is not in the folder of the table"):
        read_all(rows_with_paths(tmp_path / "d", paths))
    if "dev" not in path:
        assert len(read_all(rows_with_paths(tmp_path / "d", paths, "csv"))) == 8


def test_rows_may_name_files_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    """As those of a data set that has images in files; a table may have them without bytes."""
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    paths = [str(tmp_path / "hub" / f"{i}.png") for i in range(8)]
    for i, path in enumerate(paths):
        noise(i).save(path)
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    rows = {"image": [{"bytes": None, "path": path} for path in paths], "label": [0, 1] * 4}
    table = datasets.Dataset.from_dict(rows, features=features).with_format("arrow")[:]
    (tmp_path / "d").mkdir()
    datasets.Dataset(table.replace_schema_metadata(None)).to_parquet(str(tmp_path / "d/a.parquet"))
    assert len(read_all(str(tmp_path / "d/a.parquet"))) == 8
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is not in the folder of the table"):
        read_all(str(tmp_path / "d/a.parquet"))


def test_files_rows_and_arrays_say_the_same_of_an_image(tmp_path):
    images = [noise(i, (5 + i, 4)) for i in range(3)]
    listed = ["ä 0.png", "b/1.png", "2.png"]
    (tmp_path / "b").mkdir()
    for name, image in zip(listed, images, strict=True):
        image.save(tmp_path / name)
    data = [encoded(image) for image in images]
    files, rows = Files(tmp_path, listed), Rows(data, "a table", "version 1")
    table = datasets.Dataset.from_dict(
        {"image": data}, features=datasets.Features(image=datasets.Value("binary"))
    )
    bytes_of = [len(value) for value in data]
    for source in (files, rows, Rows(table, "a table", "version 1")):
        assert [source.read(i) for i in range(len(source))] == data
        assert source.sizes.tolist() == bytes_of
    assert files.read(1, 7) == data[1][:7]
    assert [files.portable_name(i) for i in range(3)] == listed
    assert files.name(1) == str(tmp_path / "b/1.png") and rows.name(1) == "row 1 of a table"
    assert rows.stamp(0) == "version 1" and files.stamp(0) != files.stamp(2)
    before = files.stamp(0)
    os.utime(tmp_path / listed[0], (1, 1))
    assert files.stamp(0) != before
    (tmp_path / listed[0]).unlink()
    assert files.stamp(0) is None
    assert Files(tmp_path, listed).sizes.tolist() == [-1, *bytes_of[1:]]
    assert len(Files(tmp_path, [])) == 0 and len(files) == 3
    array = Pixels(np.stack([np.array(noise(i)) for i in range(2)]), "photos.npz", "v")
    assert array.read(1).startswith(b"P6 32 32 255\n") and len(array.read(1, 5)) == 5
    assert array.read(1)[13:] == np.array(noise(1)).tobytes()
    assert (array.name(1), array.portable_name(1)) == ("row 1 of photos.npz", "row 1")
