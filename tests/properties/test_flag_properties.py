"""What flags take: any value of their domain as it is, and nothing else; `@FILE` for any words."""

import re
import shlex
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from utils.run.arguments import Parser, number, shown, text
from utils.run.failures import UserError

CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # what a terminal or a log would obey
INTEGERS = st.integers(-(10**12), 10**12)
FLOATS = st.floats(-1e7, 1e7) | st.sampled_from([0.0, 5e-324, 1.0, -1.0])


def parsed(domain, word):
    """The value of a flag, or None if its error is one line that names the flag."""
    parser = Parser()
    parser.add_argument("--flag", type=domain)
    try:
        return parser.parse_args([f"--flag={word}"]).flag
    except UserError as error:
        line = str(error)
        assert (
            line.startswith("argument --flag: ") and not CONTROLS.search(line) and len(line) < 200
        )
        return None


@given(INTEGERS, INTEGERS, st.sampled_from(["", "+", "0"]), st.sampled_from(["most", "below", ""]))
def test_an_integer_is_taken_exactly_if_it_is_in_its_domain(value, bound, sign, kind):
    low, high = sorted((bound, 7))
    domain = number(int, low, **{kind: high} if kind else {})
    most = {"most": high, "below": high - 1, "": 10**9}[kind]
    for near in (value, low - 1, low, high - 1, high, high + 1, most, most + 1):
        word = f"{sign if near >= 0 else ''}{near}"
        assert parsed(domain, word) == (near if low <= near <= most else None), word


@given(FLOATS, FLOATS, st.booleans(), st.sampled_from(["most", "below", ""]))
def test_a_float_is_taken_exactly_if_it_is_in_its_domain(value, bound, above, kind):
    low, high = sorted((bound, 0.5))
    domain = number(float, low, above=above, **{kind: high} if kind else {})
    for near in (value, low, high, 0.0, 1e6, 1.1e6):
        inside = near > low if above else near >= low
        inside &= {"most": near <= high, "below": near < high, "": near <= 1e6}[kind]
        found = parsed(domain, repr(near))
        assert found == (near if inside else None) and type(found) in (float, type(None)), near


@given(st.text(min_size=1, max_size=60))
@example("x" * 40)
@example("x" * 41)
def test_text_is_one_printable_line_and_comes_back(word):
    found = parsed(text, word)
    if CONTROLS.search(word):
        assert found is None
    elif not word.startswith("~"):
        assert found == word
        assert shown(word) == (f"'{word}'" if len(word) <= 40 else f"'{word[:40]}...'")


WORD = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=12).filter(
    lambda word: not word.startswith("-")
)
NAMES = ("--a", "--b", "--c")
FLAGS = st.lists(st.tuples(st.sampled_from(NAMES), WORD), max_size=6)


def parser_of_words():
    parser = Parser()
    for name in NAMES:
        parser.add_argument(name, type=str, action="append")
    parser.add_argument("--both", type=str, nargs=2)
    parser.add_argument("--some", type=str, nargs="+")
    parser.add_argument("--switch", action="store_true")
    return parser


@given(FLAGS, FLAGS, st.sampled_from(["{} {}", "{}={}", "\t{} {} \t"]), st.integers(1, 2))
def test_the_words_in_files_stand_in_front_of_all_flags(inside, after, line, count):
    def words(flags):
        return [f"{name}={value}" for name, value in flags]

    lines = ["# it's a comment", "", "  # --a 1"]
    for name, value in inside:
        lines.append(line.format(name, shlex.quote(value)))
    parser = parser_of_words()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "words.args")
        path.write_text("\n".join(lines), encoding="utf-8")
        found = parser.parse_args([f"@{path}"] * count + words(after))
        assert found == parser.parse_args(words(inside * count + after))
        # Behind a flag it is no file.
        name = f"@{path}"
        found = parser.parse_args(["--a", name, "--both", name, name, "--some", name])
        assert (found.a, found.both, found.some) == ([name], [name, name], [name])
        with pytest.raises(UserError, match="unrecognized arguments: @"):
            parser.parse_args(["--switch", name])
