"""Flags of every training script; the parser of all scripts, and the types of its flags."""

import argparse
import contextlib
import difflib
import math
import os
import re
import shlex
import sys
from pathlib import Path

from utils.run.failures import UserError
from utils.run.output import one_line
from utils.run.process import is_main

# The rule for continuing a run: printed by --help and by the error message, and quoted in the
# README.
CONTINUE_RULE = (
    "To continue a run, keep its arguments. You may change its length and what does not change "
    "results, such as the options for output, logging and checkpoints."
)
FILES = (
    "@FILE in front of all flags stands for the arguments in a file: one flag and its value per "
    "line; a line that begins with # is a comment. Flags on the command line win."
)
# What other tools call a flag, where the names do not look alike: for "did you mean".
OTHER_NAMES = dict(
    name.split("=")
    for name in (
        "learning_rate=lr num_train_epochs=epochs per_device_train_batch_size=batch_size "
        "data_dir=dataset model_name_or_path=model logging_steps=log_every eval_steps=eval_every "
        "save_steps=checkpoint_every resume_from_checkpoint=resume report_to=track"
    ).split()
)
LENGTH = {"epochs", "max_train_steps"}
# Other options that may change. They do not change results.
MAY_CHANGE = set(
    "output_dir resume checkpoint_every keep_checkpoints log_every eval_every timeout "
    "nondeterministic".split()
)
# What besides may change in a fork, which continues a checkpoint in another folder: how it is
# trained, if the script has such flags, but not the data and the model.
MAY_CHANGE_IN_FORK = set(
    "lr lr_schedule warmup_steps warmup_epochs weight_decay max_grad_norm batch_size seed".split()
)
# Nothing that a flag counts comes near this: a larger number is a typing error.
MOST_COUNTED = 10**9
# The same for other numbers: rates, factors, seconds.
MOST = 1e6


class number:
    """An argparse type: a finite number in a domain. Raises ArgumentTypeError for any other."""

    def __init__(self, kind, low, *, above=False, below=None, most=None):
        """
        Args:
            kind (type): int or float.
            low: the least value; with `above`, values must be more than that.
            below: values must be less than that.
            most: the greatest value; without it and `below`: `MOST_COUNTED` or `MOST`.
        """
        usual = MOST_COUNTED if kind is int else MOST
        self.kind, self.low, self.above, self.below = kind, low, above, below is not None
        self.most = usual if below is most is None else below if self.below else most

    def __call__(self, text):
        value = math.nan  # is in no domain
        # `int` and `float` accept more: 1_000, spaces, digits of other scripts, infinity.
        if re.fullmatch("[-+.eE0-9]{1,50}", text):
            with contextlib.suppress(ValueError):
                value = self.kind(text)
        high_enough = value > self.low if self.above else value >= self.low
        low_enough = value < self.most if self.below else value <= self.most
        if high_enough and low_enough:
            return value
        raise argparse.ArgumentTypeError(f"must be {self}, not {shown(text)}")

    def __str__(self):
        integer = "an integer, " if self.kind is int else ""
        low = f"{'above' if self.above else 'at least'} {self.low}"
        return f"{integer}{low} and {'below' if self.below else 'at most'} {self.most}"


def text(value):
    """An argparse type: text of one line; a `~` at its start becomes the home folder.

    Names of folders, files, columns and repositories: none of them has control characters, which
    would also reach the terminal, log files and the lines of error messages.
    """
    if not value:
        raise argparse.ArgumentTypeError("is empty")
    if one_line(value) != value:
        raise argparse.ArgumentTypeError(
            f"has a line break, a control character, or bytes that are not UTF-8: {shown(value)}"
        )
    path = os.path.expanduser(value)
    if path == "~" or path.startswith("~/"):  # or a folder called ~ would be made
        raise argparse.ArgumentTypeError(f"there is no home folder for {value}: write it in full")
    return path


def shown(value, most=40):
    """The text of an argument for an error message: quoted, on one line, not longer than `most`."""
    value = one_line(value)
    return f"'{value}'" if len(value) <= most else f"'{value[:most]}...'"


COUNT = number(int, 1)
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
    flag without a type takes `text`; give `type=str` for one that takes any text.
    """

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)
        self.register("type", None, text)

    def print_help(self, file=None):
        if is_main():
            super().print_help(file)

    def format_help(self):
        needed = [a for a in self._actions if a.required or not a.option_strings]
        words = [f"{''.join(a.option_strings[:1])} {a.metavar or a.dest.upper()}" for a in needed]
        self.usage = " ".join(["%(prog)s", *map(str.strip, words), "[options]"])
        return super().format_help()

    def error(self, message):
        flags, meant = [action.dest for action in self._actions], []
        for word in re.findall(r" --([\w-]+)", message) if "unrecognized" in message else ():
            name = word.replace("-", "_")
            names = [OTHER_NAMES.get(name), *difflib.get_close_matches(name, flags, n=1)]
            meant += [f"--{flag}" for flag in names if flag in flags][:1]
        hint = f": did you mean {' and '.join(meant)}?" if meant else ""
        raise UserError(f"{message}{hint} (see --help)")

    def parse_known_args(self, args=None, namespace=None):
        """As in argparse, which `parse_args` calls; reads `@FILE`."""
        words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(_expand(words), namespace)

    def add_training_arguments(self, group, **defaults):
        """Adds the flags of every training loop; `defaults` are their defaults."""
        group.add_argument("--epochs", type=COUNT, help="passes over the training set")
        group.add_argument(
            "--max_train_steps", type=COUNT, help="optimizer steps; overrides --epochs"
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
            "PATH: continue from a checkpoint of another run, and write to output_dir; how it is "
            "trained, such as --lr, may then differ",
        )
        group.add_argument(
            "--checkpoint_every",
            type=number(int, 0),
            help="optimizer steps between checkpoints; 0: only at the end and on preemption; "
            "default: an epoch, and before each evaluation",
        )
        group.add_argument(
            "--keep_checkpoints",
            type=COUNT,
            default=2,
            help="newest checkpoints to keep, besides the highest-scoring one",
        )
        group.add_argument(
            "--eval_every",
            type=COUNT,
            help="optimizer steps between evaluations; default: an epoch",
        )
        group.add_argument(
            "--log_every",
            type=COUNT,
            help="optimizer steps between log lines (default: 10; below 200 steps a twentieth)",
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
    """Shows a default unless it is None, False or empty; N stands for any number."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=32)

    def _get_default_metavar_for_optional(self, action):
        return "N" if isinstance(action.type, number) else action.dest.upper()

    def _get_help_string(self, action):
        default = action.default
        if default is None or default is False or default in ("", argparse.SUPPRESS):
            return action.help
        help_text = action.help.partition("; default: ")[0]  # that of a script without a preset
        if isinstance(default, list):
            default = " ".join(default)
        return f"{help_text} (default: {str(default).replace('%', '%%')})"
