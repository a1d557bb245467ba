"""Makes all processes stop at the same step: after a signal, or when training has diverged."""

import math
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from utils.run import process
from utils.run.failures import LostContact, RunFailed

SHOWN_IDS = 20  # of the samples of a step that failed


class Guard:
    """Call `should_stop` once per optimizer step, on every process.

    It never makes the device wait: it reads the loss and the gradient norm of the previous step,
    which are copied to the host meanwhile. With several processes, an all-reduce of some integers
    over gloo also runs in the background, and is read in the next step. So the run stops with a
    delay, in steps:

                                     one process    several processes
        a signal                     0              1
        a non-finite loss or norm    1              2
        non-finite weights           0, but only before a save (`check`)

    Weights changed by these extra steps after a non-finite value are never saved.

    Attributes:
        step (int): the last step that has finished.
        agreed (int): the last step after which all processes agreed to go on.
        group: of all processes, over gloo; None for a single process.
        moved_at (float): `time.monotonic` of its last step, or batch of an evaluation.
    """

    def __init__(self, accelerator, timeout):
        """Args: timeout: seconds to wait for the other processes before raising an error."""
        self.group, self._device_timeout = None, math.inf
        # In fp16 an infinite gradient is normal: the gradient scaler skips that step and scales the
        # next loss by less.
        self._skips_infinite_gradients = accelerator.scaler is not None
        if self._skips_infinite_gradients:
            _skip_whole_steps(accelerator)
        if accelerator.num_processes > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            # Because after `timeout` NCCL's watchdog ends the process without a message.
            self._device_timeout = 0.9 * timeout
        # The last steps: (step, [loss, norm], CUDA event of their copy to the host, ids).
        self._recent = deque(maxlen=4)
        self._votes, self._handle, self._agreed_to_stop = None, None, False
        self._voter = None
        self.step, self.agreed, self.moved_at = 0, 0, time.monotonic()
        process.training_starts()

    def attach(self, voter):
        """Lets an object vote, too, in the same all-reduce.

        Its `votes()` returns integers (list), always as many; `hear(votes)` gets their maxima over
        all processes, in the same step on each; `check(model)` is called before a save.
        """
        self._voter = voter

    def should_stop(self, step, losses, ids, norm=None):
        """Whether a signal asked any process to stop.

        Args:
            step (int): the optimizer step that has just finished.
            losses (list): detached scalar losses of its micro-batches, on this process's device.
            ids (list): int64 tensors with the ids of their samples on this process.
            norm: the gradient norm, as `clip_grad_norm_` returns it; None: not computed.

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
        self.step, self.moved_at = step, time.monotonic()
        before = self._recent[-2] if len(self._recent) > 1 else None
        if self.group is None:
            self._vote(before)
            self._outcome()
        else:
            self._outcome()
            self._vote(before)
        if self._agreed_to_stop:
            process.stopping_starts()
        return self._agreed_to_stop

    def watch(self, batches):
        """Yields the batches of an evaluation, until a signal asks any process to stop.

        They ask each other after the first batch, and then at most once a second. Raises
        `process.Interrupted` on every process, after the same batch.
        """
        start_time, asked_at, ask_at = time.monotonic(), 0, 1
        for count, batch in enumerate(batches, 1):
            self.moved_at = time.monotonic()
            yield batch
            if count < ask_at:
                continue
            seconds = max(time.monotonic() - start_time, 1e-6)
            wish = [int(process.signal_name() is not None), int((count - asked_at) / seconds) + 1]
            if self.group is not None:
                wish = torch.tensor(wish, dtype=torch.int64)
                dist.all_reduce(wish, dist.ReduceOp.MAX, group=self.group)
                wish = wish.tolist()
            if wish[0]:
                process.stopping_starts()
                raise process.Interrupted
            start_time, asked_at, ask_at = time.monotonic(), count, count + wish[1]

    def check(self, model):
        """Checks the newest loss and the weights now: `run.checkpoint` calls it before a save.

        An infinite gradient turns weights into NaN in a step whose own loss is finite, even if
        gradients are clipped.

        Raises:
            RunFailed: as `should_stop`, also for a weight or a buffer of `model`.
        """
        self._outcome()
        self._vote(self._recent[-1] if self._recent else None, all_finite(model))
        self._outcome()
        if self._voter:
            self._voter.check(model)

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
        self._votes = [int(process.signal_name() is not None), loss_at, norm_at, weights_at]
        if self._voter:
            self._votes += self._voter.votes()
        if self.group is not None:
            self._votes = torch.tensor(self._votes, dtype=torch.int64)
            self._handle = dist.all_reduce(
                self._votes, dist.ReduceOp.MAX, group=self.group, async_op=True
            )

    def _outcome(self):
        if self._votes is None:
            return
        votes = self._votes
        if self._handle is not None:
            self._handle.wait()
            votes = votes.tolist()
        self.agreed = self._recent[-1][0] if self._recent else 0
        self._votes = self._handle = None
        stop, *failed_steps = votes[:4]
        if any(failed_steps):
            self._fail(failed_steps)
        if self._voter:
            self._voter.hear(votes[4:])
        # Also if a check before a save hears of it: the next step is then the last one.
        self._agreed_to_stop = bool(stop)

    def _fail(self, failed_steps):
        """Raises RunFailed; `failed_steps`: of a non-finite loss, norm and weight, 0 for none."""
        names = ("loss at", "gradient norm at", "weights after")
        what, failed_at = next(
            (name, step) for name, step in zip(names, failed_steps, strict=True) if step
        )
        ids = []
        for step, _, _, parts in self._recent:
            if step == failed_at:
                ids = torch.cat([torch.as_tensor(part).flatten() for part in parts]).tolist()
        everyone = [ids]
        if self.group is not None:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, ids, group=self.group)
        ids = sorted(i for part in everyone for i in part)
        samples, more = str(ids[:SHOWN_IDS]), ""
        if len(ids) > SHOWN_IDS:
            samples += f" and {len(ids) - SHOWN_IDS:,} more, listed in status.json"
            more = f": {ids[SHOWN_IDS:]}"
        raise RunFailed(
            f"non-finite {what} step {failed_at}; no checkpoint includes it. Look for NaN or "
            "infinity in the data; if there is none, a lower --lr often helps, in another "
            f"--output_dir. Samples of that step: {samples}",
            retry=False,
            more=more,
        )


@torch.no_grad()
def all_finite(model):
    """Whether the parameters and buffers of a model, or its shards on this process, are finite."""
    tensors = [*model.parameters(), *model.buffers()]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in tensors]
    device = local[0].device  # a model can be on several
    return torch.stack([value.isfinite().all().to(device) for value in local]).all().item()


def _skip_whole_steps(accelerator):
    """Makes the gradient scaler of fp16 skip all of a step whose gradients overflow.

    By default a fused optimizer decides on the device, so the host does not learn that the weights
    stayed as they were: the schedule and averaged weights would move on.
    """
    for wrapper in accelerator._optimizers:
        wrapper.optimizer._step_supports_amp_scaling = False


def _to_host(values):
    """Copies a small tensor to host memory, without waiting for the work queued on the device.

    Returns the copy, and the CUDA event after which it is complete (None: already).
    """
    if values.device.type != "cuda":
        return values, None
    copy = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return copy, event
