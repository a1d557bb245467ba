"""The checkpoints that a run writes, each complete once its evaluation is done; the best one."""

import contextlib
import math
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from utils.run import checkpoint, manifest, process
from utils.run.failures import RunFailed
from utils.run.output import plural

FAILED_SAVES = 3  # in a row that end a run: it would lose more and more work


class Writer:
    """Writes a checkpoint while the training waits. That of `utils/scale` does not wait."""

    group = None  # of all processes, for the collectives of a thread; None: there is no thread

    def capture(self, wait):
        """A block that writes files; yields a list of functions that write those that it did not.

        Args: wait (bool): whether the training waits in any case.
        """
        return contextlib.nullcontext([])

    def start(self, writes, finish):
        """Calls `writes` (list), then `finish` with their first error or None; returns a Future."""
        future = Future()
        try:
            future.set_result(finish(None))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass
class Save:
    """A checkpoint that is being written."""

    step: int
    future: Future | None  # of whether it was written, and its seconds; None: it is on disk
    blocked_seconds: float  # how long the training waited for it, at most
    evaluation: dict | None  # what it changes in the progress; None: still to come; {}: none is due


class Saves:
    """Writes the checkpoints of a run; every process has one.

    A checkpoint that an evaluation follows is complete with its score: only then is an older one
    deleted, so that the best one is never lost.

    Attributes:
        newest_step (int): of the last checkpoint that is on disk; where the run began, without one.
    """

    def __init__(self, accelerator, path, keep, log, writer=None):
        """
        Args:
            path (Path): the folder of the run.
            keep (int): newest checkpoints to keep, besides the highest-scoring one.
            log (Callable): called with the step and the figures of each checkpoint.
            writer: as `Writer`.
        """
        self._accelerator, self._path, self._keep = accelerator, path, keep
        self._log, self._writer = log, writer or Writer()
        self._save, self._deletion, self._failed, self.newest_step = None, None, 0, 0

    def resume(self, step, evaluation_due):
        """Continues after the checkpoint of `step`; `evaluation_due`: its evaluation is missing."""
        self.newest_step = step
        if evaluation_due:
            self._save = Save(step, None, 0.0, None)

    @contextlib.contextmanager
    def write(self, record, wait):
        """Yields the folder for `accelerator.save_state`; the checkpoint is complete later.

        Waits for the one before. If writing fails, prints a warning.

        Args:
            record (dict): of the manifest.
            wait (bool): whether to wait until it is on disk.

        Raises:
            RunFailed: `FAILED_SAVES` in a row could not be written.
        """
        step, start_time = record["progress"]["step"], time.perf_counter()
        with process.saving():
            self.finish()
            folder, error = checkpoint.start(self._accelerator, self._path)
            writes = []
            try:
                with self._writer.capture(wait) as writes:
                    yield str(folder)
            except (Exception, checkpoint.CheckpointException) as caught:
                if not checkpoint.is_write_error(caught):
                    raise
                error = caught
            complete = partial(self._complete, folder, error, record, start_time)
            future = self._writer.start(writes, complete)
            blocked = math.inf if wait else time.perf_counter() - start_time
            evaluation = None if record["progress"]["evaluation_due"] else {}
            self._save = Save(step, future, blocked, evaluation)
            if wait:
                self._wait()

    def _complete(self, folder, error, record, start_time, write_error):
        """Turns what was written into a checkpoint; gives `Save.future` its result."""
        error = error or write_error
        if error is not None and not checkpoint.is_write_error(error):
            raise error
        written = checkpoint.finish(self._accelerator, folder, error, record, self._writer.group)
        return written, time.perf_counter() - start_time

    def look(self):
        """Notes that a checkpoint is on disk. A failure waits for `write`, on all processes."""
        future = self._save and self._save.future
        if future and future.done() and not future.exception() and future.result()[0]:
            self._wait()

    def evaluated(self, step, changes):
        """The evaluation after `step` is done: changes (dict) the progress of its checkpoint."""
        if self._save and self._save.step == step and self._save.evaluation is None:
            self._save.evaluation = changes
            self._settle()

    def finish(self):
        """Waits until all is on disk; an evaluation that is still missing will not come."""
        if self._save and self._save.future:
            self._wait()
        if self._save:
            self._save.evaluation = {}
            self._settle()
        if self._deletion:
            self._deletion.result()

    def _wait(self):
        save, future = self._save, self._save.future
        written, seconds = future.result()
        save.future = None
        blocked = min(save.blocked_seconds, seconds)
        self._log(save.step, seconds=seconds, blocked_seconds=blocked, written=written)
        if written:
            self.newest_step, self._failed = save.step, 0
            self._settle()
            return
        self._save, self._failed = None, self._failed + 1
        if self._failed == FAILED_SAVES:
            raise RunFailed(
                f"{FAILED_SAVES} checkpoints in a row could not be written: the last one is of "
                f"step {self.newest_step}. Make {self._path} writable, with enough free space"
            )

    def _settle(self):
        """Records the evaluation of a checkpoint that is on disk, and deletes older ones."""
        save = self._save
        if save.future is not None or save.evaluation is None:
            return
        self._save = None
        path = self._path / "checkpoints" / manifest.NAME.format(step=save.step)
        if self._accelerator.is_main_process and path.exists():  # not one of another run
            if save.evaluation:
                manifest.amend(path, save.evaluation)
            self._deletion = self._writer.start([], lambda _: checkpoint.prune(path, self._keep))


class Best:
    """The scores of a run, of which checkpoints keep a record."""

    def __init__(self, patience=None):
        """Args: patience (int | None): how many evaluations may be without a better score."""
        self._patience, self.stale = patience, 0  # evaluations since the one with the highest score
        self._newest, self._best = (None, None, None), (None, None)

    def restore(self, progress, longer):
        """Continues from the progress of a checkpoint.

        Args: longer (bool): the run has another length than before: it gets new patience.
        """
        self._best = (progress.get("best"), progress.get("best_loss"))
        self.stale = 0 if longer else progress.get("stale", 0)

    def add(self, step, score, loss):
        """An evaluation after `step`; higher scores are better, or of equal ones lower losses."""
        self._newest = (step, score, loss)
        improved = manifest.rank(score, loss) >= manifest.rank(*self._best)
        self._best = (score, loss) if improved else self._best
        self.stale = 0 if improved else self.stale + 1

    def out_of_patience(self):
        """Whether `--patience` evaluations in a row had no better score."""
        return self._patience is not None and self.stale >= self._patience

    def reason(self):
        """Why the run ends."""
        if not self.out_of_patience():
            return "all steps done"
        return f"no better score for {plural(self.stale, 'evaluation')}"

    def record(self, step):
        """What a checkpoint of `step` records: its own score, the best one, and the patience."""
        _, score, loss = self._newest if self._newest[0] == step else (step, None, None)
        best, best_loss = self._best
        scores = {"score": score, "loss": loss, "best": best, "best_loss": best_loss}
        return {**scores, "stale": self.stale}
