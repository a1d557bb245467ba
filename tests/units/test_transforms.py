"""What happens to an image before a model sees it."""

import numpy as np
import pytest
import torch
from harness.data import encoded, make_photos, noise
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from utils.images import transforms
from utils.images.decoding import BadImage, Encoded
from utils.images.sources import find_images
from utils.images.transforms import EvalTransform, ImageBatches, TrainTransform
from utils.run.failures import UserError

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
PREPROCESS = dict(resize=36, crop=32, interpolation="bilinear")


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


def test_a_very_long_image_is_refused_before_it_is_scaled():
    """Except in training, which takes a part of it."""
    preprocess, sizes = PREPROCESS | dict(resize=256, crop=224), [(1, 32), (33, 1)]
    allowed, longer = (Encoded(encoded(Image.new("RGB", size, (200, 100, 50)))) for size in sizes)
    assert EvalTransform(preprocess)(allowed)[:, 112, 112].tolist() == [200, 100, 50]
    assert TrainTransform(0, preprocess)(longer, 0, 0).shape == (3, 224, 224)
    with pytest.raises(BadImage, match="it is 33 x 1 pixels, too long: cut it"):
        EvalTransform(preprocess)(longer)


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
    trivial, rand = images(auto_augment="trivial"), images(auto_augment="rand")
    assert trivial.shape == rand.shape == plain.shape and not torch.equal(trivial, rand)
    assert (trivial != plain).flatten(1).any(1).sum() > 20
    sharper = images(preprocess=PREPROCESS | {"interpolation": "bicubic"})
    assert not torch.equal(sharper, plain) and (sharper.int() - plain).abs().max() < 40


# ----------------------------------------------------------------------------------------- batches


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    return find_images(str(make_photos(tmp_path_factory.mktemp("photos")))).splits["train"]


def change(seed=0):
    return TrainTransform(seed, PREPROCESS, auto_augment="trivial")


def test_an_image_depends_on_seed_epoch_and_id_only(train):
    batches, keys = ImageBatches(train, change()), [(2, i) for i in range(24)]
    torch.manual_seed(1)
    together = batches.__getitems__(keys)["images"]
    drawn = torch.rand(3)
    torch.manual_seed(9)
    for i in (23, 4, 11):
        assert torch.equal(batches.__getitems__([(2, i)])["images"][0], together[i])
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))  # nor does it change the numbers that others draw
    other_epoch = batches.__getitems__([(3, i) for i in range(24)])["images"]
    other_seed = ImageBatches(train, change(seed=1)).__getitems__(keys)["images"]
    for images in (other_epoch, other_seed):
        assert sum(torch.equal(a, b) for a, b in zip(images, together, strict=True)) == 0
    same_image = train.select(np.zeros(24, dtype=np.int64))
    alike = ImageBatches(same_image, change()).__getitems__(keys)["images"]
    assert not torch.equal(alike[0], alike[1])


def test_a_bad_image_stops_or_is_replaced_by_the_next(tmp_path, capsys):
    folder = make_photos(tmp_path, 4)
    for name in ("train/cat/1.jpg", "train/cat/2.jpg", "val/yak/3.jpg"):
        (folder / name).write_bytes(b"no image")
    data = find_images(str(folder)).splits
    says = r"cannot read .*train/cat/1.jpg: it is not an image; .* --on_bad_image skip"
    with pytest.raises(UserError, match=says):
        ImageBatches(data["train"], change()).__getitems__([(0, 1)])
    skipping = ImageBatches(data["train"], change(), "skip", replace=True)
    batch = skipping.__getitems__([(0, 1), (0, 3), (0, 1)])
    assert batch["labels"].tolist() == [0, 0, 0] and batch["ids"].tolist() == [1, 3, 1]
    assert torch.equal(batch["images"][0], batch["images"][1])
    assert capsys.readouterr().err.count("warning: left out: cannot read") == 2
    # In an evaluation it does not count.
    batch = ImageBatches(data["val"], EvalTransform(PREPROCESS), "skip").__getitems__([10, 11])
    assert batch["labels"].tolist() == [2, -1]
    assert not batch["images"][1].any()
