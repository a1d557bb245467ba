"""The flags that the training scripts share: their defaults, their limits and what `--help` says."""

import sys
from pathlib import Path

import pytest

from utils.run.arguments import CONTINUE_RULE, MAY_CHANGE, Parser
from utils.run.failures import UserError

# Flag -> its default, and the least and the greatest value that it takes.
FLAGS = {
    "epochs": (3, 1, 2**53),
    "max_train_steps": (None, 1, 2**53),
    "batch_size": (8, 1, 2**20),
    "lr": (0.5, 0, 1000),
    "weight_decay": (0.25, 0, 100),
    "max_grad_norm": (0.0, 0, None),
    "gradient_accumulation_steps": (1, 1, 10_000),
    "checkpoint_every": (None, 0, None),
    "keep_checkpoints": (2, 1, None),
    "eval_every": (None, 1, None),
    "eval_samples": (None, 0, None),
    "patience": (None, 1, None),
    "log_every": (None, 1, None),
    "seed": (0, 0, 2**32 - 1),
    "timeout": (600, 1, 30 * 24 * 3600),
    "num_workers": (0, 0, 256),
    "val_fraction": (0.1, 0, None),
}
TEXTS = {
    "output_dir": "runs/train_it",
    "resume": "auto",
    "init_from": None,
    "push_to_hub": None,
    "dataset": "me/data",
    "track": "tensorboard",
}
SWITCHES = ("dry_run", "overfit_batch", "profile", "nondeterministic", "wait_for_checkpoints")


@pytest.fixture
def parse(monkeypatch):
    """Parses a command line with all flags that scripts share."""

    def call(*words, training=True):
        monkeypatch.setattr(sys, "argv", ["scripts/train_it.py", *map(str, words)])
        parser = built()
        return parser.parse_training_args() if training else parser.parse_args()

    return call


def built(val_fraction=0.1, dataset="me/data"):
    parser = Parser(description="Trains it.")
    group = parser.add_argument_group("training")
    parser.add_training_arguments(group, epochs=3, batch_size=8, lr=0.5)
    parser.add_optimizer_arguments(group, weight_decay=0.25)
    parser.add_run_arguments()
    parser.add_data_arguments(dataset, "a Hub id or a folder")
    assert parser.add_image_arguments(val_fraction).title == "data set"
    return parser


def test_defaults(parse):
    defaults = {name: default for name, (default, _, _) in FLAGS.items()}
    columns = {"image_column": None, "label_column": None}
    assert vars(parse()) == defaults | TEXTS | columns | dict.fromkeys(SWITCHES, False)


def test_both_columns_are_given_at_once(parse):
    args = parse("--columns", "photo", "kind")
    assert (args.image_column, args.label_column) == ("photo", "kind") and "columns" not in args
    with pytest.raises(UserError, match="argument --columns: expected 2 arguments"):
        parse("--columns", "photo")


@pytest.mark.parametrize("flag", FLAGS)
def test_limits(flag, parse):
    _, least, most = FLAGS[flag]
    assert getattr(parse(f"--{flag}", least), flag) == least
    with pytest.raises(UserError, match=rf"argument --{flag}: .* \(see --help\)"):
        parse(f"--{flag}", least - 1)
    if most is None:
        return
    with pytest.raises(UserError, match=f"argument --{flag}: "):
        parse(f"--{flag}", most * 1024)
    if most != 2**53:  # far beyond what a run can be
        assert getattr(parse(f"--{flag}", most), flag) == most
        with pytest.raises(UserError, match=f"argument --{flag}: "):
            parse(f"--{flag}", most + 1)


@pytest.mark.parametrize(("value", "taken"), [("0.999", True), ("1e-6", True), ("1", False)])
def test_a_share_is_below_one_and_not_next_to_nothing(value, taken, parse):
    if taken:
        assert parse("--val_fraction", value).val_fraction == float(value)
        return
    for refused in (value, "1e-7"):
        with pytest.raises(UserError):
            parse("--val_fraction", refused)


@pytest.mark.parametrize("flag", TEXTS)
def test_texts(flag, parse):
    assert getattr(parse(f"--{flag}", "some/text", training=False), flag) == "some/text"
    with pytest.raises(UserError):
        parse(f"--{flag}", "")


def test_a_flag_is_never_guessed(parse):
    with pytest.raises(UserError, match="unrecognized arguments: --epoch 5"):
        parse("--epoch", 5)


