"""Any small image comes back as Pillow reads it, from its file, a cache, and in any order."""

import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.data import encoded, noise
from harness.fakes import accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from utils.images import image_cache
from utils.images.arrays import load_arrays_to_evaluate
from utils.images.decoding import ORIENTATION, Encoded, Images, Rows
from utils.images.transforms import EvalTransform

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
FORMATS = {
    "RGB": ["PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM", "TGA"],
    "L": ["PNG", "JPEG", "BMP", "TIFF", "PPM"],
    "P": ["PNG", "GIF", "BMP", "TIFF"],
    "1": ["PNG", "BMP", "TIFF"],
    "LA": ["PNG"],
    "RGBA": ["PNG", "WEBP", "TIFF"],
    "CMYK": ["JPEG"],
}
KINDS = st.sampled_from([(mode, kind) for mode, kinds in FORMATS.items() for kind in kinds])
SIZES = st.tuples(st.integers(1, 20), st.integers(1, 20))


@pytest.mark.parametrize("orientation", range(10))
@given(KINDS, SIZES, st.booleans(), st.integers(0, 99))
def test_any_image_comes_back_as_pillow_reads_it(orientation, of_kind, size, progressive, seed):
    """Upright (an orientation that is not from 1 to 8 is none), with white where it is transparent."""
    mode, kind = of_kind
    image = noise(seed, size).convert(mode if mode != "LA" else "L").convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(noise(seed + 1, size).convert("L"))
    options = {"progressive": progressive} if kind == "JPEG" else {}
    if kind in ("PNG", "JPEG", "WEBP", "TIFF"):
        options["exif"] = Image.Exif()
        options["exif"][ORIENTATION] = orientation
    data = encoded(image, kind, **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if mode in ("LA", "RGBA"):
        white = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(white, upright.convert("RGBA"))
    expected = np.asarray(upright.convert("RGB"))
    opened = Encoded(data)
    assert (opened.height, opened.width) == expected.shape[:2]
    pixels = opened.pixels()
    assert pixels.dtype == torch.uint8
    assert pixels.permute(1, 2, 0).tolist() == expected.tolist()


PREPROCESS = st.fixed_dictionaries(
    {
        "resize": st.integers(8, 16),
        "crop": st.just(8),
        "interpolation": st.sampled_from(["bilinear", "bicubic"]),
    }
)
DATA = st.lists(st.tuples(st.integers(6, 40), st.integers(6, 40)), min_size=1, max_size=5)


def split_of(sizes, version, broken=()):
    data = [encoded(noise(i + len(version), size)) for i, size in enumerate(sizes)]
    data = [b"no image" if i in broken else value for i, value in enumerate(data)]
    rows = np.arange(len(data))[::-1].copy()
    return Images(Rows(data, f"table {version}", version), rows, 7 + np.arange(len(data)))


@settings(max_examples=25)
@given(DATA, st.lists(PREPROCESS, min_size=2, max_size=3), st.data())
def test_a_cache_changes_nothing(sizes, settings_of_runs, data):
    """Whatever else is in its folder: images of other sizes, ways to scale, versions of a table."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", folder)
        for preprocess in (*settings_of_runs, settings_of_runs[0]):
            for version in ("1", "two"):
                images, transform = split_of(sizes, version), EvalTransform(preprocess)
                side, how = preprocess["resize"], preprocess["interpolation"]
                cached = image_cache.cache_images(accelerator(), images, "val", side, how)
                order = data.draw(st.permutations(range(len(images))))
                chosen = np.array(order[: data.draw(st.integers(1, len(order)))])
                for part, source in (
                    (cached, images),
                    (cached.select(chosen), images.select(chosen)),
                ):
                    assert part.labels.tolist() == source.labels.tolist()
                    for index in range(len(source)):
                        assert part.name(index) == source.name(index)
                        image = part.open(index)
                        assert min(image.height, image.width) == side
                        assert torch.equal(transform(image), transform(source.open(index)))


@settings(max_examples=10)
@given(DATA)
def test_images_in_memory_are_those_of_files(sizes):
    """Several folders of images share the folder with what is decoded."""
    transform = EvalTransform(dict(resize=32, crop=32, interpolation="bilinear"))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", f"{folder}/cache")
        expected, names = {}, ["one", "two"]
        for place, name in enumerate(names):
            for label, class_name in enumerate(("cat", "dog")):
                (Path(folder) / name / class_name).mkdir(parents=True)
                for i, size in enumerate(sizes):
                    path = Path(folder) / name / class_name / f"{i}.png"
                    path.write_bytes(encoded(noise(100 * place + 10 * label + i, size)))
                    expected[str(path)] = (transform(Encoded(path.read_bytes())), label)
        for name in [*names, *names]:
            loaded = load_arrays_to_evaluate(str(Path(folder) / name), ["cat", "dog"])
            split = loaded.splits["all"]
            assert len(split) == 2 * len(sizes)
            for index in range(len(split)):
                image, label = expected[split.name(index)]
                assert split.labels[index] == label and torch.equal(split.images[index], image)
