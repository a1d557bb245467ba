"""Chooses the held-out samples of an evaluation: the same ones at every evaluation of a run.

So its scores can be compared, and evaluations cost little, however much is held out. All numbers
follow from those of samples and steps, never from seconds: a restart chooses the same ones.
"""

import numpy as np

from utils.data.permutation import Permutation

# Of the cost of training: for all evaluations but the last, and for the last.
SHARE, LAST_SHARE = 0.1, 0.2
STEP = 3  # forward passes that cost as much as a training step on the same samples
# Evaluated at least: the loss then has a standard error of about 0.01 nats, the accuracy of 1 %.
TOKENS, IMAGES = 2**17, 2000


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
    return samples.select(np.sort(Permutation(len(samples), seed, 0)(np.arange(count))))
