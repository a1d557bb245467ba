"""Streams whose batches are the same for any number of processes, and continue after a restart."""

import random
import zlib
from dataclasses import dataclass, replace
from functools import partial

import torch
from accelerate.utils import gather_object

from utils.data.tables import first_line
from utils.run.failures import RunFailed, UserError
from utils.scale.elastic import either, possible_processes

HELD_OUT_ONE_IN = 64  # 1 in 64 documents of a stream is held out, if it has no split `val`
EMPTY_BUFFERS = 20  # in a row, after which a stream fails


@dataclass(frozen=True)
class Share:
    """What one process, of several `processes`, reads of a stream.

    Args:
        lanes (int): parts of the stream.
        samples (int): per optimizer step on this process.
        position (dict | None): what `gather_position` returned after the last batch.
        accumulation (int): micro-batches per optimizer step.
    """

    lanes: int
    samples: int
    process: int = 0
    processes: int = 1
    position: dict | None = None
    accumulation: int = 1

    @classmethod
    def from_args(cls, args, accelerator, lanes, position=None):
        """The share of this process, of lanes that divide --batch_size.

        Raises:
            UserError: the processes cannot share them evenly, or the position is one of others.
        """
        possible = possible_processes(accelerator)
        if any(lanes % processes for processes in possible):
            raise UserError(
                f"a stream has {lanes} lanes, which {either(possible)} processes cannot share "
                f"evenly: use a number of processes that divides {lanes}"
            )
        if position and len(position) != lanes:
            raise UserError(
                f"the stream of this checkpoint has {len(position)} lanes, and not {lanes}: keep "
                "its --batch_size"
            )
        processes, rank = accelerator.num_processes, accelerator.process_index
        samples, accumulation = args.batch_size // processes, args.gradient_accumulation_steps
        return cls(lanes, samples, rank, processes, position, accumulation)


class LaneStream(torch.utils.data.IterableDataset):
    """This process' share of an endless, shuffled stream of micro-batches.

    The data is split into a fixed number of parts, the `lanes`. Every step takes the same number of
    samples from each, and each process reads only its own lanes, so the global batches are the same
    for any number of processes. In a micro-batch, `position` has the positions of the lanes of this
    process after the step.

    Args:
        open_lane (Callable): number -> a `Lane`, which opens the data set anew: lanes of one object
            would share its reading state.
        share (Share): what this process reads.
        collate (Callable): a list of samples -> a batch (dict).
    """

    def __init__(self, open_lane, share, collate):
        self.share, self.collate, self.lanes = share, collate, {}
        count = share.lanes // share.processes
        for number in range(share.process * count, (share.process + 1) * count):
            lane = open_lane(number)
            lane.position = (share.position or {}).get(str(number)) or lane.position
            self.lanes[str(number)] = lane

    def __iter__(self):
        readers = [iter(lane) for lane in self.lanes.values()]
        per_lane, parts = self.share.samples // len(readers), self.share.accumulation
        while True:
            samples = [next(reader) for reader in readers for _ in range(per_lane)]
            positions = {number: dict(lane.position) for number, lane in self.lanes.items()}
            for part in range(parts):
                yield {**self.collate(samples[part::parts]), "position": positions}


class Lane:
    """Yields samples without end; `position`, which can be stored as JSON, is where it stands.

    It fills a buffer with documents, packs them, and yields the samples in random order. Its
    position is the start of the buffer and the number of samples yielded from it: after a restart
    the same buffer is read again.

    Args:
        reader: yields documents without end, whose `bytes` are their content, and continues at a
            `position` by `seek`.
        pack (Callable): documents (list) -> samples, with a length and indices.
        size (int): of the contents of a buffer, in bytes.
        number (int), seed (int): of the lane, and of the order.
    """

    def __init__(self, reader, pack, size, number, seed):
        self.reader, self.pack, self.size = reader, pack, size
        self.number, self.seed = number, seed
        # `reader`: where it stood at the start of the buffer.
        self.position = {"reader": None, "buffers": 0, "taken": 0}

    def __iter__(self):
        self.reader.seek(self.position["reader"])
        documents, empty = iter(self.reader), 0
        while empty < EMPTY_BUFFERS:
            start, samples = self.position, self.pack(self._fill(documents))
            order = list(range(len(samples)))
            random.Random(f"{self.seed} {self.number} {start['buffers']}").shuffle(order)
            place = self.reader.position
            for taken in range(start["taken"], len(order)):
                self.position = {**start, "taken": taken + 1}
                yield samples[order[taken]]
            empty = 0 if order else empty + 1
            self.position = {"reader": place, "buffers": start["buffers"] + 1, "taken": 0}
        raise RunFailed(
            f"lane {self.number} of the stream has nothing to learn: its documents have no "
            "answers, or none that fits in a block",
            retry=False,
            rank_variable=None,
        )

    def _fill(self, documents):
        """The documents of a buffer (list)."""
        buffer, size = [], 0
        while size < self.size:
            buffer.append(next(documents))
            size += len(bytes(buffer[-1]))
        return buffer


