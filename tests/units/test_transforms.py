"""What happens to an image before a model sees it."""

import numpy as np
import pytest
import torch
from harness.data import encoded, noise
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from utils.images import transforms
from utils.images.decoding import BadImage, Encoded
from utils.images.transforms import EvalTransform, TrainTransform

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
PREPROCESS = dict(resize=36, crop=32, interpolation="bilinear", mean=[0.2, 0.4, 0.6])


def smooth(size):
    return noise(0, (4, 3)).resize(size, Image.BICUBIC)


@given(*[st.integers(1, 500)] * 2, *[st.integers(1, 60)] * 2)
def test_an_image_is_decoded_as_small_as_is_enough(width, height, wanted_width, wanted_height):
    found = transforms.reduction_for(width, height, wanted_width, wanted_height)
    enough = [r for r in (2, 4, 8) if width >= r * wanted_width and height >= r * wanted_height]
    assert found == max(enough, default=1)


def test_a_jpeg_that_is_decoded_smaller_shows_the_same(monkeypatch):
    data = encoded(smooth((800, 600)), "JPEG", quality=95)
    assert Encoded(data).pixels(8).shape == (3, 75, 100)
    evaluation = EvalTransform(PREPROCESS)
    training = TrainTransform(0, PREPROCESS, min_scale=0.3)
    small = [evaluation(Encoded(data)), *(training(Encoded(data), 0, i) for i in range(5))]
    monkeypatch.setattr(transforms, "REDUCTIONS", ())
    full = [evaluation(Encoded(data)), *(training(Encoded(data), 0, i) for i in range(5))]
    for a, b in zip(small, full, strict=True):
        assert (a.float() - b.float()).abs().mean() < 6
    assert (small[0].float() - full[0].float()).abs().mean() < 1.5


@pytest.mark.parametrize(("size", "allowed"), [((1, 32), True), ((33, 1), False)])
def test_a_very_long_image_is_refused_before_it_is_scaled(size, allowed):
    """Except in training, which takes a part of it."""
    opened = Encoded(encoded(Image.new("RGB", size, (200, 100, 50))))
    preprocess = PREPROCESS | dict(resize=256, crop=224)
    assert TrainTransform(0, preprocess)(opened, 0, 0).shape == (3, 224, 224)
    if allowed:
        assert EvalTransform(preprocess)(opened)[:, 112, 112].tolist() == [200, 100, 50]
        return
    with pytest.raises(BadImage, match="it is 33 x 1 pixels, too long: cut it"):
        EvalTransform(preprocess)(opened)


def test_each_option_of_training_does_what_it_says():
    """Without any, it is a random part of the image, scaled."""
    gradient = np.zeros((40, 60, 3), dtype=np.uint8)
    gradient[..., 0], gradient[..., 1] = np.arange(60) * 4, np.arange(40)[:, None] * 6
    gradient[..., 2] = 200
    opened = Encoded(encoded(Image.fromarray(gradient)))

    def images(count=40, preprocess=PREPROCESS, **options):
        transform = TrainTransform(3, preprocess | {"crop": 16}, **{"flip": 0.0} | options)
        return torch.stack([transform(opened, 1, i) for i in range(count)])

    plain, mirrored = images(), images(flip=1.0)
    assert torch.equal(mirrored, plain.flip(-1))
    assert (plain[:, 0, 5, 15] > plain[:, 0, 5, 0]).all()
    assert (plain[:, 1, 15, 5] > plain[:, 1, 0, 5]).all() and (plain[:, 2] == 200).all()
    assert 5 < sum(map(torch.equal, images(flip=0.5), plain)) < 35
    # A larger part has a larger range of colors.
    whole = images(min_scale=1.0)
    assert (whole[:, 1].amax((1, 2)).int() - whole[:, 1].amin((1, 2))).min() > 150
    assert (plain[:, 1].amax((1, 2)).int() - plain[:, 1].amin((1, 2))).min() < 110
    # What is erased gets the mean color.
    erased = (images(random_erasing=1.0) == torch.tensor([51, 102, 153]).view(3, 1, 1)).all(1)
    assert (erased.sum((1, 2)) > 2).all() and not erased.all((1, 2)).any()
    half = (images(random_erasing=0.5) != plain).flatten(1).any(1).sum()
    assert 8 < half < 32
    trivial, rand = images(auto_augment="trivial"), images(auto_augment="rand")
    assert trivial.shape == rand.shape == plain.shape and not torch.equal(trivial, rand)
    assert (trivial != plain).flatten(1).any(1).sum() > 20
    sharper = images(preprocess=PREPROCESS | {"interpolation": "bicubic"})
    assert not torch.equal(sharper, plain) and (sharper.int() - plain).abs().max() < 40
