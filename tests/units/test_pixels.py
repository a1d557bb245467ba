"""One decoder for all scripts: values of any depth, scaled alike in a whole data set."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from utils.data import pixels, transforms
from utils.data.arrays import load_arrays
from utils.data.image_folder import unlabeled
from utils.data.images import ORIENTATION, BadImage, Encoded
from utils.data.sources import find_images, find_to_evaluate
from utils.data.transforms import EvalTransform, TrainTransform
from utils.run.failures import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning"),
]
PREPROCESS = dict(resize=36, crop=32, interpolation="bilinear", mean=[0.5] * 3, std=[0.25] * 3)


def levels(seed, size=(32, 32)):
    """Gray values from 0 to 255, uint8 [height, width]; all of them occur."""
    values = np.random.default_rng(seed).permutation(np.arange(size[0] * size[1]) % 256)
    return values.reshape(size[1], size[0]).astype(np.uint8)


def encode(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


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


# How gray levels from 0 to 255 are stored -> the scaling that is found.
STORED = {
    "16 bits": (lambda v: encode(Image.fromarray(v.astype(np.uint16) * 257)), [0, 65535]),
    "12 bits": (lambda v: encode(Image.fromarray(v.astype(np.uint16) * 16)), [0, 4095]),
    "8 bits in 16": (lambda v: encode(Image.fromarray(v.astype(np.uint16))), [0, 255]),
    "int32": (lambda v: encode(Image.fromarray(v.astype(np.int32) * 400), "TIFF"), [0, 131071]),
    "signed": (
        lambda v: encode(Image.fromarray(v.astype(np.int32) * 16 - 1024), "TIFF"),
        [-1024, 3056],
    ),
    "with an offset": (
        lambda v: encode(Image.fromarray(v.astype(np.uint16) + 29_000)),
        [29_000, 29_255],
    ),
    "declared": (
        lambda v: encode(
            Image.fromarray(v.astype(np.uint16) * 4), "TIFF", tiffinfo={280: 0, 281: 3000}
        ),
        [0, 3000],
    ),
    "floats to 1": (lambda v: encode(Image.fromarray(v / np.float32(255)), "TIFF"), [0, 1]),
    "floats from -1": (
        lambda v: encode(Image.fromarray(v / np.float32(127.5) - 1), "TIFF"),
        [-1, 1],
    ),
    "floats to 255": (lambda v: encode(Image.fromarray(v.astype(np.float32)), "TIFF"), [0, 255]),
    "small floats": (
        lambda v: encode(Image.fromarray(v / np.float32(2550)), "TIFF"),
        [0, pytest.approx(0.1)],
    ),
    "color, 12 bits": (
        lambda v: png_16(np.stack([v, v, v], 2).astype(np.uint16) * 16),
        [0, 4095],
    ),
    "gray and alpha": (
        lambda v: png_16(np.dstack([v.astype(np.uint16) * 16, np.full(v.shape, 65535)])),
        [0, 4095],
    ),
}


@pytest.mark.parametrize("kind", STORED)
def test_values_of_any_depth_are_scaled_alike(kind, tmp_path):
    """A dark image stays darker than the others: the scaling is that of the data set."""
    store, expected = STORED[kind]
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for i in range(4):
            (tmp_path / label / f"{i}.png").write_bytes(store(levels(i)))
    dark = levels(9) // 8
    dark[0, 0] = 0
    (tmp_path / "dog" / "dark.png").write_bytes(store(dark))
    data = find_images(str(tmp_path), val_fraction=0.3)
    ((found),) = data.scaling.values()
    assert found == expected and any("black" in line for line in data.details)
    black, white = found
    span = {"int32": 102_000, "declared": 1020}.get(kind, white - black) / (white - black)
    span = {"12 bits": 4080 / 4095}.get(kind.removeprefix("color, "), span)
    span = 4080 / 4095 if kind == "gray and alpha" else span

    arrays, seen = load_arrays(str(tmp_path), val_fraction=0.3, cache_dir=tmp_path / "c"), 0
    for split, images in data.splits.items():
        for index in range(len(images)):
            original = dark if "dark" in images.name(index) else levels(int(images.name(index)[-5]))
            wanted = torch.from_numpy(original * span).round()
            decoded = images.open(index).pixels()
            assert (decoded.float() - wanted).abs().max() <= 1
            assert torch.equal(decoded, arrays.splits[split].images[index])
            seen += 1
    assert seen == 9 and arrays.scaling == data.scaling


def test_a_broken_pixel_or_a_wrong_tag_does_not_decide(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for i in range(4):
            values = levels(i, (64, 64)).astype(np.uint16) * 16
            values[0, 0] = 65535 if i == 0 else values[0, 0]
            Image.fromarray(values).save(tmp_path / label / f"{i}.tif", tiffinfo={281: 65535})
    assert find_images(str(tmp_path), val_fraction=0.3).scaling == {"integer": [0, 4095]}


def test_a_model_sees_other_images_as_those_of_its_training(tmp_path):
    for name, brightest in (("train", 16), ("new", 2)):
        for label in ("cat", "dog"):
            (tmp_path / name / label).mkdir(parents=True)
            for i in range(4):
                image = Image.fromarray(levels(i).astype(np.uint16) * brightest)
                image.save(tmp_path / name / label / f"{i}.png")
    new = str(tmp_path / "new")
    trained = find_images(str(tmp_path / "train"), val_fraction=0.3)
    assert trained.scaling == {"integer": [0, 4095]}
    assert find_images(new, val_fraction=0.3).scaling == {"integer": [0, 511]}
    names, scaling = trained.class_names, trained.scaling
    evaluated = find_to_evaluate(new, names, scaling=scaling)
    assert "as in training" in " ".join(evaluated.details)
    arrays = load_arrays(new, class_names=names, scaling=scaling, cache_dir=tmp_path / "c")
    images, _ = unlabeled(new, scaling)
    for shown in (
        evaluated.splits["all"].open(2).pixels(),
        images.open(2).pixels(),
        arrays.splits["all"].images[2],
    ):
        assert shown.max() == round(510 * 255 / 4095)
    # Another scaling is another cache.
    own = load_arrays(new, val_fraction=0.3, cache_dir=tmp_path / "c")
    assert own.splits["train"].images.max() == 255


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
        for label in ("cat", "dog"):
            (tmp_path / label).mkdir(exist_ok=True)
            for i in range(3):
                values = np.stack([levels(i)] * 3, 2).astype(np.uint16) * brightest
                (tmp_path / label / f"{i}.tif").write_bytes(tiff_16(values))
        if brightest == 256:
            data = find_images(str(tmp_path), val_fraction=0.3)
            assert data.splits["train"].open(0).pixels()[0].max() == 255
        else:
            with pytest.raises(UserError, match="Pillow reads the upper 8 bits"):
                find_images(str(tmp_path))


def test_values_that_are_no_numbers_are_black():
    values = np.full((8, 8), np.nan, dtype=np.float32)
    values[0] = [0, 0.5, 1, 2, -1, np.inf, -np.inf, np.nan]
    data = encode(Image.fromarray(values), "TIFF")
    nothing = Image.fromarray(np.full((8, 8), np.nan, dtype=np.float32))
    assert pixels.find_scaling("photos", [(nothing, b"")]) == ({}, [])
    decoded = Encoded(data, {"float": [0, 1]}).pixels()
    assert decoded[0, 0].tolist() == [0, 128, 255, 255, 0, 255, 0, 0] and not decoded[:, 1:].any()


def test_deep_images_are_turned_upright_and_transparency_is_white():
    values = np.zeros((2, 3, 4), dtype=np.uint16)
    values[0, 0] = [65535, 0, 0, 65535]
    decoded = Encoded(png_16(values), {"integer": [0, 65535]}).pixels()
    assert decoded[:, 0, 0].tolist() == [255, 0, 0] and (decoded[:, 1] == 255).all()
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    gray = Image.fromarray(np.array([[65535, 0, 0], [0, 0, 0]], dtype=np.uint16))
    for opened in (Encoded(encode(gray, exif=exif)), Encoded(encode(gray, "TIFF", exif=exif))):
        assert (opened.width, opened.height) == (2, 3)
        assert opened.pixels()[0].tolist() == [[0, 255], [0, 0], [0, 0]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation(orientation):
    image = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3) * 40)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encode(image, exif=exif)
    opened = Encoded(data)
    expected = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert opened.pixels()[0].tolist() == expected.tolist()
    assert (opened.height, opened.width) == expected.shape


# ----------------------------------------------------------------------------------------- damaged

GOOD = encode(Image.fromarray(levels(0)))
EXIF = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x01\0\0\0\0\0\0\0"


@pytest.mark.parametrize(
    "block",
    [
        chunk(b"eXIf", EXIF, damaged=True),
        chunk(b"eXIf", b"no EXIF at all"),
        chunk(b"eXIf", EXIF[:12]),
        chunk(b"eXIf", b""),
        chunk(b"tEXt", b"Author\0somebody", damaged=True),
        chunk(b"tIME", b"\0\0", damaged=True),
    ],
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_damaged_metadata_hides_no_image(block, place):
    at = 33 if place == "before" else len(GOOD) - 12
    shown = Encoded(GOOD[:at] + block + GOOD[at:]).pixels()
    assert shown[0].tolist() == levels(0).tolist()


def test_damaged_exif_in_a_jpeg_hides_no_image():
    image = Image.fromarray(levels(0))
    damaged = encode(image, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xffgarbage")
    assert torch.equal(Encoded(damaged).pixels(), Encoded(encode(image, "JPEG")).pixels())


def test_damaged_pixels_are_still_noticed():
    at = GOOD.index(b"IDAT") + 30
    with pytest.raises(BadImage):
        Encoded(GOOD[:at] + b"\xff" + GOOD[at + 1 :]).pixels()


def test_no_program_is_started_for_an_image():
    """Pillow would start Ghostscript."""
    drawing = encode(Image.new("RGB", (8, 8)), "EPS")
    with pytest.raises(BadImage, match="not an image"):
        Encoded(drawing)


# ------------------------------------------------------------------------------------- other sizes


@pytest.mark.parametrize("size", [(2000, 1), (1, 2000), (3, 900)])
def test_a_very_long_image_costs_no_memory(size):
    opened = Encoded(encode(Image.new("RGB", size, (200, 100, 50))))
    preprocess = PREPROCESS | dict(resize=256, crop=224)
    train = TrainTransform(0, 224, preprocess)
    for transform in (EvalTransform(preprocess), lambda image: train(image, 0, 0)):
        tracemalloc.start()
        result = transform(opened)
        assert result.shape == (3, 224, 224)
        assert torch.equal(result[:, 112, 112], torch.tensor([200, 100, 50], dtype=torch.uint8))
        tracemalloc.stop()
    scaled = transforms.shrink(opened, 256)
    assert scaled.numel() <= 3 * 256 * 256 * transforms.LONGEST


def test_of_a_long_image_the_center_is_seen_and_usual_ones_are_scaled_whole():
    long = np.zeros((4, 400, 3), dtype=np.uint8)
    long[:, 198:202] = 255  # the central square
    seen = EvalTransform(PREPROCESS | dict(resize=32))(Encoded(encode(Image.fromarray(long))))
    assert seen.float().mean() > 220 and (transforms.shrink(Encoded(GOOD), 16).shape == (3, 16, 16))
    image = Encoded(encode(Image.fromarray(levels(0, (640, 20)))))  # 32 times as long as high
    assert transforms.shrink(image, 10).shape == (3, 10, 320)


def test_images_of_other_sizes_become_32_pixels(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(levels(i, (64, 48))).save(tmp_path / "data" / label / f"{i}.png")
    folder = str(tmp_path / "data")
    data = load_arrays(folder, val_fraction=0.4, cache_dir=tmp_path / "c")
    images = find_images(folder, val_fraction=0.4).splits["train"]
    transform = EvalTransform(dict(resize=32, crop=32, interpolation="bilinear"))
    for index in range(len(images)):
        assert torch.equal(data.splits["train"].images[index], transform(images.open(index)))
    again = load_arrays(folder, val_fraction=0.4, cache_dir=tmp_path / "c")
    assert data.details == again.details and "images of other sizes" in data.details[-1]
