"""Every flag has a domain: what no run can mean is one line before anything is written.

That a domain takes exactly its values is in tests/properties/test_flag_properties.py.
"""

import argparse
import math
import re
import sys

import pytest
from harness.launches import ROOT, load_script

from utils.run.arguments import Parser, number, text
from utils.run.failures import UserError

SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "scripts").rglob("*.py")
    if "parser = Parser" in path.read_text() and path.stem != "measuring"  # not for people
)
REQUIRED = {
    "train_images": ["--dataset", "synthetic"],
    "evaluate": ["runs/a"],
    "compare_runs": ["runs/a"],
}
AFTER = {"chaos": ["--", "true"]}
ANY_TEXT = {"--prompt", "--lr_schedule"}
# `int` or `float` reads some of them. Of the last ones no flag is a count, a rate or a share.
NUMBERS = ["nan", "inf", "1_0", "１", "1 ", "1e308", "-1e308", "1e-300", "9" * 25, "-1e-13"]
CONTROLS = ["a\nb", "a\x1b[2Jb", "a\u2028b", ""]


@pytest.fixture
def answers_of(monkeypatch):
    """Returns the `Answers` of the parser that a script builds."""
    monkeypatch.setenv("HOME", "/home/ada")

    def build(script):
        before, after, built = REQUIRED.get(script, []), AFTER.get(script, []), []
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *before, *after])
        with monkeypatch.context() as patch:
            patch.setattr(Parser, "parse_args", lambda parser, *_: built.append(parser) or 1 / 0)
            with pytest.raises(ZeroDivisionError):
                load_script(script).parse_args()
        return Answers(*built, before, after)

    return build


class Answers:
    """What the flags of a script make of a value."""

    def __init__(self, parser, before, after):
        self.parser, self.before, self.after = parser, before, after
        self.flags = re.findall(r"^  (--\w+)", parser.format_help(), re.MULTILINE)
        self.defaults = vars(self.parse())

    def parse(self, *words):
        return self.parser.parse_args([*self.before, *words, *self.after])

    def of(self, flag, value):
        """The parsed value, or None if it is refused in one line that names the flag."""
        words = [flag, value, value] if flag == "--columns" else [f"{flag}={value}"]
        try:
            found = getattr(self.parse(*words), flag[2:])
        except UserError as error:
            line = str(error)
            assert line.startswith(f"argument {flag}: ") and line.isprintable() and len(line) < 250
            return None
        return found[0] if isinstance(found, list) else found


@pytest.mark.parametrize("script", SCRIPTS)
def test_nonsense_is_refused_in_one_line_and_a_default_is_not(script, answers_of):
    answers, module = answers_of(script), load_script(script)
    assert len(answers.flags) >= 2
    for flag in answers.flags:
        for value in NUMBERS:
            found = answers.of(flag, value)
            assert not isinstance(found, int | float), f"{flag} takes {value}: give it a `number`"
        for value in CONTROLS:
            assert flag in ANY_TEXT or answers.of(flag, value) is None, flag
        home = answers.of(flag, "~/runs/a")  # a shell expands only a ~ at the start of a word
        assert flag in ANY_TEXT or home in (None, "/home/ada/runs/a"), flag
    tables = [answers.defaults]
    for table in ("RECIPES", "PRESETS"):
        tables += getattr(module, table, {}).values()
    for name, value in ((name, table[name]) for table in tables for name in table):
        if f"--{name}" in answers.flags and type(value) in (int, float):
            assert answers.of(f"--{name}", str(value)) == value, name
            refused = [answers.of(f"--{name}", str(far)) is None for far in (-math.inf, math.inf)]
            assert all(refused), name


def test_what_a_number_must_be():
    assert number(float, 0).most == 1e6 and number(int, 0).most == 10**9
    assert number(float, 0)(".5") == 0.5 and number(int, 0)("7".zfill(49)) == 7
    for domain, value, says in (
        (number(int, 1), "0", "must be an integer, at least 1 and at most 1000000000, not '0'"),
        (number(int, 0), "7".zfill(50), "must be an integer"),
        (number(int, 0, below=32), "32", "at least 0 and below 32, not '32'"),
        (number(float, 0, above=True), "0", "must be above 0 and at most 1000000.0, not '0'"),
        (number(float, 0, most=0.9), "1", "must be at least 0 and at most 0.9, not '1'"),
        (number(float, -1), "-1e-300", "must be 0 or at least 1e-12"),
        (number(float, 0), "9" * 5000, f"not '{'9' * 40}...'"),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as error:
            domain(value)
        assert says in str(error.value)


def test_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert text("~") == "/home/ada" and text("~/a") == "/home/ada/a" and text("a/~b") == "a/~b"
    assert text("~no_such_user/a") == "~no_such_user/a"
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user id without an entry
    for path in ("~/a", "~"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"no home folder for {path}"):
            text(path)
