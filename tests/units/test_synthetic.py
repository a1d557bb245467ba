"""Synthetic images: the same for a seed, all different, and not for a linear model."""

import pytest
import torch

from utils.images.arrays import synthetic_arrays


@pytest.fixture(scope="module")
def data():
    return synthetic_arrays(0).splits


def test_synthetic_data_is_repeatable_and_disjoint(data):
    again = synthetic_arrays(0).splits
    for split, count in (("train", 5000), ("test", 1000)):
        assert len(data[split]) == len(data[split].images) == count
        assert torch.equal(again[split].images, data[split].images)
        assert torch.equal(again[split].labels, data[split].labels)
        assert data[split].labels.bincount().min() > 0.07 * count
    few = synthetic_arrays(1, train=10, test=5).splits
    assert (len(few["train"]), len(few["test"])) == (10, 5)
    assert not torch.equal(few["train"].images, data["train"].images[:10])
    images = torch.cat([data["train"].images, data["test"].images]).numpy()
    assert len({image.tobytes() for image in images}) == 6000


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
