"""Streams whose batches are the same for any number of processes, and continue after a restart."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from accelerate.utils import gather_object

from utils.data.tables import first_line
from utils.run.failures import RunFailed, UserError
from utils.scale.elastic import either, possible_processes

HELD_OUT_ONE_IN = 64  # 1 in 64 documents of a stream is held out, if it has no split `val`


@dataclass(frozen=True)
class Share:
    """What one process reads of a stream.

    Args:
        lanes (int): parts of the stream.
        micro_batch (int): samples per batch on this process.
        process (int), processes (int): the index of this process, and the number of processes.
        position (dict | None): lane number (as a string) -> position, gathered from all processes
            after the last batch.
    """

    lanes: int
    micro_batch: int
    process: int = 0
    processes: int = 1
    position: dict | None = None

    @classmethod
    def from_args(cls, args, accelerator, lanes, position=None):
        """The share of this process, from the command-line arguments.

        Raises:
            UserError: `lanes` is no multiple of a number of processes of this launch.
        """
        _check_processes(lanes, possible_processes(accelerator))
        micro_batch = args.batch_size // args.gradient_accumulation_steps
        processes = accelerator.num_processes
        return cls(lanes, micro_batch // processes, accelerator.process_index, processes, position)


class LaneStream(torch.utils.data.IterableDataset):
    """This process' share of an endless, shuffled stream of micro-batches.

    The global batches are the same for any number of processes. For that, the data is split into a
    fixed number of parts, the `lanes`. Every global batch takes the same number of samples from
    each lane, and each process reads only its own lanes. The number of processes must divide the
    number of lanes.

    In each batch, `position` has the positions of the lanes of this process after the batch.

    Args:
        open_lane (Callable): number -> a lane: iterating over it yields samples without end, and
            its `position`, which can be stored as JSON, is where it stands.
        share (Share): what this process reads.

    Raises:
        UserError: the lanes do not divide over the processes or the batch.
    """

    def __init__(self, open_lane, share):
        process, processes, lanes = share.process, share.processes, share.lanes
        _check_processes(lanes, [processes])
        if share.micro_batch * processes % lanes:
            raise UserError(
                f"a stream has {lanes} lanes, so the size of a micro-batch must be a multiple of "
                f"{lanes}, not {share.micro_batch * processes}: change --batch_size or "
                "--gradient_accumulation_steps"
            )
        self.micro_batch, self.lanes = share.micro_batch, {}
        for number in range(process * lanes // processes, (process + 1) * lanes // processes):
            # Open the data set once per lane: lanes that are split from one object would share its
            # reading state.
            lane = open_lane(number)
            lane.position = (share.position or {}).get(str(number)) or lane.position
            self.lanes[str(number)] = lane

    def __iter__(self):
        readers = [iter(lane) for lane in self.lanes.values()]
        per_lane = self.micro_batch // len(readers)
        while True:
            samples = [next(reader) for reader in readers for _ in range(per_lane)]
            positions = {number: dict(lane.position) for number, lane in self.lanes.items()}
            yield {**self.collate(samples), "position": positions}

    def collate(self, samples):
        """A batch (dict) of samples."""
        raise NotImplementedError


class RowReader:
    """Yields the documents of one lane's part of a stream, pass after pass.

    Args:
        rows (Rows): of a stream that only this reader reads.
        encode (Callable): a row, and text that names it -> its document, false if it is empty.
        is_used (Callable): a document -> whether it is trained on.

    Attributes:
        position (dict): the state of the rows, between two of them.
        epoch (int): passes that are complete.
    """

    def __init__(self, rows, encode, is_used):
        self._rows, self._encode, self._is_used = rows, encode, is_used

    @property
    def position(self):
        return self._rows.rows.state_dict()

    @property
    def epoch(self):
        return self._rows.rows.epoch

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
                if document and self._is_used(document):
                    empty_passes = 0
                    yield document
            # Without this, the next pass would start from the state that was loaded.
            self._rows.rows.set_epoch(self.epoch + 1)
        raise failure(f"{self._rows.where}: a lane of the stream has no documents: use fewer lanes")


def open_reader(splits, number, lanes, encode, is_held_out):
    """The `RowReader` of the lane `number` of `lanes`.

    Args:
        splits (dict[str, Rows]): of a stream that was opened for this lane.
        encode: as for `RowReader`.
        is_held_out (Callable): a document -> whether it is held out if there is no split `val`.
    """
    from datasets.distributed import split_dataset_by_node  # here, because it takes a second

    rows = splits["train"]
    rows = replace(rows, rows=split_dataset_by_node(rows.rows, number, lanes))
    whole = "val" in splits
    return RowReader(rows, encode, lambda document: whole or not is_held_out(document))


def read_held_out(name, splits, encode, is_held_out, size_of, size):
    """Reads the documents of a stream that are held out: those of `val`, or else a part of `train`.

    Args:
        name (str): the value of `--dataset`.
        splits, encode, is_held_out: as for `open_reader`.
        size_of (Callable): a document -> its size.
        size (int): of all documents together; no more are read.

    Returns:
        list: the documents.

    Raises:
        UserError: the stream cannot be read, or none is held out.
    """
    whole, chosen, count, total = "val" in splits, [], 0, 0
    for document in _documents(splits["val" if whole else "train"], encode, UserError):
        count += 1
        if document and (whole or is_held_out(document)):
            chosen.append(document)
            total += size_of(document)
            if total >= size:
                break
    if not chosen:
        raise UserError(
            f"--dataset {name} has {count} documents, none of which is held out for evaluation (1 "
            f"in {HELD_OUT_ONE_IN} is): too small to stream, run without --streaming"
        )
    return chosen


def _documents(rows, encode, failure):
    """Yields the document of each row. Raises `failure` if a row cannot be read."""
    number = 0
    try:
        for row in rows:
            yield encode(row, f"row {number} of {rows.where}")
            number += 1
    except UserError as error:
        raise failure(str(error)) from None
    except Exception as error:  # of datasets, fsspec, pyarrow or the network
        raise failure(
            f"{rows.where} cannot be read after row {number}: {first_line(error)}"
        ) from None


def _check_processes(lanes, possible):
    if any(lanes % processes for processes in possible):
        raise UserError(
            f"a stream has {lanes} lanes, which {either(possible)} processes cannot share evenly: "
            f"use a number of processes that divides {lanes}"
        )


def gather_position(batch):
    """The position of a stream after `batch`, gathered from all processes, for a checkpoint.

    Returns:
        dict | None: None without a stream.
    """
    if "position" not in batch:
        return None
    return dict(gather_object(list(batch["position"].items())))
