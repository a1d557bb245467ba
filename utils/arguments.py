"""Command line flags: the ones that every training script shares, and checked numbers."""

import argparse

from utils.exits import UserError, is_main


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that shows --help once, with defaults, and reports a mistake as one `UserError` line."""

    def __init__(self, **kwargs):
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def print_help(self, file=None):
        if is_main():
            super().print_help(file)

    def error(self, message):
        raise UserError(f"{message} (see --help)")


def number(kind, low, *, above=False):
    """An argparse type: an `int` or `float` that is at least `low` (above it, if `above`)."""

    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number of type {kind.__name__}") from None
        if not (value > low if above else value >= low) or value == float("inf"):
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {low} and finite, not {text}")
        return value

    return convert


def add_run_arguments(parser, output_dir):
    """Adds the flags that mean the same in every training script; `output_dir` is the default of `--output_dir`."""
    at_least_0, at_least_1 = number(int, 0), number(int, 1)
    group = parser.add_argument_group("run")
    group.add_argument("--output_dir", default=output_dir, help="everything the run writes")
    group.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto: continue the run in output_dir if there is one; never: refuse to; PATH: start from that checkpoint",
    )
    group.add_argument(
        "--checkpoint_every", type=at_least_0, help="optimizer steps; 0: only at the end and on preemption; not given: an epoch"
    )
    group.add_argument("--keep_checkpoints", type=at_least_1, default=2, help="newest checkpoints to keep, besides the best")
    group.add_argument("--log_every", type=at_least_1, default=10, help="optimizer steps")
    group.add_argument("--seed", type=at_least_0, default=0, help="of weights, order and augmentation")
    group.add_argument("--timeout", type=at_least_1, default=600, help="seconds to wait for another process before giving up")


def add_data_arguments(parser, dataset, data_help):
    """Adds the flags of every script that trains on a data set.

    Args:
        dataset (str): the default of `--dataset`.
        data_help (str): what `--dataset` takes.
    """
    group = parser.add_argument_group("data")
    group.add_argument("--dataset", default=dataset, help=data_help)
    group.add_argument("--num_workers", type=number(int, 0), default=0, help="processes that load data, per training process")
    group.add_argument("--eval_every", type=number(int, 1), help="optimizer steps from test to test; not given: an epoch")
    group = parser.add_argument_group("trying things out (in a folder of its own beside output_dir)")
    group.add_argument("--dry_run", action="store_true", help="two steps of everything, then stop")
    group.add_argument(
        "--overfit_batch", action="store_true", help="train on one batch until the loss is about 0: can the model learn at all?"
    )
    group.add_argument(
        "--profile", action="store_true", help="write a torch.profiler trace of a few steps to output_dir/profile"
    )
