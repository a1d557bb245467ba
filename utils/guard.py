"""Lets all processes agree, between two steps, that it is time to stop: a signal somewhere, or a loss that is no number."""

import math
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from utils import exits


class Guard:
    """Asked once per optimizer step, on every process.

    Never makes the device wait: the loss it looks at is the previous step's, copied while this one computes, and with
    several processes the votes travel (an all-reduce of two numbers over gloo) meanwhile. So the answer comes a step
    late, and is the same everywhere.
    """

    def __init__(self, accelerator, timeout):
        """Args: timeout: seconds after which a vote without an answer is an error."""
        self._group, self._patience = None, math.inf
        if accelerator.num_processes > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self._patience = 0.9 * timeout  # at `timeout` NCCL's watchdog would end the process without a word
        self._recent = deque(maxlen=4)  # (step, loss, when the loss is there, ids) of the last steps on this process
        self._votes, self._handle = None, None
        exits.training_starts()

    def should_stop(self, step, loss, ids):
        """Whether a signal asked some process to stop.

        Args:
            step (int): the optimizer step just done.
            loss: its scalar loss on this process, on the device.
            ids (list): int64 tensors, the ids of its samples on this process.

        Raises:
            RunFailed: a loss was NaN or infinite; names the step and its samples.
            TimeoutError: the device did not come to the end of the step before, or another process did not vote.
        """
        self._recent.append((step, *_to_host(loss.detach()), ids))
        stop = self._outcome()
        self._vote(self._recent[-2] if len(self._recent) > 1 else None)
        return self._outcome() if self._group is None else stop

    def check_loss(self):
        """Looks at the last loss at once; call it before a checkpoint, which must never hold a diverged model."""
        self._outcome()
        self._vote(self._recent[-1] if self._recent else None)
        self._outcome()

    def _vote(self, recent):
        diverged_at = 0
        if recent:
            step, loss, there, _ = recent
            deadline = time.monotonic() + self._patience
            # Asks instead of waiting: in a wait for a GPU whose peers are gone, Python never gets to see a signal.
            while there and not there.query():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"timed out waiting for the device to end step {step}")
                time.sleep(0.0005)
            diverged_at = 0 if math.isfinite(loss.item()) else step
        self._votes = torch.tensor([exits.signal_name() is not None, diverged_at], dtype=torch.int64)
        if self._group is not None:
            self._handle = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _outcome(self):
        if self._votes is None:
            return False
        if self._handle is not None:
            self._handle.wait()
        stop, diverged_at = self._votes.tolist()
        self._votes = self._handle = None
        if diverged_at:
            own = [i for step, _, _, ids in self._recent if step == diverged_at for i in torch.cat(ids).tolist()]
            ids = sorted(gather_object(own)) if self._group is not None else sorted(own)
            raise exits.RunFailed(
                f"the loss is not a finite number at step {diverged_at}; the last checkpoint is from before it. "
                f"A lower --lr often helps. Samples of that step: {ids}"
            )
        return bool(stop)


def _to_host(loss):
    """A scalar's copy in host memory, and the event after which it is there (None: at once).

    `loss.item()` would wait for all that was given to the device since, the step just begun among it.
    """
    if loss.device.type != "cuda":
        return loss, None
    copy = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(loss.device))
    return copy, there
