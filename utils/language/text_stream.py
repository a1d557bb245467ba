"""Streams text: an endless, shuffled stream of windows that continues exactly after a restart.

A window has `block_size + 1` bytes, as in `text`.
"""

import random
import zlib
from functools import partial
from typing import NamedTuple

import torch

from utils.data.report import LeftOut
from utils.data.tables import first_line
from utils.language.lanes import LaneStream, check_lanes
from utils.language.text import (
    checksum,
    describe_files,
    synthetic_text,
    without_test,
)
from utils.language.text_files import TextTable, find_files, load_column, samples
from utils.run.failures import RunFailed, UserError

HELD_OUT_BYTES = 1 << 20  # bytes of a stream that are held out for evaluation
HELD_OUT_ONE_IN = 64  # 1 in 64 documents of a stream is held out


def held_out(document):
    """Whether a document is held out for evaluation.

    A deterministic function of its bytes, so it is the same on every process.
    """
    return zlib.crc32(document) % HELD_OUT_ONE_IN == 0


def load_held_out(name, column, block_size):
    """Reads the documents of a stream that are held out, until they have `HELD_OUT_BYTES`.

    They are those of its `val` split, or else 1 in `HELD_OUT_ONE_IN` of `train`.

    Returns:
        uint8 [bytes].

    Raises:
        UserError: the stream cannot be read, has no such column, or has too little text.
    """
    text, documents, table = bytearray(), 0, open_stream(name, column)
    whole = "val" in table.splits
    rows = table.splits["val" if whole else "train"]
    for document in _documents(table, rows, name, UserError):
        documents += 1
        if whole or held_out(document):
            text += document
            if len(text) >= HELD_OUT_BYTES:
                break
    if len(text) < 2:
        raise UserError(
            f"--dataset {name} has {documents} rows, none of which is held out for evaluation (1 "
            f"in {HELD_OUT_ONE_IN} is): too small to stream, run without --streaming"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


class StreamReport(NamedTuple):
    """What is said about a stream: `description`, with a checksum, and `details`."""

    description: str
    details: list


def describe_stream(name, held_out):
    """Describes a stream.

    Args:
        held_out: uint8 [bytes], what `load_held_out` returned.

    Returns:
        StreamReport: the checksum is of the held-out text; of local files also of their names,
        sizes and first bytes.
    """
    known, details = [bytes(held_out.numpy())], []
    files = None if name == "synthetic" else find_files(name)
    if files:
        known += samples(files)
        details = [*describe_files(files, without_test(files.by_split)), *files.left_out.lines()]
    size = f"a stream, of which {len(held_out):,} bytes are held out"
    return StreamReport(f"{size} (fingerprint {checksum(*known)})", details)


def open_stream(name, column):
    """Opens a `TextTable` of `datasets.IterableDataset`, which reads rows as they are needed."""
    if name == "synthetic":
        import datasets  # here, because it takes a second

        rows = [{column: line} for line in synthetic_text(0).decode().splitlines()]
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=8)
        return TextTable({"train": stream}, column, False, LeftOut())
    table = load_column(name, column, find_files(name), streaming=True)
    used = ["text" if table.lines else column]
    splits = {split: rows.select_columns(used) for split, rows in table.splits.items()}
    return table._replace(splits=splits)


class TextStream(LaneStream):
    """This process' share of an endless, shuffled stream of micro-batches of windows.

    The lanes are parts of the data by files, if the number of files is a multiple of theirs, else
    by rows.

    A lane fills a buffer with `buffer` windows, yields them in random order, and then fills the
    next buffer. Its position is the start of the buffer and the number of windows yielded from it:
    after a restart the same buffer is read again.

    Args:
        micro_batch (int): windows per batch on this process.
        lanes (int): number of parts.
        buffer (int): windows among which a lane shuffles.
        share (tuple[int, int]): index of this process, number of processes.
        position (dict | None): lane number (as a string) -> position, gathered from all processes
            after the last batch.

    Raises:
        UserError: the lanes do not divide over the processes or the batch.
    """

    def __init__(
        self, name, column, block_size, micro_batch, *, lanes, buffer, seed, share, position=None
    ):
        from datasets.distributed import split_dataset_by_node  # here, because it takes a second

        def open_lane(number):
            table = open_stream(name, column)
            rows = split_dataset_by_node(table.splits["train"], number, lanes)
            return _Lane(rows, table, name, block_size, buffer, f"{seed} {number}")

        super().__init__(open_lane, micro_batch, lanes=lanes, share=share, position=position)

    @classmethod
    def from_args(cls, args, accelerator, position=None):
        """Creates the share of this process from the command-line arguments, at `position`."""
        check_lanes(accelerator, args.streaming)
        if any("offset" not in place for place in (position or {}).values()):
            raise UserError(
                "this run with --streaming was begun by an earlier version, whose position in the "
                "data cannot be continued: use another --output_dir"
            )
        micro_batch = args.batch_size // args.gradient_accumulation_steps
        return cls(
            args.dataset,
            args.text_column,
            args.block_size,
            micro_batch // accelerator.num_processes,
            lanes=args.streaming,
            buffer=args.shuffle_buffer,
            seed=args.seed,
            share=(accelerator.process_index, accelerator.num_processes),
            position=position,
        )

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

    def __init__(self, rows, table, name, block_size, buffer, seed):
        self.rows, self.name = rows, name
        self.table, self.use_all = table._replace(splits={}), "val" in table.splits
        self.block_size, self.buffer, self.seed = block_size, buffer, seed
        # Start of the buffer: state of `rows`, how many documents to skip from there on, and the
        # byte of the next one; number of the buffer, and of windows yielded ("taken") from it. Not
        # what is left of the document: each checkpoint of each lane would have it.
        self.position = {"rows": None, "skip": 0, "offset": 0, "buffers": 0, "taken": 0}

    def __iter__(self):
        if self.position["rows"] is not None:
            # Otherwise `datasets` silently ignores the state.
            self.rows.set_epoch(self.position["rows"]["epoch"])
            self.rows.load_state_dict(self.position["rows"])
        documents = self._documents()
        for _ in range(self.position["skip"]):
            next(documents)
        document = next(documents)
        text = bytearray(document[self.position["offset"] :])
        used = self.buffer * self.block_size
        while True:
            start, rows, read = self.position, self.rows.state_dict(), 0
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

    def _documents(self):
        """Yields the training documents from the position of `rows` on, pass after pass."""
        failure = partial(RunFailed, rank_variable=None)  # only this process knows: it prints
        empty_passes = 0
        while empty_passes < 2:  # the rest of a resumed pass may be empty
            empty_passes += 1
            for document in _documents(self.table, self.rows, self.name, failure):
                if self.use_all or not held_out(document):
                    empty_passes = 0
                    yield document
            # Without this, the next pass would start from the state that was loaded.
            self.rows.set_epoch(self.rows.epoch + 1)
        raise failure(
            f"--dataset {self.name}: a lane of the stream is empty: use fewer, --streaming LANES"
        )


def _documents(table, rows, name, failure):
    """Yields the rows as bytes, each with a final newline. Raises `failure` if it cannot."""
    number = 0
    try:
        for document in table.documents(rows, f"--dataset {name}", failure):
            yield document + b"\n"
            number += 1
    except UserError:
        raise
    except Exception as error:
        line = f"--dataset {name} cannot be read after row {number}: {first_line(error)}"
        raise failure(line) from None
