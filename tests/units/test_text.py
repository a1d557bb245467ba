"""Which text of a folder or a table is trained on, which is held out, and what is left out."""

import json
import os

import pytest
import torch

from utils.data import cache_files
from utils.language.text import Windows, load_text, load_to_evaluate
from utils.language.text_stream import load_held_out
from utils.run.failures import UserError

WORDS = {"train": "alpha ", "val": "beta ", "test": "gamma "}


def write(root, **files):
    """Writes texts: `sub__a_txt` becomes sub/a.txt."""
    for name, text in files.items():
        path = root.joinpath(*name.replace("_", ".").split(".."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(root)


def both(name, column="text"):
    """What is trained on and what is held out."""
    text = load_text(name, column, 4)
    return bytes(text.train.numpy()).decode(), bytes(text.held_out.numpy()).decode()


def everything(name, column="text"):
    return "".join(both(name, column))


def as_lines(text, count=30):
    return "".join(json.dumps({"text": f"{text}{i}"}) + "\n" for i in range(count))


def as_csv(text):
    return "title,text\n" + "".join(f"no,{text}{i}\n" for i in range(30))


@pytest.mark.parametrize("make", [lambda word: word * 40, as_lines, as_csv])
@pytest.mark.parametrize("names", ["train val test", "Training valid Testing"])
@pytest.mark.parametrize("folders", [False, True])
def test_splits_of_text(make, names, folders, tmp_path):
    suffix = {as_lines: "jsonl", as_csv: "csv"}.get(make, "txt")
    for split, name in zip(WORDS, names.split(), strict=True):
        path = tmp_path / name / f"0.{suffix}" if folders else tmp_path / f"{name}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(make(WORDS[split]))
    train, held_out = both(str(tmp_path))
    assert set(train) <= set("alpha 0123456789\n") and len(train) > 200
    assert set(held_out) <= set("beta 0123456789\n") and len(held_out) >= 180
    details = load_text(str(tmp_path), "text", 4).details
    assert [line.split(":")[0] for line in details] == ["train", "val", "test, not used"]
    split, scored = load_to_evaluate(str(tmp_path), "text")
    assert split == "test" and set(bytes(scored.held_out.numpy())) <= set(b"gamma 0123456789\n")
    details = [line.split(":")[0] for line in scored.details]
    assert details == ["train, not used", "val, not used", "test"]


def test_without_validation_text_the_last_tenth_of_train_is_held_out(tmp_path):
    train, held_out = both(write(tmp_path, train_txt="0123456789" * 10, test_txt="no" * 100))
    assert (train + held_out, len(held_out)) == ("0123456789" * 10, 10)
    split, scored = load_to_evaluate(write(tmp_path / "all", train_txt="0123456789"), "text")
    assert split == "all" and bytes(scored.held_out.numpy()) == b"0123456789"
    with pytest.raises(UserError, match="has 1 bytes: too few"):
        load_to_evaluate(write(tmp_path / "short", train_txt="0"), "text")
    alone, rest = both(write(tmp_path / "one", train_txt="0123456789" * 10))
    assert (alone, rest) == (train, held_out)


def test_other_files_beside_tables_are_left_out(tmp_path):
    table = write(tmp_path / "b", README_md="no", data__x_ndjson=as_lines("w", 20))
    assert everything(table) == "".join(f"w{i}\n" for i in range(20))


def test_bytes_that_are_no_text_are_said(tmp_path):
    name = write(tmp_path, a_txt=b"ab\0" * 40)
    assert "it has zero bytes" in load_text(name, "text", 4).details[-1]


def test_a_text_that_is_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "a.txt").write_text("words " * 20)
    assert everything(str(tmp_path)) == "words " * 20
    with pytest.raises(UserError, match="not a regular file"):
        load_text(str(tmp_path / "b.txt"), "text", 4)


# ------------------------------------------------------------------------------------ mapped, cached


def test_a_text_file_is_mapped_and_not_copied(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789" * 20)
    text = load_text(str(file), "text", 4)
    with file.open("r+b") as opened:
        opened.write(b"abc")
    assert bytes(text.train[:5].tolist()) == b"abc34" and len(text.held_out) == 20
    assert first_window(text.train) == [list(b"abc34567"), list(b"bc345678")]


def first_window(text):
    batch = Windows(text, 8).__getitems__([0])
    return [batch[name][0].tolist() for name in ("inputs", "targets")]


@pytest.mark.parametrize("kind", ["files", "rows"])
def test_a_long_text_is_written_to_the_cache_once(kind, tmp_path, monkeypatch):
    short = [load_text(*source_of(kind, tmp_path / "data"), 4) for _ in range(2)][1]
    cache = tmp_path / "cache" / "text"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_files, "SHORT", 100)
    made = load_text(*source_of(kind, tmp_path / "data"), 4)
    (file,) = cache.iterdir()
    assert file.suffix == ".bin" and torch.equal(made.train, short.train)
    assert torch.equal(made.held_out, short.held_out) and made.details == short.details
    with monkeypatch.context() as patched:  # the second process reads nothing but the cache
        patched.setattr(cache_files.secrets, "token_hex", None)
        again = load_text(*source_of(kind, tmp_path / "data"), 4)
    assert again.description == made.description and torch.equal(again.train, made.train)
    with file.open("r+b") as opened:
        opened.write(b"!")
    assert again.train[0] == ord("!")
    os.utime(next(path for path in (tmp_path / "data").iterdir()), (1, 1))
    load_text(*source_of(kind, tmp_path / "data"), 4)
    assert len(list(cache.iterdir())) == 2


def source_of(kind, folder):
    if not folder.exists():
        if kind == "rows":
            write(folder, a_jsonl=as_lines("words "))
        else:
            write(folder, a_txt="0123456789" * 10, b_txt="abcdefghij" * 10)
    return str(folder), "text"


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_files, "SHORT", 100)
    with pytest.raises(UserError, match=r"cannot write the text to .*set HF_DATASETS_CACHE") as e:
        load_text(*source_of("files", tmp_path / "data"), 4)
    assert str(e.value).endswith(" (Not a directory)")  # not for want of space


# ----------------------------------------------------------------------------- streams, fingerprint


@pytest.mark.parametrize(
    "load", [lambda root: load_text(root, "text", 4), lambda root: load_held_out(root, "text")]
)
def test_text_that_changed_has_another_description(load, tmp_path):
    made = [
        write(tmp_path / name, train_jsonl=as_lines(word), val_jsonl=as_lines(held_out))
        for name, word, held_out in (
            ("a", "alpha", "beta"),
            ("copy", "alpha", "beta"),
            ("b", "alpho", "beta"),
            ("c", "alpha", "beto"),
        )
    ]
    first, copy, *others = (load(root).description for root in made)
    assert copy == first and first not in others and "fingerprint" in first
