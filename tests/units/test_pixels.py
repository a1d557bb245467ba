"""One decoder for all scripts: values of any depth, scaled alike in a whole data set."""

import struct
import zlib

import numpy as np
import pytest
import torch
from harness.data import encoded as encode
from PIL import Image

from utils.images import pixels
from utils.images.arrays import load_arrays
from utils.images.decoding import BadImage, Encoded
from utils.images.image_folder import unlabeled
from utils.images.sources import find_images, find_to_evaluate
from utils.run.failures import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning"),
]


def levels(seed, size=(32, 32)):
    """Gray values from 0 to 255, uint8 [height, width]; all of them occur."""
    values = np.random.default_rng(seed).permutation(np.arange(size[0] * size[1]) % 256)
    return values.reshape(size[1], size[0]).astype(np.uint8)


def png_16(values):
    """A PNG with 16 bits per value, which Pillow writes only in gray; values [h, w, channels]."""
    height, width, channels = values.shape
    color = {2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, color, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return pixels.PNG + b"".join(chunk(name, body) for name, body in chunks)


def chunk(name, body, damaged=False):
    checksum = zlib.crc32(name + body) ^ damaged
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", checksum)


def png(values):
    return encode(Image.fromarray(values))


def tiff(values, **tags):
    return encode(Image.fromarray(values), "TIFF", **tags)


def deep(values, factor=16):
    """Levels as 16-bit values."""
    return values.astype(np.uint16) * factor


SMALL_FLOATS = [0, pytest.approx(0.1)]
DECLARED = dict(tiffinfo={280: 0, 281: 3000})
# How gray levels from 0 to 255 are stored -> the scaling that is found, and the white that is left
# of it where the brightest level is not white.
STORED = {
    "16 bits": (lambda v: png(deep(v, 257)), [0, 65535], 1),
    "12 bits": (lambda v: png(deep(v)), [0, 4095], 4080 / 4095),
    "8 bits in 16": (lambda v: png(deep(v, 1)), [0, 255], 1),
    "int32": (lambda v: tiff(v.astype(np.int32) * 400), [0, 131071], 102_000 / 131_071),
    "signed": (lambda v: tiff(v.astype(np.int32) * 16 - 1024), [-1024, 3056], 1),
    "with an offset": (lambda v: png(deep(v, 1) + 29_000), [29_000, 29_255], 1),
    "declared": (lambda v: tiff(deep(v, 4), **DECLARED), [0, 3000], 1020 / 3000),
    "floats to 1": (lambda v: tiff(v / np.float32(255)), [0, 1], 1),
    "floats from -1": (lambda v: tiff(v / np.float32(127.5) - 1), [-1, 1], 1),
    "floats to 255": (lambda v: tiff(v.astype(np.float32)), [0, 255], 1),
    "small floats": (lambda v: tiff(v / np.float32(2550)), SMALL_FLOATS, 1),
    "color, 12 bits": (lambda v: png_16(deep(np.dstack([v] * 3))), [0, 4095], 4080 / 4095),
    "gray and alpha": (
        lambda v: png_16(np.dstack([deep(v), np.full(v.shape, 65535)])), [0, 4095], 4080 / 4095
    ),
    "color and alpha": (
        lambda v: png_16(np.dstack([deep(np.dstack([v] * 3)), np.full(v.shape, 65535)])),
        [0, 4095], 4080 / 4095,
    ),
}  # fmt: skip


def two_classes(root, store, count=4):
    """Writes images of two classes; `store(i)` is the file of the i-th."""
    for label in ("cat", "dog"):
        (root / label).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            (root / label / f"{i}.png").write_bytes(store(i))
    return str(root)


@pytest.mark.parametrize("kind", STORED)
def test_values_of_any_depth_are_scaled_alike(kind, tmp_path):
    """A dark image stays darker than the others: the scaling is that of the data set."""
    store, expected, white = STORED[kind]
    dark = levels(9) // 8
    dark[0, 0] = 0
    name = two_classes(tmp_path, lambda i: store(levels(i)))
    (tmp_path / "dog" / "dark.png").write_bytes(store(dark))
    data = find_images(name, val_fraction=0.3)
    ((found),) = data.scaling.values()
    assert found == expected and any("black" in line for line in data.details)
    arrays, seen = load_arrays(name, val_fraction=0.3, cache_dir=tmp_path / "c"), 0
    for split, images in data.splits.items():
        for index in range(len(images)):
            original = dark if "dark" in images.name(index) else levels(int(images.name(index)[-5]))
            wanted, decoded = (
                torch.from_numpy(original * white).round(),
                images.open(index).pixels(),
            )
            assert (decoded.float() - wanted).abs().max() <= 1
            assert torch.equal(decoded, arrays.splits[split].images[index])
            seen += 1
    assert seen == 9 and arrays.scaling == data.scaling


def test_a_broken_pixel_or_a_wrong_tag_does_not_decide(tmp_path):
    def store(i):
        values = deep(levels(i, (64, 64)))
        values[0, 0] = 65535 if i == 0 else values[0, 0]
        return tiff(values, tiffinfo={281: 65535})

    name = two_classes(tmp_path, store)
    assert find_images(name, val_fraction=0.3).scaling == {"integer": [0, 4095]}


def test_a_model_sees_other_images_as_those_of_its_training(tmp_path):
    train, new = (
        two_classes(tmp_path / folder, lambda i, white=white: png(deep(levels(i), white)))
        for folder, white in (("train", 16), ("new", 2))
    )
    trained = find_images(train, val_fraction=0.3)
    assert trained.scaling == {"integer": [0, 4095]}
    assert find_images(new, val_fraction=0.3).scaling == {"integer": [0, 511]}
    names, scaling = trained.class_names, trained.scaling
    evaluated = find_to_evaluate(new, names, scaling=scaling)
    assert "as in training" in " ".join(evaluated.details)
    arrays = load_arrays(new, class_names=names, scaling=scaling, cache_dir=tmp_path / "c")
    images, said = unlabeled(new, scaling)
    assert len(images) == 8 and "as in training" in said[0]
    shown = [evaluated.splits["all"].open(2).pixels(), images.open(2).pixels()]
    for image in (*shown, arrays.splits["all"].images[2]):
        assert image.max() == round(510 * 255 / 4095)
    # Another scaling is another cache; a model of images with 8 bits has none.
    own = load_arrays(new, val_fraction=0.3, cache_dir=tmp_path / "c")
    assert own.splits["train"].images.max() == 255
    assert unlabeled(new)[0].open(2).pixels().max() == 255


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


def test_a_tiff_of_which_pillow_reads_half_the_bits_is_refused_where_that_matters(tmp_path):
    for brightest in (256, 16):
        name = two_classes(
            tmp_path, lambda i, white=brightest: tiff_16(deep(np.dstack([levels(i)] * 3), white)), 3
        )
        if brightest == 256:
            data = find_images(name, val_fraction=0.3)
            assert data.splits["train"].open(0).pixels()[0].max() == 255
        else:
            with pytest.raises(UserError, match="Pillow reads the upper 8 bits"):
                find_images(name)


def test_what_is_transparent_in_deep_images_is_white():
    values = np.zeros((2, 3, 4), dtype=np.uint16)
    values[0, 0] = [65535, 0, 0, 65535]
    decoded = Encoded(png_16(values), {"integer": [0, 65535]}).pixels()
    assert decoded[:, 0, 0].tolist() == [255, 0, 0] and (decoded[:, 1] == 255).all()


# ----------------------------------------------------------------------------------------- damaged

GOOD = png(levels(0))
EXIF = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x01\0\0\0\0\0\0\0"


BLOCKS = [
    chunk(b"eXIf", EXIF, damaged=True),
    chunk(b"eXIf", b"no EXIF at all"),
    chunk(b"eXIf", EXIF[:12]),
    chunk(b"eXIf", b""),
    chunk(b"tEXt", b"Author\0somebody", damaged=True),
    chunk(b"tIME", b"\0\0", damaged=True),
]


@pytest.mark.parametrize("block", BLOCKS)
def test_damaged_metadata_hides_no_image(block):
    """Before the pixels or behind them."""
    for at in (33, len(GOOD) - 12):
        shown = Encoded(GOOD[:at] + block + GOOD[at:]).pixels()
        assert shown[0].tolist() == levels(0).tolist()


def test_damaged_pixels_are_still_noticed():
    at = GOOD.index(b"IDAT") + 30
    with pytest.raises(BadImage):
        Encoded(GOOD[:at] + b"\xff" + GOOD[at + 1 :]).pixels()
