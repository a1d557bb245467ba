"""Lanes of a stream: which launches can share them, and what each of them reads."""

from types import SimpleNamespace

import pytest
from harness import fakes

from utils.language.lanes import RowReader, Share, is_held_out
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


def test_lanes_share_the_rows_but_for_those_that_are_held_out(tmp_path):
    texts = [f"text {row}" for row in range(400)]
    rows = "".join(f'{{"text": "{text}"}}\n' for text in texts)
    (tmp_path / "rows.jsonl").write_text(rows)

    def read(lane):
        table = open_rows(str(tmp_path / "rows.jsonl"), {"text": ("text",)}, "", streaming=True)
        reader, found = RowReader(table.splits, lane, 2, lambda row, _: row["text"].encode()), []
        reader.seek(None)
        for document in reader:
            if document in found:  # the next pass
                return found
            found.append(document)

    held_out = {text.encode() for text in texts if is_held_out(text.encode())}
    together = [*read(0), *read(1)]
    assert len(together) == 400 - len(held_out) < 400 and not held_out & {*together}
