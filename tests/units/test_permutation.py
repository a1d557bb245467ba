"""Random orders that take no memory."""

import numpy as np
import pytest

from utils.data.loaders import IDS_AT_ONCE, KeyedSampler
from utils.data.permutation import Permutation

POWERS = [2**power + more for power in range(1, 17) for more in (-1, 0, 1)]
PRIMES = [5, 11, 13, 97, 101, 997, 10_007]


def order(size, seed=0, epoch=0):
    return Permutation(size, seed, epoch)(np.arange(size))


def test_every_number_is_there_once():
    for size in {*range(1, 40), *POWERS, *PRIMES, 36, 100, 1000}:
        numbers = order(size, seed=size)
        assert numbers.dtype == np.int64 and np.array_equal(np.sort(numbers), np.arange(size)), size


def test_every_seed_and_epoch_has_another_order():
    orders = {tuple(order(50, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_orders_stay_the_same():
    """A run that an earlier version began continues with the same samples."""
    assert order(1000, 3, 1)[:4].tolist() == [835, 270, 831, 662]
    parts = [
        Permutation(1000, 3, 1)(np.arange(first, first + 100)) for first in range(0, 1000, 100)
    ]
    assert np.array_equal(np.concatenate(parts), order(1000, 3, 1))


def test_all_orders_of_few_numbers_are_about_equally_frequent():
    counts = np.unique([order(4, seed) for seed in range(2400)], axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 100) ** 2 / 100).sum() < 50  # one in a thousand with 23 degrees of freedom


@pytest.mark.parametrize("size", [61, 64])
def test_a_number_is_anywhere_with_the_same_frequency(size):
    """And what follows it, too."""
    orders = np.stack([order(size, seed) for seed in range(20 * size)])
    for numbers in (orders, np.diff(orders, axis=1) % size):
        places, expected = numbers.shape[1], 20
        counts = np.zeros((places, size))
        np.add.at(counts, (np.arange(places), numbers), 1)
        counts = counts if numbers is orders else counts[:, 1:] * (size - 1) / size
        freedom = counts.size
        assert abs(((counts - expected) ** 2 / expected).sum() / freedom - 1) < 0.1


def test_one_element_of_a_huge_order_costs_what_one_of_a_small_one_does():
    size = 10**15
    numbers = Permutation(size, 0, 0)(np.arange(size - 1000, size))
    assert len(set(numbers.tolist())) == 1000 and numbers.min() >= 0 and numbers.max() < size
    assert abs(numbers.mean() / size - 0.5) < 0.05


def test_a_sampler_yields_every_sample_in_the_order_of_the_epoch():
    size = IDS_AT_ONCE + 100
    sampler = KeyedSampler(size, 3)
    first = list(sampler)
    assert len(sampler) == size and first == order(size, 3, 0).tolist() == list(sampler)
    sampler.set_epoch(2)
    assert list(sampler) == order(size, 3, 2).tolist() != first
