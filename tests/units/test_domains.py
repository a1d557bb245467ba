"""Every flag has a domain: what no run can mean is one line before anything is written."""

import argparse
import math
import sys

import pytest
from harness.launches import CIFAR, ROOT, load_script, run

from utils import pretrained
from utils.run.arguments import Parser
from utils.run.domains import number, shown, text
from utils.run.failures import UserError
from utils.run.output import one_line

SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "scripts").glob("*.py")
    if "parser = Parser" in path.read_text() and path.stem != "baselines"  # not for people
)
REQUIRED = {
    "train_images": ["--dataset", "synthetic"],
    "evaluate": ["--checkpoint", "runs/a"],
    "compare_runs": ["runs/a"],
    "chaos": [],
}
AFTER = {"chaos": ["--", "true"]}
# No flag of any script means one of these: `int` or `float` reads some of them.
NOT_NUMBERS = [
    "", " ", "x", "nan", "-nan", "inf", "-inf", "1_0", "１", "٣", "½", "0x10", "1e", "--1", "1,5",
    "1 ", " 1", "1\n", "1\x00", "\x1b[31m1", "1\u2028", "9" * 5000, "1e99999", "true", "None",
]  # fmt: skip
# Numbers: some flag may mean one of them. 2 is no share; 5e-324 is the smallest float.
NUMBERS = [
    "-1", "-0.5", "-1e308", "0", "-0", "0.0", "1", "2", "0.5", "1.5", "5e-324", "1e-300", "1e-13",
    "1e308", "1e22", "4294967296", "9" * 25, "9" * 19, "1e-400", "1000000000000",
]  # fmt: skip


def parser_of(script, monkeypatch):
    """The parser that a script builds, and the words that it requires before and after a flag."""
    built = []

    class Built(Exception):
        pass

    def parse_args(parser, *_):
        built.append(parser)
        raise Built

    before, after = REQUIRED.get(script, []), AFTER.get(script, [])
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *before, *after])
    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse_args", parse_args)
        with pytest.raises(Built):
            load_script(script).parse_args()
    return built[0], before, after


def numeric(parser):
    """The actions of flags that take a number: by their type, or by their default."""
    for action in parser._actions:
        is_number = type(action.default) in (int, float) and action.nargs != 0
        if isinstance(action.type, number) or action.type in (int, float) or is_number:
            yield action


def only(value):
    """The value of a flag that takes several and was given one."""
    return value[0] if isinstance(value, list) else value


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_a_domain_that_holds_its_default(script, monkeypatch):
    parser, _, _ = parser_of(script, monkeypatch)
    for action in numeric(parser):
        domain, flag = action.type, action.option_strings[0]
        assert isinstance(domain, number), f"{flag} takes any number: use utils.run.domains.number"
        assert -1e15 < domain.low <= domain.most < 1e16 and domain.low < domain.most, flag
        assert action.default is None or action.default in domain, flag
    for table in ("RECIPES", "PRESETS"):
        for name, defaults in getattr(load_script(script), table, {}).items():
            for action in numeric(parser):
                value = defaults.get(action.dest)
                assert value is None or value in action.type, (name, action.dest)


@pytest.mark.parametrize("script", SCRIPTS)
def test_nonsense_is_refused_in_one_line(script, monkeypatch):
    parser, before, after = parser_of(script, monkeypatch)
    for action in numeric(parser):
        flag = action.option_strings[0]
        for value in NOT_NUMBERS + NUMBERS:
            try:
                args = parser.parse_args([*before, f"{flag}={value}", *after])
            except UserError as error:
                line = str(error)
                assert line.startswith(f"argument {flag}: must be "), line
                assert line.isprintable() and len(line) < 200, line
                continue
            parsed = only(getattr(args, action.dest))
            assert value not in NOT_NUMBERS, (flag, value)
            assert parsed in action.type and math.isfinite(parsed), (flag, value)
            assert parsed == 0 or 1e-13 < abs(parsed) < 1e16, (flag, value)
            assert parsed == float(value), (flag, value)  # and not a number near it


