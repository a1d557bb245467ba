"""Encoded images: where they are, what is none, and when a checksum of many differs."""

import os
import struct

import numpy as np
import pytest
from harness.data import encoded, noise
from PIL import Image

from utils.images import decoding
from utils.images.decoding import BadImage, Encoded, Files, Images, Pixels, Rows

LARGE = noise(0, (4, 3)).resize((400, 300))
SHOWN = noise(0).convert("L")
GOOD = encoded(SHOWN)
AT = GOOD.index(b"IDAT") + 30
DAMAGED = GOOD[:AT] + b"\xff" + GOOD[AT + 1 :]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"this is a thesis", "not an image"),
        (encoded(LARGE, "JPEG")[:-800], "truncated"),
        (encoded(LARGE)[:900], "truncated"),
        (b"", "not an image"),
        (encoded(noise(0), "EPS"), "not an image"),  # for which Pillow would start Ghostscript
        (DAMAGED, "."),
    ],
)
def test_a_broken_image_is_recognized(data, says):
    with pytest.raises(BadImage, match=says):
        Encoded(data).pixels()


def test_a_fingerprint_knows_names_labels_sizes_and_sampled_data(monkeypatch):
    monkeypatch.setattr(decoding, "SAMPLED", 2)
    monkeypatch.setattr(decoding, "SAMPLED_BYTES", 4)
    data = [b"aaaa1", b"bbbb", b"cccc"]

    def of(data=data, labels=(0, 1, 0), rows=(0, 1, 2)):
        source = Rows(list(data), "a table", "1")
        return Images(source, np.array(rows), np.array(labels)).fingerprint()

    assert of() == of([b"aaaa1", b"xxxx", b"cccc"])  # not in the sample, of the same size
    others = [of(labels=(0, 1, 1)), of(rows=(0, 2, 1)), of([b"aaaa1", b"bbbb", b"cccx"])]
    others.append(of([b"aaaa1", b"bbbbb", b"cccc"]))
    assert len({of(), *others}) == 5


# --------------------------------------------------------------------------------- more than 8 bits

GRAY = np.arange(12).reshape(3, 4)


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray(GRAY.astype(np.uint16))),
        encoded(Image.fromarray(GRAY.astype(np.uint16)), "TIFF"),
        encoded(Image.fromarray(GRAY.astype(np.int32)), "TIFF"),
        encoded(Image.fromarray(GRAY.astype(np.float32)), "TIFF"),
        # In color, which Pillow does not write: an image of 8 bits with another tag.
        encoded(noise(0), "TIFF").replace(
            struct.pack("<HHH", 8, 8, 8), struct.pack("<HHH", 16, 16, 16)
        ),
    ],
)
def test_more_than_8_bits_per_channel_are_refused(data):
    """Also where Pillow would read the upper 8 bits of each value."""
    with pytest.raises(BadImage, match=r"more than 8 bits per channel: .* the recipe eight_bits"):
        Encoded(data)


def test_files_rows_and_arrays_say_the_same_of_an_image(tmp_path):
    images = [noise(i, (5 + i, 4)) for i in range(3)]
    listed = ["ä 0.png", "b/1.png", "2.png"]
    (tmp_path / "b").mkdir()
    for name, image in zip(listed, images, strict=True):
        image.save(tmp_path / name)
    data = [encoded(image) for image in images]
    files, rows = Files(tmp_path, listed), Rows(data, "a table", "version 1")
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"image": data}, features=datasets.Features(image=datasets.Value("binary"))
    )
    bytes_of = [len(value) for value in data]
    for source in (files, rows, Rows(table, "a table", "version 1")):
        assert [source.read(i) for i in range(len(source))] == data
        assert source.sizes.tolist() == bytes_of
    assert files.read(1, 7) == data[1][:7]
    assert [files.portable_name(i) for i in range(3)] == listed
    assert files.place == f"{tmp_path}/" and rows.place == "a table, "
    versions = [files.version, Files(tmp_path, listed).version, Files(tmp_path, listed[1:]).version]
    os.utime(tmp_path / listed[0], (1, 1))
    versions.append(Files(tmp_path, listed).version)
    assert versions[0] == versions[1] and len(set(versions)) == 3
    (tmp_path / listed[0]).unlink()
    assert Files(tmp_path, listed).sizes.tolist() == [-1, *bytes_of[1:]]
    assert len(Files(tmp_path, [])) == 0 and len(files) == 3
    array = Pixels(np.stack([np.array(noise(i)) for i in range(2)]), "photos.npz", "v")
    assert array.read(1).startswith(b"P6 32 32 255\n") and len(array.read(1, 5)) == 5
    assert array.read(1)[13:] == np.array(noise(1)).tobytes()
    assert (array.place, array.portable_name(1)) == ("photos.npz, ", "row 1")
