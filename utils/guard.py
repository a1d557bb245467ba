"""Lets all processes agree, between two steps, that it is time to stop: after a signal to one of them, or a diverged step."""

import math
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

from utils import exits


class Guard:
    """Asked once per optimizer step, on every process.

    It never makes the device wait: it looks at the loss of the step before, which was copied to the host while this step is
    computed; with several processes the votes travel meanwhile (an all-reduce of three numbers over gloo). The answer is
    therefore one step late, and the same on every process.
    """

    def __init__(self, accelerator, timeout):
        """Args: timeout: seconds after which a vote without an answer is an error."""
        self._group, self._patience = None, math.inf
        if accelerator.num_processes > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self._patience = 0.9 * timeout  # at `timeout` NCCL's watchdog would end the process without a message
        self._recent = deque(maxlen=4)  # (step, loss, event after which the loss is on the host, ids) of the last steps
        self._votes, self._handle = None, None
        exits.training_starts()

    def should_stop(self, step, losses, ids):
        """Whether a signal asked any process to stop.

        Args:
            step (int): the optimizer step just done.
            losses (list): scalar losses of its micro-batches on this process, on the device, detached.
            ids (list): int64 tensors, the ids of their samples on this process.

        Raises:
            RunFailed: a loss was NaN or infinite; names the step and its samples.
            TimeoutError: the device did not finish the step before, or another process did not vote.
        """
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        self._recent.append((step, *_to_host(loss), ids))
        if self._group is None:
            self._vote(self._recent[-2] if len(self._recent) > 1 else None)
            return self._outcome()
        stop = self._outcome()
        self._vote(self._recent[-2] if len(self._recent) > 1 else None)
        return stop

    def check(self, model):
        """Looks at the last loss and at the weights at once; call it before saving: a checkpoint never holds a diverged model.

        An infinite gradient makes weights NaN, through clipping too, in a step whose own loss is finite.

        Args:
            model: parameters and buffers, sharded or not, are looked at where they are.

        Raises:
            RunFailed: the last loss or a weight was NaN or infinite; names the step and its samples.
        """
        self._outcome()
        self._vote(self._recent[-1] if self._recent else None, all_finite(model))
        self._outcome()

    def _vote(self, recent, weights_finite=True):
        diverged_at = 0
        if recent:
            step, loss, event, _ = recent
            deadline = time.monotonic() + self._patience
            # Polls instead of waiting: in a wait for a GPU whose peers are gone, Python never gets to handle a signal.
            while event and not event.query():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"timed out waiting for the device to finish step {step}")
                time.sleep(0.0005)
            diverged_at = 0 if math.isfinite(loss.item()) else step
        broken_at = 0 if weights_finite else self._recent[-1][0]
        self._votes = [int(exits.signal_name() is not None), diverged_at, broken_at]
        if self._group is not None:
            self._votes = torch.tensor(self._votes, dtype=torch.int64)
            self._handle = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _outcome(self):
        if self._votes is None:
            return False
        if self._handle is not None:
            self._handle.wait()
        stop, diverged_at, broken_at = self._votes if self._handle is None else self._votes.tolist()
        self._votes = self._handle = None
        if diverged_at or broken_at:
            what, failed_at = ("loss at", diverged_at) if diverged_at else ("weights after", broken_at)
            own = [i for step, _, _, ids in self._recent if step == failed_at for i in torch.cat(ids).tolist()]
            ids = sorted(gather_object(own)) if self._group is not None else sorted(own)
            raise exits.RunFailed(
                f"non-finite {what} step {failed_at}; the last checkpoint is from before it. A lower --lr often helps, in "
                f"another --output_dir (with --init_from this run's folder from its weights). Samples of that step: {ids}",
                retry=False,
            )
        return bool(stop)


@torch.no_grad()
def all_finite(model):
    """Whether no parameter and no buffer of a model is NaN or infinite; of sharded ones this process' part."""
    tensors = [*model.parameters(), *model.buffers()]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in tensors]
    device = local[0].device  # a model can be on several
    return torch.stack([value.isfinite().all().to(device) for value in local]).all().item()


def _to_host(loss):
    """A copy of a scalar in host memory, and the event after which it is there (None: at once).

    `loss.item()` would wait for everything queued on the device since, including the step just begun.
    """
    if loss.device.type != "cuda":
        return loss, None
    copy = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(loss.device))
    return copy, event
