"""Random orders of any number of samples, of which each element is computed on its own.

`torch.randperm` needs 8 bytes per sample, and a list of its ids 36. This needs no memory, whatever
the number of samples.
"""

import hashlib
import math
import struct

import numpy as np
from torch.utils.data import Sampler

ROUNDS = 8
IDS_AT_ONCE = 4096


def sample_seed(seed, epoch, index):
    """A seed for one sample in one epoch, 64 bits, by BLAKE2 (RFC 7693)."""
    key = struct.pack("<qqq", seed, epoch, index)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


class Permutation:
    """A random order of the numbers below `size`, decided by the seed and the epoch.

    It is a Feistel network: a number is written as two digits, and in turn each of them is
    increased by a hash of the other one and of a key, which can be undone. The digits can express
    about a square root more numbers than there are: one of those goes through the network again,
    until it is below `size` ("cycle walking", Black & Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002).

    Args:
        size (int): 1 or more, below 2**62.
    """

    def __init__(self, size, seed, epoch):
        self._size = size
        left = math.isqrt(size - 1) + 1
        self._bases = left, -(-size // left)
        self._keys = [sample_seed(seed, epoch, -1 - number) for number in range(ROUNDS)]

    def __call__(self, places):
        """The numbers at `places` of the order, int64, for an int64 array of any length."""
        numbers = self._network(places.astype(np.uint64))
        while len(beyond := np.flatnonzero(numbers >= self._size)):
            numbers[beyond] = self._network(numbers[beyond])
        return numbers.astype(np.int64)

    def _network(self, numbers):
        changing, other = np.divmod(numbers, np.uint64(self._bases[1]))
        for number, key in enumerate(self._keys):
            base = np.uint64(self._bases[number % 2])
            changing += (_hash(other, np.uint64(key)) * base) >> np.uint64(32)
            changing[changing >= base] -= base
            changing, other = other, changing
        return changing * np.uint64(self._bases[1]) + other


def _hash(numbers, key):
    """Hashes numbers below 2**32, with a key of 64 bits, to 32 bits: the finalizer of MurmurHash3.

    A number and the result are uint64.
    """
    numbers = numbers + key
    numbers ^= numbers >> np.uint64(33)
    numbers *= np.uint64(0xFF51AFD7ED558CCD)
    numbers ^= numbers >> np.uint64(33)
    numbers *= np.uint64(0xC4CEB9FE1A85EC53)
    return numbers >> np.uint64(32)


class EpochSampler(Sampler):
    """Yields the samples of whole optimizer steps, in a random order that takes no memory.

    The order is a deterministic function of the seed and the epoch.

    Args:
        samples, batch_size (int): size of the data set, and of an optimizer step.
        with_epoch (bool): yield (epoch, id) instead of ids, for a data set that needs the epoch:
            workers that live for several epochs never see a change of the data set.
    """

    def __init__(self, samples, batch_size, seed, with_epoch=False):
        self._samples, self._used = samples, samples // batch_size * batch_size
        self._seed, self._with_epoch, self._epoch = seed, with_epoch, 0

    def set_epoch(self, epoch):
        """Sets the next epoch; called by the prepared loader's own `set_epoch`."""
        self._epoch = epoch

    def __len__(self):
        return self._used

    def __iter__(self):
        order = Permutation(self._samples, self._seed, self._epoch)
        for start in range(0, self._used, IDS_AT_ONCE):
            places = np.arange(start, min(start + IDS_AT_ONCE, self._used))
            for index in order(places).tolist():
                yield (self._epoch, index) if self._with_epoch else index
