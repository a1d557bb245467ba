"""Lanes of a stream: which launches can share them, and where their readers stand."""

from types import SimpleNamespace

import pytest
from harness import fakes

from utils.language.lanes import RowReader, Share
from utils.language.rows import open_rows
from utils.run.failures import UserError


def test_the_share_of_a_process_follows_from_the_arguments():
    args = SimpleNamespace(batch_size=64, gradient_accumulation_steps=2)
    position = {str(lane): {"taken": 1} for lane in range(8)}
    expected = Share(8, 16, 1, 4, position, accumulation=2)
    assert Share.from_args(args, fakes.accelerator(4, 1), 8, position) == expected
    assert Share.from_args(args, fakes.accelerator(), 64) == Share(64, 64, accumulation=2)
    with pytest.raises(UserError, match="has 8 lanes, and not 16: keep its --batch_size"):
        Share.from_args(args, fakes.accelerator(), 16, position)
    with pytest.raises(UserError, match="which 3 processes cannot share evenly"):
        Share.from_args(args, fakes.accelerator(3), 8)
    args.batch_size = 20
    with pytest.raises(UserError, match="so --batch_size must be a multiple of 8, not 20"):
        Share.from_args(args, fakes.accelerator(4), 8)


def test_a_source_that_no_document_was_taken_from_keeps_its_position(tmp_path):
    """A rare one of a mixture, in the first buffer after a restart."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in range(40)))

    def opened(position):
        table = open_rows(str(tmp_path / "rows.jsonl"), {"text": ("text",)}, "", streaming=True)
        splits = {**table.splits, "val": None}  # so that nothing else is held out
        reader = RowReader(splits, 0, 1, lambda row, where: row["text"].encode())
        reader.seek(position)
        return reader

    first = opened(None)
    rows = iter(first)
    before = [next(rows) for _ in range(7)]
    for _ in range(2):  # restarts, in which nothing is read
        again = opened(first.position)
        assert again.position == first.position
        first = again
    assert before + [row for _, row in zip(range(33), first, strict=False)] == [
        b"%d" % row for row in range(40)
    ]