def test_a_data_set_may_have_to_be_given(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_it.py"])
    with pytest.raises(UserError, match="the following arguments are required: --dataset"):
        built(dataset=None).parse_args()


def test_a_choice_is_known_before_the_others(monkeypatch):
    parser = Parser()
    parser.add_argument("--preset", default="large")
    for words, choice in (
        ([], "large"),
        (["--preset", "small", "--unknown", "1"], "small"),
        (["--preset=small"], "small"),
        (["--pre", "small"], "large"),
        (["--preset"], None),
        (["--help"], "large"),
    ):
        monkeypatch.setattr(sys, "argv", ["train_it.py", *words])
        assert parser.choice("preset") == choice


def test_a_quick_run_has_its_own_folder_and_is_not_published(parse):
    args = parse("--dry_run", "--output_dir", "runs/a/", "--push_to_hub", "me/it")
    assert args.output_dir == "runs/a_dry_run" and args.push_to_hub is None
    assert (args.max_train_steps, args.eval_every, args.checkpoint_every, args.log_every) == (
        2,
        1,
        1,
        1,
    )
    args = parse("--overfit_batch", "--output_dir", "runs/a/", "--push_to_hub", "me/it")
    assert args.output_dir == "runs/a_overfit_batch" and args.push_to_hub is None
    assert args.max_train_steps == args.eval_every == 200 and args.checkpoint_every == 0
    own = parse("--overfit_batch", "--eval_every", 9, "--checkpoint_every", 8)
    assert (own.eval_every, own.checkpoint_every) == (9, 8)
    assert parse("--dry_run", "--output_dir", ".").output_dir == f"{Path.cwd()}_dry_run"
    assert parse("--overfit_batch", "--max_train_steps", 7).max_train_steps == 7
    args = parse("--dry_run", "--overfit_batch", "--output_dir", "runs/a")
    assert args.output_dir == "runs/a_dry_run"
    assert parse("--push_to_hub", "me/it").push_to_hub == "me/it"


def test_a_new_run_does_not_continue_another(parse):
    with pytest.raises(UserError, match=r"^--init_from starts a new run and --resume PATH contin"):
        parse("--init_from", "a", "--resume", "b")
    for resume in ("auto", "never"):
        assert parse("--init_from", "a", "--resume", resume).init_from == "a"
    assert parse("--resume", "b").resume == "b"


def test_help_says_each_default_in_words():
    said = {action.dest: action for action in built()._actions}
    formatter = built()._get_formatter()

    def help_of(name):
        return formatter._expand_help(said[name])

    assert help_of("timeout").endswith("before giving up (default: 600)")
    assert help_of("eval_every") == "optimizer steps between evaluations (default: an epoch)"
    assert help_of("checkpoint_every").endswith(
        "preemption (default: an epoch, and at each new highest score)"
    )
    assert help_of("log_every").endswith("(default: 10, fewer in runs of less than 200 steps)")
    for name in ("init_from", "profile", "max_train_steps"):
        assert "default" not in help_of(name)
    assert "default: 0.1 if there is no test split either, else 0" not in help_of("val_fraction")
    (fraction,) = (a for a in built(None)._actions if a.dest == "val_fraction")
    assert fraction.help.endswith(
        "no val split; default: 0.1 if there is no test split either, else 0"
    )
    assert help_of("dataset") == "a Hub id or a folder (default: me/data)"


def test_help_is_made_of_phrases():
    """In lower case and without a period, as `--help` of other programs; it names its sections."""
    for action in built()._actions:
        assert action.help[0].islower() and not action.help.endswith("."), action.dest
        assert not action.help.isupper() and "  " not in action.help
    text = built().format_help()
    for title in ("training:", "run:", "data and tracking:", "data set:"):
        assert f"\n{title}\n" in text
    assert "\nquick checks (in a separate folder next to output_dir):\n" in text
    assert " ".join(text.split()).endswith(CONTINUE_RULE)
    assert "--resume auto|never|PATH" in text and "--init_from PATH" in text
    assert "--push_to_hub REPO" in text


def test_only_one_process_prints_the_help(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    built().print_help()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    built().print_help()
    assert "Trains it." in capsys.readouterr().out
    with open("/dev/null", "w") as file:
        built().print_help(file)
    assert capsys.readouterr().out == ""


def test_what_may_change_are_flags():
    names = set(FLAGS) | set(TEXTS) | set(SWITCHES) | {"compile"}
    assert names >= MAY_CHANGE


def test_a_run_keeps_what_its_scores_are_of():
    assert not MAY_CHANGE & {"eval_samples", "seed", "val_fraction"}
