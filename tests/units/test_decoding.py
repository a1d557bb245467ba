"""Encoded images: what is no image, and when a checksum of many differs."""

import io
import struct
import zlib

import numpy as np
import pytest
from harness.data import encoded, noise
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from utils.images import decoding
from utils.images.decoding import BadImage, Encoded, Images
from utils.images.storage import Rows

pytestmark = pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
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


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_plain_jpeg_is_decoded_by_torchvision_to_the_same_pixels(mode, monkeypatch):
    """Which is faster; a rotated one, and one that is reduced, by Pillow."""
    image = LARGE.convert(mode)
    data = encoded(image, "JPEG")
    turned = image.getexif()
    turned[decoding.ORIENTATION] = 6
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    read, load = [], JpegImageFile.load
    monkeypatch.setattr(JpegImageFile, "load", lambda self: read.append(self) or load(self))
    assert np.array_equal(Encoded(data).pixels().permute(1, 2, 0).numpy(), expected)
    assert not read
    rotated = Encoded(encoded(image, "JPEG", exif=turned.tobytes()))
    assert (rotated.width, rotated.height) == (300, 400) and rotated.pixels().shape == (3, 400, 300)
    assert len(read) > 0
    assert Encoded(data).pixels(2).shape == (3, 150, 200)


def test_the_first_of_several_photos_in_a_file_is_read(tmp_path):
    """As cameras write them, in the format MPO: it is reduced like a JPEG."""
    several = dict(save_all=True, append_images=[LARGE.rotate(180)])
    data = encoded(LARGE, "MPO", **several)
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert Encoded(data).pixels(4).shape == (3, 75, 100)


def test_a_fingerprint_knows_names_labels_sizes_and_sampled_data(monkeypatch):
    monkeypatch.setattr(decoding, "SAMPLED", 2)
    monkeypatch.setattr(decoding, "SAMPLED_BYTES", 4)
    data = [b"aaaa1", b"bbbb", b"cccc"]

    def of(data=data, labels=(0, 1, 0), rows=(0, 1, 2), version="1", stamps=False):
        source = Rows(list(data), "a table", version)
        return Images(source, np.array(rows), np.array(labels)).fingerprint(stamps)

    assert of() == of(version="2")
    assert of() == of([b"aaaa1", b"xxxx", b"cccc"])  # not in the sample, of the same size
    others = [of(labels=(0, 1, 1)), of(rows=(0, 2, 1)), of([b"aaaa1", b"bbbb", b"cccx"])]
    others.append(of([b"aaaa1", b"bbbbb", b"cccc"]))
    # On one machine the version of the source counts instead.
    stamped = [of(stamps=True), of(stamps=True, version="2")]
    assert of([b"x"] * 3, stamps=True) == stamped[0]
    assert len({of(), *others, *stamped}) == 7


# --------------------------------------------------------------------------------- more than 8 bits


def chunk(name, body):
    checksum = zlib.crc32(name + body)
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", checksum)


def tiff_16(values):
    """A TIFF in color with 16 bits per value, which Pillow does not write; [h, w, 3]."""
    height, width, _ = values.shape
    data = values.astype("<u2").tobytes()
    entries = [(256, 3, width), (257, 3, height), (258, 3, 8 + len(data)), (259, 3, 1), (262, 3, 2)]
    entries += [(273, 4, 8), (277, 3, 3), (278, 3, height), (279, 4, len(data))]
    bits, at = struct.pack("<HHH", 16, 16, 16), 8 + len(data)
    directory = struct.pack("<H", len(entries))
    for tag, kind, value in entries:
        count = 3 if tag == 258 else 1
        directory += struct.pack("<HHII", tag, 4 if tag == 258 else kind, count, value)
    directory = directory.replace(struct.pack("<HHI", 258, 4, 3), struct.pack("<HHI", 258, 3, 3))
    header = b"II*\0" + struct.pack("<I", at + len(bits))
    return header + data + bits + directory + bytes(4)


GRAY = np.arange(12).reshape(3, 4)


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray(GRAY.astype(np.uint16))),
        encoded(Image.fromarray(GRAY.astype(np.uint16)), "TIFF"),
        encoded(Image.fromarray(GRAY.astype(np.int32)), "TIFF"),
        encoded(Image.fromarray(GRAY.astype(np.float32)), "TIFF"),
        tiff_16(np.dstack([GRAY] * 3)),
    ],
)
def test_more_than_8_bits_per_channel_are_refused(data):
    """Also where Pillow would read the upper 8 bits of each value."""
    with pytest.raises(BadImage, match=r"more than 8 bits per channel: .* the recipe eight_bits"):
        Encoded(data)


EXIF = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x01\0\0\0\0\0\0\0"


@pytest.mark.parametrize("exif", [b"no EXIF at all", EXIF[:12], b""])
def test_damaged_exif_data_hides_no_image(exif):
    """Before the pixels or behind them."""
    block = chunk(b"eXIf", exif)
    for at in (33, len(GOOD) - 12):
        shown = Encoded(GOOD[:at] + block + GOOD[at:]).pixels()
        assert shown[0].tolist() == np.asarray(SHOWN).tolist()


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_that_is_none_turns_nothing(value):
    image = noise(0, (4, 3))
    exif = image.getexif()
    exif[decoding.ORIENTATION] = value
    read = Encoded(encoded(image, exif=exif.tobytes()))
    assert (read.width, read.height) == image.size
    assert np.array_equal(read.pixels().permute(1, 2, 0).numpy(), np.asarray(image))
