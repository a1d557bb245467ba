"""To be merged into the tests of its modules."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from utils.data import loaders
from utils.data.arrays import synthetic_arrays
from utils.data.augment import augment, normalize, random_uint32
from utils.run.arguments import Parser, number
from utils.run.failures import UserError


@pytest.fixture(scope="module")
def data():
    return synthetic_arrays(0).splits


def test_augmentation_depends_on_the_sample_not_on_its_batch(data):
    images, ids = data["train"].images[:64], torch.arange(64)
    whole, keep = augment(images, ids, epoch=3, seed=1, padding=2, cutout=8)
    order = torch.randperm(64)
    shuffled, shuffled_keep = augment(
        images[order], ids[order], epoch=3, seed=1, padding=2, cutout=8
    )
    assert torch.equal(whole[order], shuffled) and torch.equal(keep[order], shuffled_keep)
    other_epoch, _ = augment(images, ids, epoch=4, seed=1, padding=2, cutout=8)
    assert not torch.equal(whole, other_epoch)


def test_augmentation_is_a_crop_with_reflected_border_and_random_mirroring(data):
    images = data["train"].images[:200]
    shifted, _ = augment(images, torch.arange(200), epoch=0, seed=0, padding=2)
    padded = torch.nn.functional.pad(images.float(), (2, 2, 2, 2), mode="reflect").to(torch.uint8)
    seen = set()
    for image, source in zip(shifted, padded, strict=True):
        places = [
            (y, x, mirrored)
            for y in range(5)
            for x in range(5)
            for mirrored in (False, True)
            if torch.equal(image.flip(-1) if mirrored else image, source[:, y : y + 32, x : x + 32])
        ]
        assert places
        seen.add(places[0])
    assert len(seen) > 40  # of 50 possible ones


def test_mirroring_alternates_between_epochs(data):
    images, ids = data["train"].images[:100], torch.arange(100)
    first, second = (augment(images, ids, epoch, seed=0, padding=0)[0] for epoch in (0, 1))
    assert torch.equal(first, second.flip(-1)) and 25 < sum(map(torch.equal, first, images)) < 75


def test_cutout_masks_a_square():
    images = torch.full((300, 3, 32, 32), 200, dtype=torch.uint8)
    shifted, keep = augment(images, torch.arange(300), epoch=0, seed=0, padding=0, cutout=8)
    blanked = (keep == 0).sum((1, 2, 3))
    # Complete squares in the interior, partial ones at the border.
    assert blanked.max() == 64 and blanked.min() >= 16
    mean, std = torch.tensor([100.0] * 3), torch.tensor([50.0] * 3)
    normal = normalize(shifted, mean, std, keep)
    assert normal.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(normal, 2 * keep.expand(-1, 3, -1, -1))


def test_random_numbers_are_uniform_and_independent():
    draws = (
        torch.stack(
            [random_uint32(7, 1, torch.arange(100_000), stream) for stream in range(3)]
        ).double()
        / 2**32
    )
    assert (
        draws.mean(1).sub(0.5).abs().max() < 0.005 and draws.var(1).sub(1 / 12).abs().max() < 0.002
    )
    assert torch.corrcoef(draws).fill_diagonal_(0).abs().max() < 0.015
    assert torch.corrcoef(torch.stack([draws[0][1:], draws[0][:-1]]))[0, 1].abs() < 0.015


def test_synthetic_data_is_quick_repeatable_and_disjoint(data):
    again = synthetic_arrays(0).splits
    assert torch.equal(again["train"].images, data["train"].images)
    assert torch.equal(again["test"].labels, data["test"].labels)
    assert not torch.equal(synthetic_arrays(1).splits["train"].images, data["train"].images)
    train = {image.numpy().tobytes() for image in data["train"].images}
    assert not any(image.numpy().tobytes() in train for image in data["test"].images)


@pytest.mark.slow
def test_a_linear_model_cannot_learn_the_synthetic_data(data):
    """Ridge regression on all pixels stays far below the 95 % of the default model."""

    def pixels(split):
        pixels = split.images.flatten(1).double() / 255
        return torch.cat([pixels, torch.ones(len(split), 1)], 1)

    x = pixels(data["train"])
    y = torch.nn.functional.one_hot(data["train"].labels).double()
    weights = torch.linalg.solve(x.T @ x + 10 * torch.eye(x.shape[1]), x.T @ y)
    predictions = (pixels(data["test"]) @ weights).argmax(1)
    assert (predictions == data["test"].labels).double().mean() < 0.7


@pytest.mark.parametrize(
    ("samples", "processes", "batch"),
    [
        (10_000, 1, 250),
        (10_000, 4, 1000),
        (10_000, 3, 717),
        (101, 4, 104),
        (251, 1, 126),
        (1, 8, 8),
    ],
)
def test_an_evaluation_has_even_batches(samples, processes, batch):
    """Accelerate repeats samples to fill up the last batch: with four processes, 101 images become
    104 instead of 1000.
    """
    assert (
        loaders.evaluation_batch_size(SimpleNamespace(num_processes=processes), samples, 250)
        == batch
    )


def test_numbers_are_checked():
    parser = Parser()
    parser.add_argument("--n", type=number(int, 1))
    for bad in ("0", "-3", "1.5", "x", ""):
        with pytest.raises(UserError, match="--n"):
            parser.parse_args(["--n", bad])
    with pytest.raises(argparse.ArgumentTypeError):
        number(float, 0, above=True)("0")
    assert number(float, 0)("1e-3") == 0.001
    assert number(float, 0, most=1)("1") == 1 and number(float, 0, below=1)("0.99") == 0.99
    for bounds in (dict(most=0.9), dict(below=1)):
        with pytest.raises(argparse.ArgumentTypeError, match="at least 0 and"):
            number(float, 0, **bounds)("1")
