"""Computes which optimizer steps of which epoch are left, and what to do after each step. Does not need torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from utils.exits import UserError


@dataclass(frozen=True)
class Plan:
    """The schedule of a run, in optimizer steps. Steps are numbered from 1 to `total_steps`.

    Attributes:
        total_steps (int): length of the run.
        steps_per_epoch (int): optimizer steps in one pass over the training data.
        micro_batches (int): batches that the loader yields per optimizer step (gradient accumulation).
        log_every, evaluate_every, save_every (int): steps between two log lines, evaluations, checkpoints;
            `save_every` 0: save only after the last step.
    """

    total_steps: int
    steps_per_epoch: int
    micro_batches: int = 1
    log_every: int = 1
    evaluate_every: int = 1
    save_every: int = 1

    @classmethod
    def from_args(cls, args, samples=None):
        """Builds the plan from the command-line arguments.

        Args:
            args: `epochs`, `max_train_steps`, `batch_size`, `log_every`, `eval_every` and `checkpoint_every`, as the training
                scripts define them, and `gradient_accumulation_steps`, if the script has it.
            samples (int | None): size of the training set; None: a stream, treated as one epoch of `--max_train_steps` steps.

        Raises:
            UserError: the training set is smaller than a batch.
        """
        steps_per_epoch = args.max_train_steps if samples is None else samples // args.batch_size
        if steps_per_epoch == 0:
            raise UserError(
                f"--batch_size {args.batch_size} is more than the {samples} training samples: use less, and a smaller --lr"
            )
        return cls(
            total_steps=args.max_train_steps or args.epochs * steps_per_epoch,
            steps_per_epoch=steps_per_epoch,
            micro_batches=getattr(args, "gradient_accumulation_steps", 1),
            log_every=args.log_every or max(1, min(10, steps_per_epoch // 5)),
            evaluate_every=args.eval_every or steps_per_epoch,
            save_every=steps_per_epoch if args.checkpoint_every is None else args.checkpoint_every,
        )

    def epochs(self, start=0):
        """Yields `(epoch, todo)` for every epoch that is not finished after `start` steps; `todo` is a `PartOfEpoch`."""
        while start < self.total_steps:
            epoch, done = divmod(start, self.steps_per_epoch)
            end = min((epoch + 1) * self.steps_per_epoch, self.total_steps)
            yield epoch, PartOfEpoch(start + 1, end, done * self.micro_batches, self.micro_batches)
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

    def save_due(self, step, improved=False):
        """Whether to save after `step`: every `save_every` steps, at a new best score (`improved`), and after the last one."""
        if self.save_every == 0:
            return step == self.total_steps
        return improved or step % self.save_every == 0 or step == self.total_steps


@dataclass(frozen=True)
class PartOfEpoch:
    """The steps `first` to `last` of one epoch: all of it, or what is left after an interruption.

    Attributes:
        batches_done (int): batches of this epoch that earlier steps used, for `skip_first_batches`.
        micro_batches (int): batches per step.
    """

    first: int
    last: int
    batches_done: int
    micro_batches: int

    def steps(self, batches):
        """Yields `(step, micro_batches)` for each optimizer step; `micro_batches` iterates over the batches of that step.

        Raises:
            RuntimeError: the loop body did not use all micro-batches of a step, or the loader ended before the last step.
        """
        batches = iter(batches)
        for step in range(self.first, self.last + 1):
            group = _Counted(islice(batches, self.micro_batches))
            yield step, group
            if group.count != self.micro_batches:
                raise RuntimeError(f"step {step} used {group.count} of its {self.micro_batches} micro-batches")


class _Counted(Iterator):
    """Iterates over `items` and counts those used."""

    def __init__(self, items):
        self._items, self.count = items, 0

    def __next__(self):
        item = next(self._items)
        self.count += 1
        return item
