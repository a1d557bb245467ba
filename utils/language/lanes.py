"""Streams whose batches are the same for any number of processes, and continue after a restart."""

import torch
from accelerate.utils import gather_object

from utils.run.failures import UserError
from utils.scale.elastic import either, possible_processes


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
        micro_batch (int): samples per batch on this process.
        lanes (int): number of parts.
        share (tuple[int, int]): index of this process, number of processes.
        position (dict | None): lane number (as a string) -> position, gathered from all processes
            after the last batch.

    Raises:
        UserError: the lanes do not divide over the processes or the batch.
    """

    def __init__(self, open_lane, micro_batch, *, lanes, share, position=None):
        process, processes = share
        _check_processes(lanes, [processes])
        if micro_batch * processes % lanes:
            raise UserError(
                f"a stream has {lanes} lanes, so the size of a micro-batch must be a multiple of "
                f"{lanes}, not {micro_batch * processes}: change --batch_size or "
                "--gradient_accumulation_steps"
            )
        self.micro_batch, self.lanes = micro_batch, {}
        for number in range(process * lanes // processes, (process + 1) * lanes // processes):
            # Open the data set once per lane: lanes that are split from one object would share its
            # reading state.
            lane = open_lane(number)
            lane.position = (position or {}).get(str(number)) or lane.position
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


def check_lanes(accelerator, lanes):
    """Raises UserError if `lanes` is no multiple of a number of processes of this launch."""
    _check_processes(lanes, possible_processes(accelerator))


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
