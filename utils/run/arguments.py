"""Command-line flags of every training script, and the parser of all scripts."""

import argparse
import shlex
import sys
from pathlib import Path

from utils.run.domains import number, text
from utils.run.failures import UserError
from utils.run.process import is_main

# The rule for continuing a run: printed by --help and by the error message, and quoted in the
# README.
CONTINUE_RULE = (
    "To continue a run, keep its arguments. You may change --epochs, --max_train_steps, and the "
    "options for output, logging, checkpoints, workers, compilation, determinism and gradient "
    "accumulation."
)
FILES = (
    "@FILE in front of all flags stands for the arguments in a file: one flag and its value per "
    "line; a line that begins with # is a comment. Flags on the command line win."
)
LENGTH = {"epochs", "max_train_steps"}
# Other options that may change. They do not change results.
MAY_CHANGE = {
    "output_dir",
    "resume",
    "checkpoint_every",
    "keep_checkpoints",
    "log_every",
    "eval_every",
    "timeout",
    "nondeterministic",
}
SEED = number(int, 0, most=2**32 - 1)  # what NumPy takes
BATCH = number(int, 1, most=2**20)  # more than fits into memory, or into most data sets
SECONDS = number(int, 1, most=30 * 24 * 3600)  # more than a job may take; libraries overflow later


class Arguments(argparse.Namespace):
    """Parsed arguments that cannot be changed: no function returns a result through them.

    It has no method: the name of a flag could be the same.
    """

    def __setattr__(self, name, value):
        raise AttributeError(f"arguments do not change after parsing: pass {name} on by itself")


def frozen(args):
    """Returns these arguments as `Arguments`."""
    result = Arguments()
    vars(result).update(vars(args))
    return result


class Parser(argparse.ArgumentParser):
    """An ArgumentParser for processes that all parse the same command line.

    Prints --help, with defaults, on the main process only, and raises `UserError` for mistakes. A
    flag without a type takes `domains.text`; give `type=str` for one that takes any text.
    """

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)
        self.register("type", None, text)

    def print_help(self, file=None):
        if is_main():
            super().print_help(file)

    def error(self, message):
        raise UserError(f"{message} (see --help)")

    def choice(self, flag):
        """The value of `--flag`, read before the full parse: other defaults depend on it."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument(f"--{flag}", default=self.get_default(flag), nargs="?")
        return getattr(parser.parse_known_args(_expand(sys.argv[1:]))[0], flag)

    def parse_known_args(self, args=None, namespace=None):
        """As in argparse, which `parse_args` calls; reads `@FILE`."""
        words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(_expand(words), namespace)

    def add_training_arguments(self, group, **defaults):
        """Adds the flags of every training loop; `defaults` are their defaults."""
        at_least_1 = number(int, 1)
        group.add_argument("--epochs", type=at_least_1, help="passes over the training set")
        group.add_argument(
            "--max_train_steps", type=at_least_1, help="optimizer steps; overrides --epochs"
        )
        group.add_argument(
            "--batch_size", type=BATCH, help="samples per optimizer step over all processes"
        )
        group.add_argument("--lr", type=number(float, 0, most=1000), help="peak learning rate")
        self.set_defaults(**defaults)

    def add_run_arguments(self):
        """Adds the flags for the run, the same in every training script.

        A copy writes to a folder named after itself.
        """
        self.epilog = f"{FILES} {CONTINUE_RULE}"
        at_least_1 = number(int, 1)
        group = self.add_argument_group("run")
        group.add_argument(
            "--output_dir",
            default=f"runs/{Path(sys.argv[0]).stem}",
            help="folder for everything that the run writes",
        )
        group.add_argument(
            "--resume",
            default="auto",
            metavar="auto|never|PATH",
            help="auto: continue the run in output_dir if there is one; never: stop with an "
            "error if there is one; "
            "PATH: continue from a checkpoint of another run, and write to output_dir",
        )
        group.add_argument(
            "--checkpoint_every",
            type=number(int, 0),
            help="optimizer steps between checkpoints; 0: only at the end and on preemption "
            "(default: an epoch, and before each evaluation)",
        )
        group.add_argument(
            "--keep_checkpoints",
            type=at_least_1,
            default=2,
            help="newest checkpoints to keep, besides the highest-scoring one",
        )
        group.add_argument(
            "--eval_every",
            type=at_least_1,
            help="optimizer steps between evaluations (default: an epoch)",
        )
        group.add_argument(
            "--log_every",
            type=at_least_1,
            help="optimizer steps between log lines (default: 10, fewer in runs of less than 200)",
        )
        group.add_argument(
            "--seed", type=SEED, default=0, help="seed of weights, order and augmentation"
        )
        group.add_argument(
            "--nondeterministic",
            action="store_true",
            help="on GPUs, use the fastest algorithms: the same samples, but not the same bytes "
            "after a restart",
        )
        group.add_argument(
            "--timeout",
            type=SECONDS,
            default=600,
            help="seconds to wait for another process before giving up",
        )
        return group


def _expand(words):
    """Replaces each `@FILE` at the start of a command line (list) by the arguments in it.

    Raises:
        UserError: a file cannot be read.
    """
    if not words or not words[0].startswith("@"):
        return words
    name, arguments = words[0][1:], []
    try:
        for line in Path(name).expanduser().read_text(encoding="utf-8-sig").splitlines():
            if not line.lstrip().startswith("#"):
                arguments += shlex.split(line)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the arguments in @{name}: {error}") from None
    return arguments + _expand(words[1:])


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default unless it is None or False."""

    def _get_help_string(self, action):
        if action.default is None or action.default is False:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(action.default)})"
        return super()._get_help_string(action)
