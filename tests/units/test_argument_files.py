"""Arguments from files: @FILE."""

import json

import pytest
from harness.launches import load_script, run

from utils.run.arguments import Parser
from utils.run.failures import UserError


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Parses words, with the folder of the test as the working directory."""
    monkeypatch.chdir(tmp_path)
    parser = Parser()
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--prompt", type=str)
    parser.add_argument("--size", type=int, nargs=2)
    parser.add_argument("--mixture", type=str, nargs="+")
    parser.add_argument("--compile", nargs="?", const="default")
    parser.add_argument("--flag", action="store_true")
    parser.add_argument("rest", nargs="*")
    return parser.parse_args


FILE = """# an experiment
--lr 0.1  # a comment
--prompt "two words # no comment"

  --flag
--size 3 4
"""


def test_a_file_has_a_flag_and_its_value_on_each_line(parse, tmp_path):
    (tmp_path / "a.args").write_text(FILE)
    args = parse(["@a.args"])
    assert args.lr == 0.1 and args.prompt == "two words # no comment" and args.flag
    assert args.size == [3, 4] and args.compile is None
    (tmp_path / "b.args").write_bytes(b"\xef\xbb\xbf--lr=0.2\r\n--compile\r\n")
    assert vars(parse(["@a.args", "@b.args"])) == {**vars(args), "lr": 0.2, "compile": "default"}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--prompt runs/exp#3", "runs/exp#3"),
        ("--prompt data#v2 # a comment", "data#v2"),
        ("--prompt '#3' #4", "#3"),
        ("--prompt a'#'b#c\t# x", "a#b#c"),
        ("--prompt=a#b", "a#b"),
        ("--prompt 0XFF", "0XFF"),
    ],
)
def test_a_comment_begins_where_a_word_could(line, value, parse, tmp_path):
    (tmp_path / "a.args").write_text(f"#--lr 0.2\n  # --lr 0.3\n{line}\n")
    args = parse(["@a.args"])
    assert (args.prompt, args.lr) == (value, 1)


def test_later_flags_win(parse, tmp_path):
    (tmp_path / "a.args").write_text("--lr 0.1\n--lr 0.2\n")
    assert parse(["--lr", "0.3", "@a.args"]).lr == 0.2
    assert parse(["@a.args", "--lr", "0.3"]).lr == 0.3
    assert parse(["--lr=0.3", "@a.args", "--flag"]).lr == 0.2


def test_only_in_the_place_of_a_flag_is_it_a_file(parse, tmp_path):
    (tmp_path / "a.args").write_text("--lr 0.1\n")
    args = parse(["--prompt", "@all hi"])
    assert args.prompt == "@all hi" and args.lr == 1
    assert parse(["--prompt=@a.args"]).prompt == "@a.args"
    args = parse(["--prompt", "@a.args", "@a.args"])
    assert args.prompt == "@a.args" and args.lr == 0.1
    args = parse(["--mixture", "@x", "y", "@a.args"])
    assert args.mixture == ["@x", "y"] and args.lr == 0.1
    args = parse(["--size", "1", "2", "@a.args"])
    assert args.size == [1, 2] and args.lr == 0.1
    with pytest.raises(UserError, match="argument --size: invalid int value"):
        parse(["--size", "1", "@a.args"])  # its second value
    for words in (["--flag", "@a.args"], ["--compile", "@a.args"]):
        assert parse(words).lr == 0.1
    assert parse(["--", "@a.args"]).rest == ["@a.args"]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("lr 0.1", "line 1: must be one flag and its value, such as --lr 0.1, not 'lr 0.1'"),
        ("\n--lr 0.1 --flag", "line 2: must be one flag and its value"),
        ("--flag --lr", "line 1: must be one flag and its value"),
        ("@b.args", "line 1: must be one flag"),
        ("--prompt 'a", "line 1: No closing quotation"),
        ("--speed 3", "unrecognized arguments: --speed"),
        (b"\xff\xfe", "cannot read the arguments in @a.args: 'utf-8'"),
        (None, "cannot read the arguments in @a.args: No such file or directory"),
    ],
)
def test_a_wrong_file_is_one_line(text, reason, parse, tmp_path):
    if text is not None:
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "a.args").write_bytes(data)
    with pytest.raises(UserError) as raised:
        parse(["@a.args"])
    assert reason in str(raised.value)


def test_a_preset_in_a_file_decides_the_defaults(tmp_path, monkeypatch):
    (tmp_path / "a.args").write_text("--preset finetune\n--dataset synthetic\n")
    monkeypatch.setattr("sys.argv", ["train_images.py", f"@{tmp_path}/a.args", "--lr", "0.5"])
    args = load_script("train_images").parse_args()
    assert (args.preset, args.optimizer, args.lr) == ("finetune", "adamw", 0.5)


def test_the_record_holds_what_was_resolved(tmp_path):
    (tmp_path / "a.args").write_text("--lr 0.01\n--max_train_steps 3\n")
    arguments = [f"@{tmp_path}/a.args", "--max_train_steps", "2"]
    run("2cpu", "scripts/train_minimal.py", arguments, output_dir=tmp_path / "run")
    recorded = json.loads((tmp_path / "run" / "args.json").read_text())["arguments"]
    assert (recorded["lr"], recorded["max_train_steps"]) == (0.01, 2)
    done = run("2cpu", "scripts/train_minimal.py", ["@nowhere"], check=False)
    assert done.stderr.count("error: cannot read the arguments in @nowhere: No such file") == 1
