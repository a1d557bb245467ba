"""Flags: files of them, mistyped ones, and domains: what no run can mean is refused in one line.

That a domain takes exactly its values is in tests/properties/test_flag_properties.py.
"""

import argparse
import math
import re
import sys

import pytest
from harness.launches import ROOT, load_script

from utils.run.arguments import Parser, frozen
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
NUMBERS = ["nan", "inf", "1_0", "１", "1 ", "1e308", "-1e308", "9" * 25]
CONTROLS = ["a\nb", "a\x1b[2Jb", "a\u2028b", ""]


def test_the_lines_of_a_file(tmp_path, monkeypatch):
    """More of them is in tests/properties/test_flag_properties.py. A preset decides the defaults."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["train_images.py", "@~/a.args", "--lr", "0.5"])
    text = "#--lr 0.2\r\n  --preset finetune\r\n\r\n--dataset 'a#b # c'\r\n"
    (tmp_path / "a.args").write_bytes(b"\xef\xbb\xbf" + text.encode())
    args = load_script("train_images").parse_args()
    given = (args.preset, args.optimizer, args.lr, args.dataset)
    assert given == ("finetune", "adamw", 0.5, "a#b # c")
    (tmp_path / "b.args").write_text("--prompt 'a")
    for name, reason in (("b.args", "No closing quota"), ("c.args", r"\[Errno 2\] No such file")):
        path = tmp_path / name
        with pytest.raises(UserError, match=f"^cannot read the arguments in @{path}: {reason}"):
            Parser().parse_args([f"@{path}"])


def test_frozen_arguments_do_not_change():
    args = frozen(argparse.Namespace(lr=3.0))
    for name in ("lr", "new"):
        with pytest.raises(AttributeError, match=f"after parsing: pass {name} on by itself"):
            setattr(args, name, 4.0)
    assert vars(args) == {"lr": 3.0}


def test_a_mistyped_flag_is_compared_with_those_that_there_are():
    parser = Parser()
    parser.add_training_arguments(parser)
    for words, meant in (
        ("--learning_rate 3", "did you mean --lr?"),
        ("--num-train-epochs 3", "did you mean --epochs?"),
        ("--max_steps 3", "did you mean --max_train_steps?"),
        ("--learning_rate 1 --batchsize 2", "did you mean --lr and --batch_size?"),
        ("--report_to 3", None),  # what it would be called here is no flag of this script
        ("--nothing_like_it 3", None),
    ):
        with pytest.raises(UserError) as raised:
            parser.parse_args(words.split())
        hint = f": {meant}" if meant else ""
        assert str(raised.value) == f"unrecognized arguments: {words}{hint} (see --help)"
    with pytest.raises(UserError, match=r"^argument --lr: expected one argument \(see --help\)$"):
        parser.parse_args(["--lr"])


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
