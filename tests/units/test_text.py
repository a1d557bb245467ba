"""Text as bytes: what is trained on, what is held out, and its windows."""

import json
import os
from hashlib import sha256

import numpy as np
import pytest
import torch
from harness.chats import write_files

from utils.language.text import (
    Windows,
    load_text,
    read_splits,
    synthetic_text,
)
from utils.run.failures import UserError

datasets = pytest.importorskip("datasets")


def write(root, **files):
    return str(write_files(root, **files))


def both(name):
    """What is trained on and what is held out."""
    text = load_text(name, "text", 4)
    return bytes(text.train.numpy()).decode(), bytes(text.held_out.numpy()).decode()


def as_lines(text, count=30):
    return "".join(json.dumps({"text": f"{text}{i}"}) + "\n" for i in range(count))


def test_splits_of_text(tmp_path):
    texts = dict(train="alpha " * 40, val="beta " * 40, test="gamma " * 40)
    name = write(tmp_path, **{f"{split}_txt": text for split, text in texts.items()})
    assert both(name) == (texts["train"], texts["val"])
    asked, scored = read_splits(name, "text", use=(("test", "val", "train"),))
    assert bytes(asked["test"].numpy()).decode() == texts["test"] and len(asked) == 1
    for details, expected in (
        (load_text(name, "text", 4).details, ["train", "val", "test, not used"]),
        (scored, ["train, not used", "val, not used", "test"]),
    ):
        assert [line.split(":")[0] for line in details] == expected


def test_without_validation_text_the_last_tenth_of_train_is_held_out(tmp_path):
    train, held_out = both(write(tmp_path, train_txt="0123456789" * 10, test_txt="no" * 100))
    assert (train + held_out, len(held_out)) == ("0123456789" * 10, 10)
    made = sha256(synthetic_text(3, 500)).hexdigest()  # the same on every machine
    assert made.startswith("98c2a4ca940f8991") and synthetic_text(3) != synthetic_text(4)
    texts, details = read_splits("synthetic", "text", 3)
    assert bytes(texts["train"].numpy()) == synthetic_text(3) and details == []


def test_rows_end_with_a_line_and_other_files_are_left_out(tmp_path):
    rows = as_lines("w", 20) + '{"text": "last\\n"}\n\n'
    name = write(tmp_path / "rows", README_md="no", data__x_ndjson=rows)
    assert "".join(both(name)) == "".join(f"w{i}\n" for i in range(20)) + "last\n"
    name = write(tmp_path / "plain", a_txt="words " * 20)
    os.mkfifo(f"{name}/b.txt")  # nobody waits for it
    assert "".join(both(name)) == "words " * 20
    with pytest.raises(UserError, match="not a regular file"):
        load_text(f"{name}/b.txt", "text", 4)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "is empty"),
        ("short.txt", b"To be", "has 5 bytes, too few for --block_size 16"),
        ("numbers.jsonl", b'{"text": 3}\n{"text": 4}\n', "row 0 of --dataset"),
        ("broken.parquet", b"PAR1 and nothing of the kind", "cannot load"),
    ],
)
def test_bad_text_is_explained(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_text(str(tmp_path / name), "text", 16)
    assert says in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------ mapped, cached


def test_a_text_file_is_mapped_and_not_copied(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789" * 20)
    text = load_text(str(file), "text", 4)
    with file.open("r+b") as opened:
        opened.write(b"abc")
    assert bytes(text.train[:5].tolist()) == b"abc34" and len(text.held_out) == 20


@pytest.mark.parametrize("kind", ["files", "rows"])
def test_a_text_of_several_parts_is_written_to_the_cache_once(kind, tmp_path, monkeypatch):
    data, cache = tmp_path / "data", tmp_path / "cache"
    rows, files = dict(a_jsonl=as_lines("words ")), dict(a_txt="0123" * 25, b_txt="abcdefghij" * 10)
    write(data, **(rows if kind == "rows" else files))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    made, again = load_text(str(data), "text", 4), load_text(str(data), "text", 4)
    assert again.description == made.description and torch.equal(again.train, made.train)
    (file,) = (cache / "text").iterdir()
    with file.open("r+b") as opened:
        opened.write(b"!")
    assert again.train[0] == made.train[0] == ord("!")
    os.utime(next(data.iterdir()), (1, 1))
    load_text(str(data), "text", 4)
    assert len(list((cache / "text").iterdir())) == 2


# ------------------------------------------------------------------------------------------ windows


def test_held_out_windows_predict_every_byte_once():
    data = torch.arange(101, dtype=torch.uint8)
    windows = Windows(data, 16)
    batch = windows.__getitems__(range(len(windows)))
    # Otherwise a pinned batch would be copied to the GPU through pageable memory, with a wait.
    assert all(part.is_contiguous() for part in batch.values())
    assert batch["targets"][batch["targets"] >= 0].tolist() == list(range(1, 101))
    assert torch.equal(batch["inputs"][:-1, 1:], batch["targets"][:-1, :-1])
    some = windows.select(np.array([2, 6])).__getitems__([0, 1])
    assert all(torch.equal(some[name], batch[name][[2, 6]]) for name in batch)
    assert len(Windows(data[:97], 16)) == 6  # all are full


def test_an_epoch_reads_every_byte_once_at_another_offset_than_the_one_before():
    data = torch.arange(250, dtype=torch.uint8)
    windows, cuts = Windows(data, 16, seed=3), set()
    for epoch in range(8):
        keys = [(epoch, index) for index in range(len(windows))]
        read = windows.__getitems__(keys)["inputs"].flatten()
        first = int(read[0])
        assert len(read) >= 250 - 2 * 16 and torch.equal(read, data[first : first + len(read)])
        assert torch.equal(windows.__getitems__(keys[3:5])["inputs"].flatten(), read[48:80])
        cuts.add(first)
    assert len(cuts) >= 4
