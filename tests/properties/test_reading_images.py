"""Any small image comes back as Pillow reads it, from its file and from memory."""

import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.data import encoded, noise
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from utils.images.arrays import in_memory
from utils.images.decoding import ORIENTATION, Encoded
from utils.images.sources import described, find_splits
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


DATA = st.lists(st.tuples(st.integers(6, 40), st.integers(6, 40)), min_size=1, max_size=5)


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
            found = described(*find_splits(str(Path(folder) / name)))
            split = in_memory(found).splits["train"]
            assert len(split) == 2 * len(sizes)
            for index in range(len(split)):
                image, label = expected[split.name(index)]
                assert split.labels[index] == label and torch.equal(split.images[index], image)
