"""Arguments from files: what a line may be, and who reads them; arguments stay as they are."""

from types import SimpleNamespace

import pytest
from harness.launches import load_script

from utils.run.arguments import Parser, frozen
from utils.run.failures import UserError


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Parses words, with the folder of the test as the working directory."""
    monkeypatch.chdir(tmp_path)
    parser = Parser()
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--prompt", type=str)
    parser.add_argument("--size", type=int, nargs=2)
    parser.add_argument("--compile", nargs="?", const="default")
    parser.add_argument("--flag", action="store_true")
    parser.add_argument("rest", nargs="*", type=str)
    return parser.parse_args


def test_the_lines_of_a_file(parse, tmp_path):
    """That they stand in front of all flags is in tests/properties/test_flag_properties.py."""
    text = '#--lr 0.2\r\n--prompt "a#b # c"\r\n\r\n  --flag\r\n--size 3 4\r\n--compile\r\n'
    (tmp_path / "a.args").write_bytes(b"\xef\xbb\xbf" + text.encode())
    expected = dict(prompt="a#b # c", lr=1, flag=True, size=[3, 4], compile="default", rest=[])
    assert vars(parse(["@a.args"])) == expected
    assert parse(["--prompt", "x", "@a.args"]).rest == ["@a.args"]
    assert parse(["--lr", "2"], SimpleNamespace(model="a")).model == "a"


def test_frozen_arguments_do_not_change(parse):
    args = parse(["--lr", "2"])
    args.lr = 3.0
    copy = frozen(args)
    assert vars(copy) == vars(args)
    for name in ("lr", "new"):
        with pytest.raises(AttributeError, match=f"after parsing: pass {name} on by itself"):
            setattr(copy, name, 4.0)
    assert copy.lr == 3.0


def test_a_wrong_file_is_one_line(parse, tmp_path):
    with pytest.raises(
        UserError, match=r"^cannot read the arguments in @a.args: \[Errno 2\] No su"
    ):
        parse(["@a.args"])
    (tmp_path / "a.args").write_text("--prompt 'a")
    with pytest.raises(UserError, match=r"^cannot read the arguments in @a.args: No closing quota"):
        parse(["@a.args"])


@pytest.mark.parametrize(
    ("word", "flag"),
    [("learning_rate", "lr"), ("learning-rate", "lr"), ("num_train_epochs", "epochs")]
    + [("per_device_train_batch_size", "batch_size"), ("max_steps", "max_train_steps")]
    + [("report_to", None), ("nothing_like_it", None)],
)
def test_a_mistyped_flag_is_compared_with_those_that_there_are(word, flag):
    parser = Parser()
    parser.add_training_arguments(parser)
    hint = f": did you mean --{flag}?" if flag else ""
    with pytest.raises(UserError) as raised:
        parser.parse_args([f"--{word}", "3"])
    assert str(raised.value) == f"unrecognized arguments: --{word} 3{hint} (see --help)"


def test_each_mistyped_flag_gets_one_hint():
    parser = Parser()
    parser.add_training_arguments(parser)
    with pytest.raises(UserError, match="did you mean --lr and --batch_size"):
        parser.parse_args("--learning_rate 1 --batchsize 2".split())
    with pytest.raises(UserError) as raised:
        parser.parse_args(["--lr"])
    assert "did you mean" not in str(raised.value)


def test_a_preset_in_a_file_decides_the_defaults(tmp_path, monkeypatch):
    (tmp_path / "a.args").write_text("--preset finetune\n--dataset synthetic\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["train_images.py", "@~/a.args", "--lr", "0.5"])
    args = load_script("train_images").parse_args()
    assert (args.preset, args.optimizer, args.lr) == ("finetune", "adamw", 0.5)
