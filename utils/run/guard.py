"""Makes all processes stop at the same step: after a signal, or when training has diverged."""

import math
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from utils.run import process
from utils.run.failures import LostContact, RunFailed
from utils.run.launch import notice
from utils.scale.pace import pace
from utils.scale.stacks import place

SHOWN_IDS = 20  # of the samples of a step that failed


class Guard:
    """Call `should_stop` once per optimizer step, on every process.

    It never makes the device wait. It reads the loss and the gradient norm of the previous step,
    which are copied to the host while this step is computed. With several processes, an all-reduce
    of some integers over gloo also runs in the background, and its result is read in the next step.
    So the run stops with a delay, in steps:

                                     one process    several processes
        a signal                     0              1
        a non-finite loss or norm    1              2
        non-finite weights           0, but only before a save (`check`)

    Weights changed by these extra steps after a non-finite value are never saved. The result is the
    same on every process.

    Attributes:
        save_asked (bool): whether to save after this step, because a person asked (`stacks`).
    """

    def __init__(self, accelerator, timeout):
        """Args: timeout: seconds to wait for the other processes before raising an error."""
        self._group, self._device_timeout = None, math.inf
        self._rank, self._ranks = accelerator.process_index, accelerator.num_processes
        # In fp16 an infinite gradient is normal: the gradient scaler skips that step and scales the
        # next loss by less.
        self._skips_infinite_gradients = accelerator.scaler is not None
        if accelerator.num_processes > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            # Because after `timeout` NCCL's watchdog ends the process without a message.
            self._device_timeout = 0.9 * timeout
        # The last steps: (step, [loss, norm], CUDA event of their copy to the host, ids).
        self._recent = deque(maxlen=4)
        self._votes, self._handle = None, None
        self.save_asked = self._told = self._agreed_to_stop = False
        process.training_starts()

    def should_stop(self, step, losses, ids, norm=None):
        """Whether a signal asked any process to stop.

        Args:
            step (int): the optimizer step that has just finished.
            losses (list): detached scalar losses of its micro-batches on this process, on the
                device.
            ids (list): int64 tensors with the ids of their samples on this process.
            norm: the gradient norm of the step, as `clip_grad_norm_` returns it; None: not
                computed.

        Raises:
            RunFailed: a loss or norm was NaN or infinite; the message names the step and its
                samples.
            LostContact: the device did not finish the previous step, or another process did not
                answer.
        """
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        if norm is None or self._skips_infinite_gradients:
            norm = loss.new_zeros(())
        elif isinstance(norm, DTensor):
            # The partial norm of the shards on this process. If the norm is infinite, so is the
            # partial norm of at least one process.
            norm = norm.to_local()
        self._recent.append((step, *_to_host(torch.stack([loss, norm.to(loss)])), ids))
        pace.end_step()
        before = self._recent[-2] if len(self._recent) > 1 else None
        if self._group is None:
            self._vote(before)
            self._outcome()
        else:
            self._outcome()
            self._vote(before)
        if self._agreed_to_stop:
            process.stopping_starts()
        return self._agreed_to_stop

    def watch(self, batches):
        """Yields the batches of an evaluation until a signal asks any process to stop.

        The processes ask each other after the first batch, and then at most once a second.

        Raises:
            process.Interrupted: on every process, after the same batch.
        """
        start_time, asked_at, ask_at = time.monotonic(), 0, 1
        for count, batch in enumerate(process.wait_for_each(batches, "a batch"), 1):
            place.moved()
            yield batch
            if count < ask_at:
                continue
            seconds = max(time.monotonic() - start_time, 1e-6)
            wish = [int(process.signal_name() is not None), int((count - asked_at) / seconds) + 1]
            if self._group is not None:
                wish = torch.tensor(wish, dtype=torch.int64)
                dist.all_reduce(wish, dist.ReduceOp.MAX, group=self._group)
                wish = wish.tolist()
            if wish[0]:
                process.stopping_starts()
                raise process.Interrupted
            start_time, asked_at, ask_at = time.monotonic(), count, count + wish[1]

    def check(self, model):
        """Checks the newest loss and the weights now: a checkpoint never holds a diverged model.

        Call it before saving.

        An infinite gradient turns weights into NaN in a step whose own loss is finite, even if
        gradients are clipped.

        Args:
            model: its parameters and buffers may be sharded, or on several devices.

        Raises:
            RunFailed: the newest loss or a weight is NaN or infinite; names the step and its
                samples.
        """
        self._outcome()
        self._vote(self._recent[-1] if self._recent else None, all_finite(model))
        self._outcome()
        self._compare(model)
        self.save_asked = False  # the save that follows is the one

    def _compare(self, model):
        """Prints a notice, once, if the processes of DDP have different weights."""
        if not isinstance(model, DistributedDataParallel) or self._group is None or self._told:
            return
        total = checksum(model)
        bounds = torch.tensor([total, -total])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._group)
        self._told = bounds[0] != -bounds[1]
        if self._told and self._rank == 0:
            notice(
                "the processes have different weights, so their gradients were not averaged: "
                "compute the loss with the model that `prepare` returned, not with the one inside"
            )

    def _vote(self, recent, weights_finite=True):
        loss_at = norm_at = 0
        if recent:
            step, values, event, _ = recent
            deadline = time.monotonic() + self._device_timeout
            # Poll, because Python cannot handle signals while it waits for a GPU, which may wait
            # forever for a lost process.
            while event and not event.query():
                if time.monotonic() > deadline:
                    raise LostContact(f"timed out waiting for the device to finish step {step}")
                time.sleep(0.0005)
            loss_at, norm_at = (0 if math.isfinite(value) else step for value in values.tolist())
        weights_at = 0 if weights_finite else self._recent[-1][0]
        save, place.save_asked = int(place.save_asked), False
        self._votes = [int(process.signal_name() is not None), save, loss_at, norm_at, weights_at]
        if self._group is not None:
            times = [0] * self._ranks
            times[self._rank] = pace.microseconds()
            self._votes = torch.tensor([*self._votes, *times], dtype=torch.int64)
            self._handle = dist.all_reduce(
                self._votes, dist.ReduceOp.MAX, group=self._group, async_op=True
            )

    def _outcome(self):
        if self._votes is None:
            return
        if self._handle is not None:
            with process.waiting_for("the other processes"):
                self._handle.wait()
            place.agreed = self._recent[-1][0] if self._recent else 0
        votes = self._votes if self._handle is None else self._votes.tolist()
        stop, save, *failed_steps = votes[:5]
        pace.add(votes[5:])
        self._votes = self._handle = None
        self.save_asked = bool(save)
        if any(failed_steps):
            what = ("loss at", "gradient norm at", "weights after")
            what, failed_at = next(
                (what, step) for what, step in zip(what, failed_steps, strict=True) if step
            )
            own = [
                i
                for step, _, _, ids in self._recent
                if step == failed_at
                for i in torch.cat([torch.as_tensor(some).flatten() for some in ids]).tolist()
            ]
            everyone = [own]
            if self._group is not None:
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, own, group=self._group)
            ids = sorted(i for ids in everyone for i in ids)
            samples, more = str(ids[:SHOWN_IDS]), ""
            if len(ids) > SHOWN_IDS:
                samples += f" and {len(ids) - SHOWN_IDS:,} more, listed in status.json"
                more = f": {ids[SHOWN_IDS:]}"
            raise RunFailed(
                f"non-finite {what} step {failed_at}; no checkpoint includes it. Look for NaN or "
                "infinity in the data; if there is none, a lower --lr often helps, in another "
                "--output_dir (--init_from this run's folder starts from its newest checkpoint, "
                f"if it has one). Samples of that step: {samples}",
                retry=False,
                more=more,
            )
        # Also if a check before a save hears of it: the next step is then the last one.
        self._agreed_to_stop = bool(stop)


@torch.no_grad()
def checksum(model):
    """The sum of the bits of all parameters, read as integers (int): in any order the same."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    views = [weight.view(integers[weight.element_size()]) for weight in model.parameters()]
    device = views[0].device  # a model can be on several
    return torch.stack([view.sum().to(device) for view in views]).sum().item()


@torch.no_grad()
def all_finite(model):
    """Whether all parameters and buffers of a model are finite.

    Of sharded ones, looks at the part on this process.
    """
    tensors = [*model.parameters(), *model.buffers()]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in tensors]
    device = local[0].device  # a model can be on several
    return torch.stack([value.isfinite().all().to(device) for value in local]).all().item()


def _to_host(values):
    """Copies a small tensor to host memory.

    Returns the copy, and the CUDA event after which it is complete (None: already).

    `values.tolist()` would instead wait for all work queued on the device.
    """
    if values.device.type != "cuda":
        return values, None
    copy = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return copy, event
