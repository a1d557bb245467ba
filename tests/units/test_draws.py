"""The random numbers of a sample are the same in any batch and on any machine."""

from itertools import product

import pytest
import torch

from utils.data.loaders import sample_seed
from utils.run import draws


def test_the_seed_of_a_sample():
    """64 bits, the same everywhere; negative numbers are streams that no sample has."""
    assert sample_seed(0, 0, 0) == 2_891_389_769_238_885_931
    seeds = {sample_seed(s, e, i) for s, e, i in product(range(4), range(4), range(-2, 60))}
    assert len(seeds) == 4 * 4 * 62 and 2**60 < max(seeds) < 2**64 and min(seeds) >= 0


def test_a_sample_draws_the_same_numbers_in_any_batch():
    whole, places = torch.arange(6), list(product((0, 7), (1, 2), (0, 3)))
    for draw in (draws.uniform, draws.normal):
        drawn = [draw(seed, step, whole, (2, 5), stream) for seed, step, stream in places]
        for (seed, step, stream), numbers in zip(places, drawn, strict=True):
            assert numbers.shape == (6, 2, 5) and numbers.dtype == torch.float32
            assert torch.equal(draw(seed, step, whole[[4, 1]], (2, 5), stream), numbers[[4, 1]])
        assert len(torch.stack(drawn).unique()) == 8 * 6 * 10
        assert draw(0, 1, whole).shape == (6,)


def test_the_numbers_of_samples_are_uniform_and_normal():
    """And stay the same from version to version: a run resumes exactly."""
    ids = torch.arange(2000)
    flat, bell = draws.uniform(0, 0, ids, (50,)), draws.normal(0, 0, ids, (50,), stream=1)
    assert 0 <= flat.min() < 1e-3 and 1 - 1e-3 < flat.max() < 1
    assert abs(flat.mean() - 1 / 2) < 5e-3 and abs(flat.var() - 1 / 12) < 5e-3
    assert abs(bell.mean()) < 0.02 and abs(bell.std() - 1) < 0.01 and 4 < bell.abs().max() < 6.5
    assert abs((bell.abs() < 1).float().mean() - 0.6827) < 5e-3
    for numbers in (flat, bell):  # those of a sample are independent
        assert torch.corrcoef(numbers.T).fill_diagonal_(0).abs().max() < 0.1
    assert flat[0, 0].item() == 0.14063429832458496
    assert bell[0, 0].item() == pytest.approx(1.00493586063385)
