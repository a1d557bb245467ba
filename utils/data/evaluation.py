"""What evaluations share: which samples they take, how far one is, mean losses with their errors.

An evaluation takes the same held-out samples each time. So its scores can be compared, and it costs
little, however much is held out. All numbers follow from those of samples and steps, never from
seconds: a restart chooses the same ones.
"""

import math
import sys

import numpy as np
import torch
from tqdm import tqdm

from utils.data.loaders import shuffled

# Of the cost of training: for all evaluations but the last, and for the last.
SHARE, LAST_SHARE = 0.1, 0.2
STEP = 3  # forward passes that cost as much as a training step on the same samples
# Evaluated at least: the loss then has a standard error of about 0.01 nats, the accuracy of 1 %.
TOKENS, IMAGES = 2**17, 2000
SECONDS = 5  # of an evaluation, until something is shown


def count_evaluated(run, plan, args, held_out):
    """How many held-out samples each evaluation but the last takes; it prints that, if not all.

    A run keeps to the number with which it began, also if it gets longer or evaluates more often:
    give it to `run.checkpoint` as `eval_samples`.

    Args:
        run (RunFolder): after `open`.
        args: `batch_size`; of text `block_size`; `eval_samples`, None for `SHARE`, or 0 for all.
        held_out (int): how many there are: the most that it returns.
    """
    trained = args.batch_size * min(plan.evaluate_every, plan.total_steps)  # before an evaluation
    count = args.eval_samples
    if count is None:
        count = max(_at_least(args), int(SHARE * STEP * trained))
    if run.progress:
        count = run.progress["eval_samples"]
    count = min(count or held_out, held_out)
    if count < held_out:
        run.print(
            f"evaluations: {count:,} of {held_out:,} held-out samples, always the same, about "
            f"{count / STEP / trained:.0%} of the cost of training (--eval_samples)"
        )
    return count


def count_last(plan, args, held_out):
    """How many of `held_out` samples the last evaluation takes: all, if that costs little.

    With `--eval_samples 0` it takes all.
    """
    if args.eval_samples == 0:
        return held_out
    affordable = int(LAST_SHARE * STEP * args.batch_size * plan.total_steps)
    return min(held_out, max(_at_least(args), affordable))


def _at_least(args):
    return max(1, TOKENS // args.block_size) if hasattr(args, "block_size") else IMAGES


def choose(samples, count, seed):
    """`count` random samples of a split in their order, or the split itself if it has no more."""
    if count >= len(samples):
        return samples
    return samples.select(np.sort(shuffled(len(samples), seed, 0)[:count]))


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

    Without a terminal, a new one follows every half minute.

    Args:
        total (int): the number of items.
        what, unit (str): of the bar.
        shown (bool): False: only yields.
    """
    pause = 0.1 if sys.stderr.isatty() else 30.0
    look = dict(desc=what, unit=unit, leave=False, dynamic_ncols=True)
    pauses = dict(delay=SECONDS, mininterval=pause, maxinterval=max(pause, 10.0))
    yield from tqdm(items, total=total, disable=not shown, **pauses, **look)


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
