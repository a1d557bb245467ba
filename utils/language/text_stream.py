"""Streams text: an endless, shuffled stream of windows that continues exactly after a restart.

A window has `block_size + 1` bytes, as in `text`.
"""

import zlib
from functools import partial

import torch

from utils.data.cache_files import checksum
from utils.language import lanes
from utils.language.rows import open_rows
from utils.language.text import Text, check_column, encode_row
from utils.run.failures import UserError

HELD_OUT_BYTES = 1 << 20  # bytes of a stream that are held out for evaluation


def held_out(document):
    """Whether a document is held out for evaluation.

    A deterministic function of its bytes, so it is the same on every process.
    """
    return zlib.crc32(document) % lanes.HELD_OUT_ONE_IN == 0


def load_held_out(name, column):
    """Reads the documents of a stream that are held out, until they have `HELD_OUT_BYTES`.

    They are those of its `val` split, or else 1 in `lanes.HELD_OUT_ONE_IN` of `train`.

    Returns:
        Text: without a text to train on. The checksum is of the held-out text; of local files also
        of their names, sizes and first bytes.

    Raises:
        UserError: the stream cannot be read, has no such column, or has too little text.
    """
    table, encode = _open(name, column), partial(_encode, column)
    documents = lanes.read_held_out(name, table.splits, encode, held_out, len, HELD_OUT_BYTES)
    joined = b"".join(documents)
    text = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
    if len(text) < 2:
        raise UserError(f"--dataset {name} holds out {len(text)} bytes: too few")
    size = f"a stream, of which {len(text):,} bytes are held out"
    return Text(None, text, f"{size} (fingerprint {checksum(joined, table.sample())})", [])


def _open(name, column):
    return open_rows(name, partial(check_column, name, column), streaming=True)


def _encode(column, row, where):
    """The text of a row with a newline, as bytes; none for an empty line."""
    return b"" if row is None else encode_row(row, column, where) + b"\n"


def open_stream(name, column, block_size, share, buffer, seed):
    """Opens this process' share of an endless, shuffled stream of micro-batches of windows.

    The lanes are parts of the data by files, if the number of files is a multiple of theirs, else
    by rows. The end of a buffer, which fills no window, is left out.

    Args:
        share (lanes.Share): what this process reads.
        buffer (int): windows among which a lane shuffles, or a few more.

    Returns:
        lanes.LaneStream.

    Raises:
        UserError: the stream cannot be opened, or its lanes do not divide over the processes or
            the batch.
    """

    def open_lane(number):
        splits, encode = _open(name, column).splits, partial(_encode, column)
        reader = lanes.RowReader(splits, number, share.lanes, encode, held_out)
        source = lanes.Source(reader, partial(_cut, block_size))
        return lanes.Lane([source], len, buffer * block_size + 1, number, seed)

    return lanes.LaneStream(open_lane, share, _collate)


def _cut(block_size, documents):
    """Windows, uint8 [windows, block_size + 1]: each begins with the last byte before it."""
    text = torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)
    return text.unfold(0, block_size + 1, block_size)


def _collate(windows):
    windows = torch.stack(windows).long()
    return {
        "inputs": windows[:, :-1].contiguous(),
        "targets": windows[:, 1:].contiguous(),
        "ids": torch.arange(len(windows)),
    }