class RowReader:
    """Yields the documents of one lane's part of a stream, pass after pass.

    Args:
        splits (dict[str, Rows]): of a stream that was opened for this lane.
        number (int), lanes (int): of this lane, and of all.
        encode (Callable): a row, and text that names it -> its document, false if it is empty;
            some are held out, by its `bytes`.
    """

    def __init__(self, splits, number, lanes, encode):
        from datasets.distributed import split_dataset_by_node  # here, because it takes a second

        rows = splits["train"]
        self._rows = replace(rows, rows=split_dataset_by_node(rows.rows, number, lanes))
        self._encode, self._every = encode, "val" in splits

    @property
    def position(self):
        """The state of the rows, behind one that was read: `datasets` has none before the first."""
        return self._rows.rows.state_dict()

    def seek(self, position):
        """Continues at a position; None: at the beginning."""
        if position is not None:
            # Otherwise `datasets` silently ignores the state.
            self._rows.rows.set_epoch(position["epoch"])
            self._rows.rows.load_state_dict(position)

    def __iter__(self):
        failure = partial(RunFailed, rank_variable=None)  # only this process knows: it prints
        empty_passes = 0
        while empty_passes < 2:  # the rest of a resumed pass may be empty
            empty_passes += 1
            for document in _documents(self._rows, self._encode, failure):
                if self._every or not is_held_out(bytes(document)):
                    empty_passes = 0
                    yield document
            # Without this, the next pass would start from the state that was loaded.
            self._rows.rows.set_epoch(self._rows.rows.epoch + 1)
        raise failure(f"{self._rows.where}: a lane of the stream has no documents: use fewer lanes")


def read_held_out(name, splits, encode, size):
    """Reads the documents (list) of a stream that are held out: of `val`, or a part of `train`.

    Args:
        name (str): the value of `--dataset`.
        splits, encode: as for `RowReader`.
        size (int): of their `bytes`; no more are read.

    Raises:
        UserError: the stream cannot be read, or none is held out.
    """
    whole, chosen, total = "val" in splits, [], 0
    for document in _documents(splits["val" if whole else "train"], encode, UserError):
        content = bytes(document)
        if whole or is_held_out(content):
            chosen.append(document)
            total += len(content)
            if total >= size:
                break
    if not chosen:
        raise UserError(
            f"--dataset {name} has no document that is held out for evaluation (1 in "
            f"{HELD_OUT_ONE_IN} is): too small to stream, run without --streaming"
        )
    return chosen


def is_held_out(content):
    """Whether a document is held out if there is no split `val`: the same on every process."""
    return zlib.crc32(content) % HELD_OUT_ONE_IN == 0


def _documents(rows, encode, failure):
    """Yields the document of each row that is not empty. Raises `failure` if one cannot be read."""
    number = 0
    try:
        for number, row in enumerate(rows):
            if document := encode(row, f"row {number} of {rows.where}"):
                yield document
    except UserError as error:
        raise failure(str(error)) from None
    except Exception as error:  # of datasets, fsspec, pyarrow or the network
        raise failure(
            f"{rows.where} cannot be read after row {number}: {first_line(error)}"
        ) from None


def gather_position(batch):
    """The position of a stream after `batch`, of all processes (dict); None without a stream."""
    if "position" not in batch:
        return None
    return dict(gather_object(list(batch["position"].items())))
