"""Streams text: an endless, shuffled stream of windows that continues exactly after a restart.

A window has `block_size + 1` bytes, as in `text`.
"""

import random
import zlib
from functools import partial

import torch

from utils.language import lanes
from utils.language.rows import check_column, encode_row, open_rows, stream_of
from utils.language.synthetic import synthetic_text
from utils.language.text import (
    Text,
    checksum,
    describe_files,
    without_test,
)
from utils.language.text_files import find_files, samples
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
    splits, encode = _open(name, column), partial(_encode, column)
    documents = lanes.read_held_out(name, splits, encode, held_out, len, HELD_OUT_BYTES)
    parts, details = [b"".join(documents)], []
    text = torch.frombuffer(bytearray(parts[0]), dtype=torch.uint8)
    if len(text) < 2:
        raise UserError(f"--dataset {name} holds out {len(text)} bytes: too few")
    files = None if name == "synthetic" else find_files(name)
    if files:
        parts += samples(files)
        details = [*describe_files(files, without_test(files.by_split)), *files.left_out.lines()]
    size = f"a stream, of which {len(text):,} bytes are held out"
    return Text(None, text, f"{size} (fingerprint {checksum(*parts)})", details)


def _open(name, column):
    """The splits of a stream: dict of `Rows`."""
    if name == "synthetic":
        rows = [{column: line} for line in synthetic_text(0).decode().splitlines()]
        return {"train": stream_of(rows, "--dataset synthetic")}
    choose = partial(check_column, name, column)
    return open_rows(name, find_files(name), choose, streaming=True).splits


def _encode(column, row, where):
    """The text of a row with a newline, as bytes; none for an empty line."""
    return b"" if row is None else encode_row(row, column, where) + b"\n"


class TextStream(lanes.LaneStream):
    """This process' share of an endless, shuffled stream of micro-batches of windows.

    The lanes are parts of the data by files, if the number of files is a multiple of theirs, else
    by rows.

    A lane fills a buffer with `buffer` windows, yields them in random order, and then fills the
    next buffer. Its position is the start of the buffer and the number of windows yielded from it:
    after a restart the same buffer is read again.

    Args:
        share (Share): what this process reads.
        buffer (int): windows among which a lane shuffles.

    Raises:
        UserError: the lanes do not divide over the processes or the batch.
    """

    def __init__(self, name, column, block_size, share, buffer, seed):
        def open_lane(number):
            splits, encode = _open(name, column), partial(_encode, column)
            reader = lanes.open_reader(splits, number, share.lanes, encode, held_out)
            return _Lane(reader, block_size, buffer, f"{seed} {number}")

        super().__init__(open_lane, share)

    @classmethod
    def from_args(cls, args, accelerator, position=None):
        """Creates the share of this process from the command-line arguments, at `position`."""
        share = lanes.Share.from_args(args, accelerator, args.streaming, position)
        source = args.dataset, args.text_column, args.block_size
        return cls(*source, share, args.shuffle_buffer, args.seed)

    def collate(self, samples):
        """Inputs and targets of windows."""
        windows = torch.stack(samples).long()
        return {
            "inputs": windows[:, :-1].contiguous(),
            "targets": windows[:, 1:].contiguous(),
            "ids": torch.arange(len(samples)),
        }


class _Lane:
    """Yields windows from one part of the stream without end; `position` can be stored as JSON."""

    def __init__(self, reader, block_size, buffer, seed):
        self.reader, self.block_size, self.buffer, self.seed = reader, block_size, buffer, seed
        # Start of the buffer: state of the reader, how many documents to skip from there on, and
        # the byte of the next one; number of the buffer, and of windows yielded ("taken") from it.
        # Not what is left of the document: each checkpoint of each lane would have it.
        self.position = {"rows": None, "skip": 0, "offset": 0, "buffers": 0, "taken": 0}

    def __iter__(self):
        self.reader.seek(self.position["rows"])
        documents = iter(self.reader)
        for _ in range(self.position["skip"]):
            next(documents)
        document = next(documents)
        text = bytearray(document[self.position["offset"] :])
        used = self.buffer * self.block_size
        while True:
            start, rows, read = self.position, self.reader.position, 0
            next_start = {**start, "buffers": start["buffers"] + 1, "taken": 0}
            while len(text) < used + 1:
                document = next(documents)
                text += document
                next_start |= {"rows": rows, "skip": read}
                read += 1
            next_start["offset"] = len(document) - len(text) + used
            data = torch.frombuffer(text[: used + 1], dtype=torch.uint8)
            del text[:used]
            windows = data.unfold(0, self.block_size + 1, self.block_size)
            order = list(range(self.buffer))
            random.Random(f"{self.seed} {start['buffers']}").shuffle(order)
            for taken in range(start["taken"], self.buffer):
                is_last = taken + 1 == self.buffer
                self.position = next_start if is_last else {**start, "taken": taken + 1}
                yield windows[order[taken]]
