"""The order in which lanes take documents of several sources, and which launches can share them."""

from types import SimpleNamespace

import numpy as np
import pytest
from harness import fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.language.lanes import RowReader, Share
from utils.language.rows import open_rows
from utils.language.tokens import count_lanes, next_source
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


def test_common_numbers_of_processes_divide_the_lanes():
    assert [count_lanes(size) for size in (1, 3, 16, 24, 64, 96, 512)] == [1, 1, 16, 8, 64, 32, 64]


def order(weights, count, taken=None, lane=0):
    """The sources of `count` documents; and how many of each were taken."""
    taken, found = taken or [0] * len(weights), []
    for _ in range(count):
        found.append(next_source(weights, taken, lane))
        taken = [n + (source == found[-1]) for source, n in enumerate(taken)]
    return found, taken


@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=6), st.integers(0, 700))
@settings(max_examples=15)
def test_each_source_stays_within_two_documents_of_its_share(weights, stop):
    weights = [weight**3 / sum(one**3 for one in weights) for weight in weights]
    whole, taken = order(weights, 2000)
    for source, weight in enumerate(weights):
        counts = np.cumsum([other == source for other in whole])
        windows = counts[1000:] - counts[:-1000]
        assert abs(windows - 1000 * weight).max() < 2, weights
    together = np.array([order(weights, 300, lane=lane)[0] for lane in range(8)]).T.ravel()
    for source, weight in enumerate(weights):
        counts = np.cumsum(together == source)
        assert abs(counts[1000:] - counts[:-1000] - 1000 * weight).max() < 8  # one percent are ten
    # A resume is an order that begins with what was taken.
    before, taken = order(weights, stop)
    assert before + order(weights, 2000 - stop, taken)[0] == whole


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
