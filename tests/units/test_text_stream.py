"""The windows of a text that is streamed, and those of a whole text."""

import json
import random

import pytest
import torch
from harness.data import global_batches

from utils.data.loaders import already_a_batch
from utils.language.lanes import Share
from utils.language.text import Windows, load_text, synthetic_text
from utils.language.text_stream import held_out, load_held_out, open_stream
from utils.run.failures import RunFailed, UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Three Parquet files with documents of different lengths, some of them empty."""
    folder, chance = tmp_path_factory.mktemp("shards"), random.Random(0)
    lines = synthetic_text(0).decode().splitlines()
    for part in range(3):
        texts = [
            " ".join(lines[start : start + chance.randint(0, 4)])
            for start in range(part, len(lines), 5)
        ]
        datasets.Dataset.from_dict({"text": texts}).to_parquet(str(folder / f"part-{part}.parquet"))
    return folder


def batches(folder, processes, count, position=None):
    """The windows of `count` global batches, and the position after them as a checkpoint stores it."""
    shares = [Share(6, 12 // processes, p, processes, position) for p in range(processes)]
    readers = [iter(open_stream(str(folder), "text", 16, share, 8, 0)) for share in shares]
    return global_batches(readers, "inputs", count)


def test_any_number_of_processes_streams_the_same_batches_from_any_position(shards):
    whole, _ = batches(shards, 1, 120)
    assert batches(shards, 3, 120)[0] == whole
    for stop in (1, 3, 4, 5, 37, 110):  # a buffer lasts for at least 4 batches
        before, position = batches(shards, 2, stop)
        assert before + batches(shards, 6, 120 - stop, position)[0] == whole, stop
        # Resumed twice: `datasets` 5.0.0 started again from the beginning (datasets#8308).
        middle, position = batches(shards, 2, 5, position)
        assert before + middle + batches(shards, 2, 115 - stop, position)[0] == whole, stop
    windows = [tuple(window) for batch in whole for window in batch]
    assert len(set(windows)) > 0.9 * len(windows)


def test_a_stream_starts_again_at_its_end_and_never_shows_held_out_text(tmp_path):
    documents = [f"document {number:04d} is this one" for number in range(600)]
    rows = [json.dumps({"text": document}) + "\n" for document in documents]
    (tmp_path / "text.jsonl").write_text("".join(rows))
    length = len(documents[0]) + 1
    stream = iter(open_stream(str(tmp_path), "text", length, Share(2, 2), 30, 0))
    windows = [window for _ in range(900) for window in next(stream)["inputs"].tolist()]
    seen = [bytes(window).decode()[9:13] for window in windows]
    kept = {document[9:13] for document in documents if held_out(document.encode() + b"\n")}
    assert 2 <= len(kept) <= 30
    assert set(seen) == {document[9:13] for document in documents} - kept
    assert {seen.count(number) for number in set(seen)} <= {2, 3, 4}  # about three passes
    held = load_held_out(str(tmp_path), "text").held_out
    assert len(held) == len(kept) * length


def test_held_out_windows_predict_every_byte_once():
    data = torch.arange(101, dtype=torch.uint8)
    windows = Windows(data, 16)
    batch = windows.__getitems__(range(len(windows)))
    assert batch["targets"][batch["targets"] >= 0].tolist() == list(range(1, 101))
    assert torch.equal(batch["inputs"][:-1, 1:], batch["targets"][:-1, :-1])


def test_batches_are_contiguous(shards):
    """A pinned batch that is not would be copied to the GPU through pageable memory, with a wait."""
    windows = Windows(torch.arange(101, dtype=torch.uint8), 16, seed=0)
    streamed = next(iter(open_stream(str(shards), "text", 16, Share(1, 4), 4, 0)))
    for batch in (windows.__getitems__(range(4)), streamed):
        for name in ("inputs", "targets", "ids"):
            assert batch[name].is_contiguous(), name


def test_an_epoch_reads_every_byte_once_at_another_offset_than_the_one_before():
    data = torch.arange(250, dtype=torch.uint8)
    windows, cuts = Windows(data, 16, seed=3), set()
    for epoch in range(8):
        windows.set_offset(epoch)
        read = windows.__getitems__(range(len(windows)))["inputs"].flatten()
        assert len(read) >= 250 - 2 * 16 and torch.equal(
            read, data[read[0] : int(read[0]) + len(read)]
        )
        cuts.add(int(read[0]))
    assert len(cuts) >= 4


def test_persistent_workers_read_from_another_place_in_every_epoch():
    text = torch.arange(200, dtype=torch.uint8)
    windows = Windows(text, 10, seed=3)
    loader = torch.utils.data.DataLoader(
        windows, 18, num_workers=1, persistent_workers=True, collate_fn=already_a_batch
    )
    starts = []
    for epoch in range(3):
        windows.set_offset(epoch)
        starts.append(next(iter(loader))["inputs"][0, 0].item())
        assert starts[-1] == windows.shift.item()
    assert len(set(starts)) == 3


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "is empty"),
        ("short.txt", b"To be", "has 5 bytes, too few for --block_size 16"),
        ("a.jsonl", b'{"title": "a", "body": "b"}\n', "give --text_column, one of title, body"),
        ("numbers.jsonl", b'{"text": 3}\n{"text": 4}\n', "row 0 of --dataset"),
        ("broken.parquet", b"PAR1 and nothing of the kind", "cannot load"),
    ],
)
def test_bad_text_is_explained(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_text(str(tmp_path / name), "text", 16)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_stream_that_fails_midway_ends_the_run(tmp_path):
    lines = [b'{"text": "fine so far"}\n'] * 200
    (tmp_path / "a.jsonl").write_bytes(b"".join([*lines, b'{"text": "\xff\xfe\xfd"}\n']))
    with pytest.raises(RunFailed, match="cannot be read after row"):
        list(open_stream(str(tmp_path), "text", 16, Share(1, 4), 200, 0))
    for name in (str(tmp_path / "b.txt"), "synthetic"):
        (tmp_path / "b.txt").write_text("plain")
        with pytest.raises(UserError, match="is mapped into memory: leave out --streaming"):
            load_held_out(name, "text")
