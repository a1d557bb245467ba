"""The flags that the training scripts share: what they refuse, and what `--help` says."""

import re
import sys
from pathlib import Path

import pytest

from utils import flags
from utils.data import loaders
from utils.run import arguments
from utils.run.arguments import CONTINUE_RULE, Parser
from utils.run.failures import UserError


@pytest.fixture(autouse=True)
def script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/train_it.py"])


def built(**options):
    """A parser with all flags that scripts share."""
    parser = Parser(description="Trains it.")
    group = parser.add_argument_group("training")
    parser.add_training_arguments(group, epochs=3, batch_size=8, lr=0.5)
    flags.add(
        group, *flags.OPTIMIZER, "lr_schedule", "compile", weight_decay=0.25, lr_schedule="cosine"
    )
    run = parser.add_run_arguments()
    flags.add(run, "init_from", "eval_samples", "patience", *flags.EXTRAS)
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", help="a Hub id or a folder", **options)
    flags.add(data, "num_workers", "val_fraction", "columns", val_fraction=0.1)
    return parser


def parse(*words):
    sys.argv[1:] = map(str, words)
    return flags.parse_with_checks(built())


def test_what_nobody_asks_for_is_off():
    values = vars(parse())
    assert {name: values[name] for name in flags.FLAGS if values[name] is not None} == {
        "weight_decay": 0.25,
        "max_grad_norm": 0.0,
        "gradient_accumulation_steps": 1,
        "lr_schedule": "cosine",
        "wait_for_checkpoints": False,
        "track": "tensorboard",
        "profile": False,
        "num_workers": 0,
        "val_fraction": 0.1,
    }


def test_what_is_refused_and_what_may_change():
    assert parse("--compile").compile == "default"
    assert parse("--eval_samples", 0).eval_samples == 0  # all
    for name in ("weight_decay", "max_grad_norm"):
        assert getattr(parse(f"--{name}", 0.5), name) == 0.5
    with pytest.raises(UserError, match="the following arguments are required: --dataset"):
        built(required=True).parse_args([])
    for resume in ("auto", "never"):
        assert parse("--init_from", "a", "--resume", resume).init_from == "a"
    assert parse("--resume", "b").resume == "b"
    for words, says in (
        ("--epoch 5", "unrecognized arguments: --epoch 5"),  # a flag is never guessed
        ("--columns photo", "argument --columns: expected 2 arguments"),
        ("--compile fast", "argument --compile: invalid choice: 'fast'"),
        ("--num_workers 257", "argument --num_workers: .*at most 256"),
        ("--gradient_accumulation_steps 0", "argument --gradient_accumulation_steps: .*at least 1"),
        ("--weight_decay 101", "argument --weight_decay: .*at most 100"),
        ("--val_fraction 1", "argument --val_fraction: .*below 1"),
        ("--patience 1 --checkpoint_every 0", "^--patience .*: leave out --checkpoint_every 0"),
        ("--init_from a --resume b", "^--init_from starts a new run and --resume PATH contin"),
    ):
        with pytest.raises(UserError, match=says):
            parse(*words.split())
    may_change = arguments.MAY_CHANGE | flags.MAY_CHANGE | arguments.LENGTH
    assert vars(parse()).keys() >= may_change
    # On which a score depends.
    assert not may_change & {"eval_samples", "seed", "val_fraction", "lr_schedule"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--dry_run"], ("runs/a_dry_run", 2, 1, 1, 1)),
        (["--dry_run", "--overfit_batch"], ("runs/a_dry_run", 2, 1, 1, 1)),
        (["--overfit_batch"], ("runs/a_overfit_batch", 200, 200, 0, None)),
        (
            ["--overfit_batch", "--max_train_steps", 7, "--checkpoint_every", 8],
            ("runs/a_overfit_batch", 7, 7, 8, None),
        ),
        (["--overfit_batch", "--eval_every", 9], ("runs/a_overfit_batch", 200, 9, 0, None)),
    ],
)
def test_a_quick_run_has_its_own_folder_and_no_patience(words, expected):
    args = parse("--output_dir", "runs/a/", "--patience", 3, *words)
    steps = (args.max_train_steps, args.eval_every, args.checkpoint_every, args.log_every)
    assert (args.output_dir, *steps) == expected and args.patience is None
    kind = expected[0].removeprefix("runs/a")  # also of a folder that is named by dots
    assert parse(*words, "--output_dir", ".").output_dir == f"{Path.cwd()}{kind}"
    assert parse(*words, "--output_dir", "..").output_dir == f"{Path.cwd().parent}{kind}"


def test_help_says_each_default_in_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")  # each flag on one line
    parser = built()
    text = parser.format_help()
    said = dict(re.findall(r"^  --(\w+).*?(?:\n +|  +)(\S.*)$", text, re.MULTILINE))
    for flag, end in (
        ("timeout", "before giving up (default: 600)"),
        ("eval_every", "optimizer steps between evaluations; default: an epoch"),
        ("track", ", or none (default: tensorboard)"),
        ("val_fraction", "if there is no val split (default: 0.1)"),
        ("lr_schedule", "falls to a tenth of --lr instead of 0 (default: cosine)"),
    ):
        assert said[flag].endswith(end), flag
    for flag in ("init_from", "profile", "max_train_steps"):
        assert "default" not in said[flag]
    for flag, says in said.items():  # phrases, as in `--help` of other programs
        if flag in vars(parser.parse_args([])):
            assert says[0].islower() and not says.endswith(".") and "  " not in says, flag
    assert text.startswith("usage: train_it.py [options]\n")
    assert text.rstrip().endswith(CONTINUE_RULE) and "@FILE in front of all flags stands" in text
    required = built(required=True)
    required.add_argument("run", nargs="?", metavar="RUN")
    text = " ".join(required.format_help().split())
    assert "usage: train_it.py --dataset DATASET RUN [options]" in text


@pytest.mark.parametrize(
    ("words", "samples", "power", "batch_size", "lr"),
    [
        ("", 54, 0.5, 8, 2e-4 * 8**-0.5),
        ("", 255, 1, 32, 1e-4),  # at most a quarter
        ("", 256, 1, 64, 2e-4),
        ("", None, 1, 64, 2e-4),
        ("", 1, 1, 1, 3.125e-6),
        ("--lr 0.5", 54, 1, 8, 0.5),
        ("--batch_size 64", 54, 1, 64, 2e-4),
    ],
)
def test_only_a_default_batch_size_follows_the_data(words, samples, power, batch_size, lr, capsys):
    sys.argv[1:] = words.split()
    parser = built()
    parser.set_defaults(batch_size=64, lr=2e-4)
    args = flags.parse_with_checks(parser)
    fitted = loaders.fit_batch_size(args, samples, power)
    changed = {"batch_size": batch_size, "lr": pytest.approx(lr)}
    assert vars(fitted) == vars(args) | changed
    line = capsys.readouterr().out
    assert (f"batch size {batch_size} instead of 64" in line) == (batch_size != 64)
    assert ("--lr" in line) == (batch_size != 64 and not words)


@pytest.mark.parametrize(
    ("line", "value"),
    [("--help --model b", "b"), ("--mod b", "a"), ("@a.args", "c"), ("--model=b --no 1", "b")],
)
def test_a_choice_is_read_before_the_other_flags(line, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *line.split()])
    (tmp_path / "a.args").write_text("--model c\n")
    parser = Parser()
    parser.add_argument("--model", default="a")
    assert flags.choice(parser, "model") == value
