"""The mean loss of many samples and its standard error, from sums that can be added."""

import math

import torch


def moments(sums, counts):
    """What `mean_and_error` needs of some samples; moments of several parts can be added.

    Args:
        sums: [samples], the sum of the losses of each, of
        counts: [samples] tokens or bytes; a sample with none does not count.

    Returns:
        float64 [6].
    """
    x, n = sums.double(), counts.double()
    return torch.stack([(n > 0).double(), n, x, n * n, n * x, x * x]).sum(1)


def mean_and_error(moments):
    """The mean loss over all tokens, and its standard error as if samples were independent.

    Returns:
        tuple[float, float | None, int]: and the number of tokens; None: of a single sample there is
        no error.
    """
    many, total, x, nn, nx, xx = moments.tolist()  # the only wait for the device
    mean = x / total
    # Of a ratio: samples with fewer tokens than others count less.
    squares = xx - 2 * mean * nx + mean**2 * nn
    if many < 2 or math.isnan(squares):
        return mean, None, int(total)
    return mean, math.sqrt(max(squares, 0) * many / (many - 1)) / total, int(total)


def with_error(name, mean, error):
    """A metric and its standard error, if there is one, as a dict for the log and the results."""
    return {name: mean} | ({} if error is None else {f"{name}_standard_error": error})
