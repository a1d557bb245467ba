"""Types of command-line flags: numbers in a domain, and text of one line in which `~` is a home."""

import argparse
import os
import re

from utils.run.output import one_line

# Nothing that a flag counts comes near this: a larger number is a typing error.
MOST_COUNTED = 10**9
# The same for other numbers: rates, factors, seconds.
MOST = 1e6
# Numbers closer to zero are typing errors, too. Most would be rounded to 0 in float32.
LEAST = 1e-12

# What `int` and `float` accept is more: 1_000, spaces, digits of other scripts, nan, infinity.
PATTERNS = {
    int: re.compile(r"[+-]?[0-9]+"),
    float: re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
}


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
        # Not longer than any number that makes sense: Python refuses to convert 5,000 digits.
        if len(text) < 50 and PATTERNS[self.kind].fullmatch(text):
            value = self.kind(text)
            high_enough = value > self.low if self.above else value >= self.low
            low_enough = value < self.most if self.below else value <= self.most
            if self.kind is float and 0 < abs(value) < LEAST:
                raise argparse.ArgumentTypeError(f"must be 0 or at least {LEAST:g}, not {text}")
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
