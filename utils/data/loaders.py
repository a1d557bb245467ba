"""Data loaders: the order of their samples, a batch size that fits, workers and their errors."""

import argparse
import ctypes
import hashlib
import os
import re
import signal
import struct
import sys
import traceback

import numpy as np
from torch.utils.data import Sampler

from utils import flags
from utils.run import failures, process
from utils.run.arguments import frozen
from utils.run.failures import RunFailed, UserError
from utils.run.output import one_line
from utils.scale import patches

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


# ----------------------------------------------------------------------------------------- orders


def sample_seed(seed, epoch, index):
    """A seed for one sample in one epoch, 64 bits, by BLAKE2 (RFC 7693)."""
    key = struct.pack("<qqq", seed, epoch, index)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def shuffled(size, seed, epoch):
    """The numbers below `size` in an order that the seed and the epoch decide, int64 [size].

    By `RandomState`, which draws the same with every version of NumPy.
    """
    return np.random.RandomState(np.random.MT19937([seed, epoch])).permutation(size)


class EpochSampler(Sampler):
    """Yields the samples of whole optimizer steps, in another random order in each epoch.

    Args:
        samples, batch_size (int): size of the data set, and of an optimizer step.
        with_epoch (bool): yield (epoch, id) instead of ids, for a data set that needs the epoch:
            workers that live for several epochs never see a change of the data set.
    """

    def __init__(self, samples, batch_size, seed, with_epoch=False):
        self._samples, self._used = samples, samples // batch_size * batch_size
        self._seed, self._with_epoch, self._epoch = seed, with_epoch, 0

    def set_epoch(self, epoch):
        """Sets the next epoch; called by the prepared loader's own `set_epoch`."""
        self._epoch = epoch

    def __len__(self):
        return self._used

    def __iter__(self):
        for index in shuffled(self._samples, self._seed, self._epoch)[: self._used]:
            yield (self._epoch, int(index)) if self._with_epoch else int(index)


# ---------------------------------------------------------------------------------------- workers


def loader_options(accelerator, num_workers=0, timeout=600):
    """Returns arguments of `DataLoader` for a data set with whole batches (`__getitems__`).

    Args:
        timeout (int): seconds to wait for a batch of a worker that is alive.
    """
    return dict(
        collate_fn=already_a_batch,
        num_workers=num_workers,
        pin_memory=accelerator.device.type == "cuda",
        worker_init_fn=set_up_worker,
        timeout=timeout if num_workers else 0,
        # From Python 3.14 on, the default is a server that forks the workers. They would outlive a
        # process that is killed, and it would not notice when one of them dies.
        multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
    )


def set_up_worker(_worker_id):
    """For `DataLoader(worker_init_fn=...)`: ignores signals; an unsendable batch ends the worker.

    The loop can then finish its step and save. Python only prints the error of a batch that cannot
    be sent (a socket's path that is too long, a full /dev/shm), and the loader would wait forever.
    """
    for signum in process.STOPPING:
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        # However the training process ends: so does a worker that is stuck.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    patches.report_unsendable_batches(_end_worker)


def _end_worker(error, _batch):
    line = f"{type(error).__name__}: {one_line(error)}"
    print(f"a data loader worker cannot send its batch: {line}", file=sys.stderr, flush=True)
    os._exit(1)


def already_a_batch(batch):
    """For `DataLoader(collate_fn=...)`: returns the batch unchanged."""
    return batch


def end_workers(loaders):
    """Ends the persistent workers of the loaders in this dict.

    Workers ignore signals, so that the loop can finish its step; at exit Python would wait for
    them, forever.
    """
    for loader in loaders.values():
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()


def explain(error):
    """For `entry.run`: what replaces an error of a loader's workers, a `UserError`; else None."""
    before, _, line = str(error).rpartition("UserError: ")
    if isinstance(error, UserError) and "in DataLoader worker" in before:
        # Only this process knows it. Its traceback has become text, in which newlines are escaped.
        return UserError(line.removesuffix("\\n"), rank_variable=None)
    rank, name = failures.rank(), type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    in_loader = any("torch/utils/data/dataloader.py" in frame.filename for frame in frames)
    line, retry = None, False
    if in_loader and re.match("DataLoader timed out after", str(error)):
        line = (
            f"rank {rank} waited longer than --timeout for a batch: its data loader workers are "
            "alive, but send nothing. --num_workers 0 loads in the training process and shows "
            "where; if the data is only slow, give a longer --timeout"
        )
    elif in_loader and isinstance(error, EOFError | ConnectionError):
        line = f"rank {rank}: a data loader worker died while sending a batch ({name})"
    # A worker that dies while sending a batch also breaks the connection. Either error may be the
    # context of the other.
    for cause in _causes(error):
        if type(cause) is RuntimeError and re.match(r"DataLoader worker \(pid", str(cause)):
            reason = str(cause).splitlines()[0]
            line, retry = f"rank {rank}: a data loader worker died: {reason}", "killed" in reason
    return RunFailed(line, rank_variable=None, retry=retry) if line else None


def _causes(error):
    """Yields the error, then its `__cause__` or `__context__`, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def fit_batch_size(args, samples, power, noun="training samples"):
    """The arguments with a batch size that fits the data, if it is a default.

    Such a batch has at most a quarter of the samples: the largest power of two, but 8 if there are
    as many. A default learning rate falls with it. So they are the same on any number of processes.

    Args:
        samples (int | None): of the training set; None: of a stream, which has enough.
        power (float): of the batch size, to which the learning rate is proportional: 1 for SGD
            (arXiv:1706.02677), 0.5 for Adam (arXiv:2205.10287).
        noun (str): what a sample is.

    Returns:
        Arguments.
    """
    most = args.batch_size if samples is None else max(samples // 4, min(samples, 8), 1)
    if most >= args.batch_size or flags.given("batch_size"):
        return args
    size, lr = 1 << (most.bit_length() - 1), args.lr
    changed = f"batch size {size} instead of {args.batch_size}"
    if not flags.given("lr"):
        lr *= (size / args.batch_size) ** power
        changed += f", and --lr {lr:.2g} instead of {args.lr:g}"
    if process.is_main():
        print(f"{changed}, since there are {samples:,} {noun}")
    return frozen(argparse.Namespace(**vars(args) | {"batch_size": size, "lr": lr}))
