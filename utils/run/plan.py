"""Computes which optimizer steps are left, and what to do after each of them. Needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice

from utils.run.failures import UserError


@dataclass(frozen=True)
class Plan:
    """The schedule of a run, in optimizer steps. Steps are numbered from 1 to `total_steps`."""

    total_steps: int
    steps_per_epoch: int  # in one pass over the training data
    accumulation: int = 1  # micro-batches, which the loader yields, per step
    log_every: int = 1  # steps between two log lines
    evaluate_every: int = 1
    save_every: int = 1  # 0: save only after the last step
    stream: bool = False  # the data continue at a position of their own: no batches are skipped
    left_out: int = 0  # samples of each epoch, which fill no batch

    @classmethod
    def from_args(cls, args, samples=None):
        """Builds the plan from `args`. Raises UserError if `samples` are fewer than a batch.

        Args:
            samples (int | None): size of the training set; None: a stream, treated as one epoch of
                `--max_train_steps` steps.
        """
        steps_per_epoch = args.max_train_steps if samples is None else samples // args.batch_size
        if steps_per_epoch == 0:
            raise UserError(
                f"--batch_size {args.batch_size} is more than the {samples} training samples: use "
                "less, and a smaller --lr"
            )
        total_steps = args.max_train_steps or args.epochs * steps_per_epoch
        save_every = args.checkpoint_every
        return cls(
            total_steps=total_steps,
            steps_per_epoch=steps_per_epoch,
            accumulation=getattr(args, "gradient_accumulation_steps", 1),
            log_every=args.log_every or max(1, min(10, total_steps // 20)),
            evaluate_every=args.eval_every or steps_per_epoch,
            save_every=steps_per_epoch if save_every is None else save_every,
            stream=samples is None,
            left_out=0 if samples is None else samples % args.batch_size,
        )

    def epochs(self, start=0, done=lambda: False):
        """Yields `(epoch, remaining)` for every epoch that is not finished after `start` steps.

        `remaining` (`RemainingSteps`) are the steps of that epoch that are left. Both end early,
        before the next step, once `done()` is true.
        """
        while start < self.total_steps and not done():
            epoch, used = divmod(start, self.steps_per_epoch)
            end = min((epoch + 1) * self.steps_per_epoch, self.total_steps)
            skip = 0 if self.stream else used * self.accumulation
            yield epoch, RemainingSteps(start + 1, end, skip, self.accumulation, done)
            start = end

    def epoch_at(self, step):
        """The number of epochs done after `step` steps, as a float."""
        return step / self.steps_per_epoch

    def log_due(self, step):
        """Whether to log after `step`: every `log_every` steps and after the last one."""
        return step % self.log_every == 0 or step == self.total_steps

    def evaluation_due(self, step):
        """Whether to evaluate after `step`: every `evaluate_every` steps and after the last one."""
        return step % self.evaluate_every == 0 or step == self.total_steps

    def save_due(self, step):
        """Whether to save after `step`: every `save_every` steps, before each evaluation, and last.

        With `save_every` 0 only after the last step.
        """
        if self.save_every == 0:
            return step == self.total_steps
        return step % self.save_every == 0 or self.evaluation_due(step)


@dataclass(frozen=True)
class RemainingSteps:
    """The steps `first` to `last` of an epoch: all of it, or what an interruption left."""

    first: int
    last: int
    skip: int  # batches of this epoch that earlier steps used
    accumulation: int  # micro-batches per step
    done: Callable = lambda: False  # whether to end before the next step

    def rest(self, loader):
        """The prepared `loader`, or one without the batches that earlier steps used."""
        from accelerate import skip_first_batches

        return skip_first_batches(loader, self.skip) if self.skip else loader

    def steps(self, batches):
        """Yields `(step, batch)`. Raises RuntimeError if steps accumulate, or as `accumulated`."""
        if self.accumulation != 1:
            raise RuntimeError("a loop over `steps` does not accumulate: use `accumulated`")
        for step, micro_batches in self.accumulated(batches):
            for batch in micro_batches:
                yield step, batch

    def accumulated(self, batches):
        """Yields `(step, micro_batches)`; `micro_batches` iterates over the batches of that step.

        Raises RuntimeError if the loop body did not use all of them, or the loader has fewer.
        """
        batches = iter(batches)
        for step in range(self.first, self.last + 1):
            if self.done():
                return
            numbers = count()
            micro_batches = zip(islice(batches, self.accumulation), numbers, strict=False)
            yield step, (batch for batch, _ in micro_batches)
            used = next(numbers)
            if used != self.accumulation:
                raise RuntimeError(
                    f"step {step} used {used} of its {self.accumulation} micro-batches: the loader "
                    "has no more, or the loop left some"
                )
