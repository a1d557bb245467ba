"""Images in files, in rows and in arrays: what is read of them, and what their names are."""

import os

import numpy as np
import pytest
from harness.data import encoded, noise

from utils.images.storage import Files, Pixels, Rows

datasets = pytest.importorskip("datasets")


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