def given(action, value):
    """The words that give a flag this value; one that takes two gets it twice."""
    flag = action.option_strings[0]
    return [flag, *[value] * action.nargs] if action.nargs == 2 else [f"{flag}={value}"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_text_is_one_line_and_a_home_is_found(script, monkeypatch):
    """`--output_dir=~/runs/a`: a shell expands only a `~` at the start of a word."""
    monkeypatch.setenv("HOME", "/home/ada")
    parser, before, after = parser_of(script, monkeypatch)
    for action in parser._actions:
        if action.type is not None or action.nargs == 0 or not action.option_strings:
            continue
        flag = action.option_strings[0]
        for value in ("", "a\nb", "a\x1b[2Jb", "a\x00b", "a\rb", "a\u2028b"):
            with pytest.raises(UserError, match=f"argument {flag}: ") as error:
                parser.parse_args([*before, *given(action, value), *after])
            assert str(error.value).isprintable(), error.value
        if not action.choices:
            args = parser.parse_args([*before, *given(action, "~/runs/a"), *after])
            assert only(getattr(args, action.dest)) == "/home/ada/runs/a", flag


def test_a_number_is_in_its_domain():
    assert number(int, 1)("7") == 7 and number(int, -3)("-3") == -3 and number(int, 0)("+5") == 5
    assert number(int, 0)("0") == 0 and number(int, 1, most=8)("8") == 8
    assert number(float, 0)("1e-3") == 0.001 and number(float, 0)(".5") == number(float, 0)("0.5")
    assert number(float, 0, least=0.01)("0.01") == 0.01 and number(float, 0)("0") == 0
    assert type(number(float, 0)("3")) is float
    assert number(float, 0).most == 1e6 and number(int, 0).most == 10**9
    assert number(int, 0)("7".zfill(49)) == 7
    with pytest.raises(argparse.ArgumentTypeError):
        number(int, 0)("7".zfill(50))
    assert shown("x" * 40) == f"'{'x' * 40}'" and shown("x" * 41) == f"'{'x' * 40}...'"
    for domain, value, says in (
        (number(int, 1), "0", "must be an integer, at least 1 and at most 1000000000, not '0'"),
        (number(int, 0, below=32), "32", "at least 0 and below 32"),
        (number(int, 0, most=8), "9", "at most 8"),
        (number(int, 0), "1.0", "must be an integer"),
        (number(float, 0, above=True), "0", "must be above 0 and at most"),
        (number(float, 0, below=1), "1", "at least 0 and below 1, not '1'"),
        (number(float, 0, least=0.01), "0.001", "must be 0 or at least 0.01, not 0.001"),
        (number(float, -1), "-1e-300", "must be 0 or at least 1e-12"),
        (number(float, 0), "9" * 5000, "not '9999999999999999999999999999999999999999...'"),
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


def test_the_control_characters_of_a_line():
    assert one_line("a\nb\x1b[31m\x00\u2028\x9b") == "a\\nb\\x1b[31m\\x00\\u2028\\x9b"
    assert one_line("über 漢字 $x$ `y`") == "über 漢字 $x$ `y`"
    assert text("photos\udcff") == "photos\udcff"  # a path of bytes that are not UTF-8


def test_what_argparse_itself_refuses_is_one_line(monkeypatch):
    parser, _, _ = parser_of("train_minimal", monkeypatch)
    for words in (["--no\nflag"], ["stray\x1b[31m"], ["--lr"], ["--no_flag=1\n2"]):
        with pytest.raises(UserError) as error:
            parser.parse_args(words)
        assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("alexnet", {"--image_size": 32}, "--image_size 32: not a size for alexnet"),
        ("vit_b_16", {"--image_size": None, "--train_size": 64}, "--train_size 64: not a size"),
        ("resnet18", {"--image_size": 8, "--train_size": None}, None),
        ("inception_v3", {"--image_size": 96}, None),
        ("regnet_x_400mf", {"--image_size": 64}, None),
    ],
)
def test_a_size_that_a_model_cannot_take_is_one_line(name, sizes, says):
    if says is None:
        assert pretrained.check_sizes(name, sizes) is None
        return
    with pytest.raises(UserError, match=says) as error:
        pretrained.check_sizes(name, sizes)
    assert "\n" not in str(error.value)


def test_an_evaluation_never_crops_more_than_there_is():
    with pytest.raises(UserError, match="--eval_resize 200 is less than the 224 pixels"):
        pretrained.preprocessing("resnet18", None, None, 200)
    assert pretrained.preprocessing("resnet18", None, 64, 64)["resize"] == 64


MINIMAL, IMAGES = "scripts/train_minimal.py", "scripts/train_images.py"
GPT, PARALLEL = "scripts/train_gpt.py", "scripts/train_model_parallel.py"


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        (MINIMAL, "--batch_size 1048576", "--batch_size 1048576 is more than the 2880 training"),
        (CIFAR, "--dataset synthetic --model net --batch_size 1048576", "is more than the 5000"),
        (CIFAR, f"--dataset synthetic --seed {2**32}", "--seed: must be an integer, at least 0"),
        (MINIMAL, f"--timeout {'9' * 25}", "--timeout: must be an integer, at least 1"),
        (IMAGES, "--dataset synthetic --image_size 1", "--image_size: must be"),
        (IMAGES, "--dataset synthetic --model alexnet --train_size 24", "not a size for alexnet"),
        (GPT, "--dataset synthetic --batch_size 1048576", "is more than the"),
        (CIFAR, "--dataset synthetic --batch_size 1", "batch norm needs more than the one sample"),
        (
            IMAGES,
            "--dataset synthetic --model resnet18 --image_size 32 --batch_size 4 "
            "--gradient_accumulation_steps 4",
            "batch norm needs more than the one sample",
        ),
        (PARALLEL, "--dataset synthetic --width 12", "--width 12 is not a multiple of 8"),
    ],
)
def test_what_passes_the_parser_is_refused_before_anything_is_written(
    script, arguments, says, tmp_path
):
    done = run(None, script, arguments, output_dir=tmp_path / "run", check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("***")]
    assert done.returncode == 2 and len(errors) == 1 and says in errors[0], done.stderr
    assert not (tmp_path / "run" / "args.json").exists()


def test_the_greatest_seed_and_timeout_train(tmp_path):
    greatest = ["--seed", str(2**32 - 1), "--timeout", str(30 * 24 * 3600)]
    run("2cpu", MINIMAL, ["--max_train_steps", "2", *greatest], output_dir=tmp_path)
