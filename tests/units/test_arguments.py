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
    (tmp_path / "b.args").write_text("--prompt 'a")
    for name, reason in (("b.args", "No closing quota"), ("c.args", r"\[Errno 2\] No such file")):
        with pytest.raises(UserError, match=f"^cannot read the arguments in @{name}: {reason}"):
            parse([f"@{name}"])


def test_frozen_arguments_do_not_change(parse):
    args = parse(["--lr", "2"])
    args.lr = 3.0
    copy = frozen(args)
    assert vars(copy) == vars(args)
    for name in ("lr", "new"):
        with pytest.raises(AttributeError, match=f"after parsing: pass {name} on by itself"):
            setattr(copy, name, 4.0)
    assert copy.lr == 3.0


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


def test_a_preset_in_a_file_decides_the_defaults(tmp_path, monkeypatch):
    (tmp_path / "a.args").write_text("--preset finetune\n--dataset synthetic\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["train_images.py", "@~/a.args", "--lr", "0.5"])
    args = load_script("train_images").parse_args()
    assert (args.preset, args.optimizer, args.lr) == ("finetune", "adamw", 0.5)
