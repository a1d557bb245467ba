"""What evaluations share: how far a long one is, and mean losses with their standard errors."""

import math
import sys
import time
from datetime import timedelta

import torch
from tqdm import tqdm

SECONDS = 5  # of an evaluation, until something is shown


class Progress:
    """Iterates over the batches of evaluations, in place of `guard.watch`; shows how far one is."""

    def __init__(self, accelerator, watch=iter):
        """Args: watch: yields the batches of a loader, as `guard.watch` does."""
        self._watch, self._is_main = watch, accelerator.is_main_process

    def __call__(self, loader):
        """Yields the batches of a prepared `DataLoader`."""
        batches = self._watch(loader)
        return with_progress(batches, len(loader), "evaluation", "batch", self._is_main)

    def announce(self, samples, held_out, folder):
        """Says that the last evaluation, which follows, takes a part of what is held out.

        Args:
            samples (int): so many of the `held_out` (int) are evaluated.
            folder (Path): that of the run, whose weights are written.

        Returns:
            dict: `evaluated_samples` and `held_out_samples`, for results.json.
        """
        if self._is_main and samples < held_out:
            tqdm.write(
                f"the last evaluation takes {samples:,} of {held_out:,} held-out samples: python "
                f"scripts/evaluate.py {folder} takes all, and so does --eval_samples 0"
            )
        return {"evaluated_samples": samples, "held_out_samples": held_out}


def with_progress(items, total, what, unit, shown=True):
    """Yields items; if that takes more than `SECONDS`, shows a bar with the time left.

    Without a terminal it prints a line instead, and then one after each tenth.

    Args:
        total (int): the number of items.
        what, unit (str): of the bar.
        shown (bool): False: only yields.
    """
    start_time = said_at = time.monotonic()
    terminal, tenths = sys.stderr.isatty(), -1
    look = dict(desc=what, unit=unit, leave=False, dynamic_ncols=True)
    with tqdm(total=total, delay=SECONDS, disable=not (shown and terminal), **look) as bar:
        for done, item in enumerate(items, 1):
            yield item
            bar.update()
            now, tenth = time.monotonic(), 10 * done // total
            if shown and not terminal and tenths < tenth < 10 and now - said_at >= SECONDS:
                said_at, tenths = now, tenth
                left = timedelta(seconds=round((now - start_time) * (total - done) / done))
                tqdm.write(f"{what}: {done / total:.0%}, left {left}")


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
