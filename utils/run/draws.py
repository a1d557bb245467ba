"""Random numbers per sample: a function of the seed, the step (or epoch) and the id of the sample.

So a sample gets the same numbers on any number of processes, in any batch, before and after a
restart.
"""

import math

import torch

MASK = 0xFFFFFFFF


def random_uint32(seed, epoch, ids, stream):
    """Stateless random integers, one per sample.

    The mixing function is the 32-bit finalizer "lowbias32" (C. Wellons, "Prospecting for Hash
    Functions", 2018), applied once per input. Integer arithmetic only, so CPU and GPU agree.

    Args: stream (int): a different integer for each independent use.

    Returns:
        int64 tensor like `ids`, uniform in [0, 2**32).
    """
    x = 0  # a Python integer until `ids`: only the last of the four rounds computes with tensors
    for value in (seed, epoch, stream, ids):
        x = (x ^ value) & MASK
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
        x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
        x = x ^ (x >> 16)
    return x


def uniform(seed, step, ids, size=(), stream=0):
    """Random numbers in [0, 1), on the device of `ids`.

    Args:
        size (tuple): the shape of the numbers of one sample.
        stream (int): a different integer for each independent use in a step.

    Returns:
        float32 [samples, *size].
    """
    return (_bits(seed, step, ids, size, stream) >> 8).float() / 2**24


def normal(seed, step, ids, size=(), stream=0):
    """Standard normal random numbers; arguments and result are those of `uniform`."""
    quantiles = (_bits(seed, step, ids, size, stream).double() + 0.5) / 2**32
    return torch.special.ndtri(quantiles).float()


def _bits(seed, step, ids, size, stream):
    keys = random_uint32(seed, step, ids, stream)
    places = torch.arange(math.prod(size), device=ids.device)
    return random_uint32(keys[:, None], 1, places, 0).view(len(ids), *size)
