"""The folder of a run: how a run starts, continues, saves checkpoints, and ends."""

import contextlib
import sys
import time
import uuid
from functools import partial
from pathlib import Path

from utils.run import checkpoint, manifest, opening, process, record
from utils.run.arguments import LENGTH, MAY_CHANGE
from utils.run.collectives import run_on_all, run_on_main, same_everywhere, wait_for_all
from utils.run.files import write_json
from utils.run.metrics import Meter, Metrics, summary
from utils.run.saves import Best, Saves


class RunFolder:
    """The files of one run. Every process creates one; only the main process touches the files.

    Call `open`, then `start`; in the loop `timed`, `log` and `checkpoint`; and at the end `finish`
    or `exit_preempted`. It never sees the model's loss or metric, and never calls the loop.

    Attributes:
        path (Path): the folder.
        identity (Identity): the arguments and data by which a run continues, after `open`.
        finished (dict | None): the results, if this run has already finished: nothing to do.
        init_from (str | None): the value of `--init_from`; None for a run that continues, which has
            weights of its own.
        progress (dict): from the checkpoint to continue from: `step`, the values given to
            `checkpoint`, and more; {} for a new run.
        evaluation_due (bool): the run was stopped in the evaluation after the step to continue
            from: after `start`, evaluate first.
        best (Best): the scores; `best.out_of_patience` says whether the run ends early.
        save_asked (bool): set in the same step on all processes: the next `save_due` is true.
        hang (str): which process makes no progress, and where it is, if this is known.
        record (dict | None): what args.json says of this start; on the main process, after `start`.
        results (dict | None): what results.json says, after `finish`.
        meter, metrics, saves: the `Meter`, `Metrics` and `Saves`, after `start`.
    """

    def __init__(self, args, accelerator, may_change=(), loggers=(), writer=None):
        """
        Args:
            may_change: arguments of the script that may change when the run continues.
            loggers: get each log line, see `Metrics`; have `start(run)` and `finish(run)`, which
                the main process calls.
            writer: how checkpoints are written: see `saves.Writer`.
        """
        self.path, self.is_main = Path(args.output_dir), accelerator.is_main_process
        self.finished, self.progress, self.evaluation_due = None, {}, False
        self.init_from, self.record, self.results = getattr(args, "init_from", None), None, None
        self.run_id = uuid.uuid4().hex[:8]
        self._args, self.accelerator = args, accelerator
        self._loggers, self._writer = loggers, writer
        self._may_change = set(may_change)
        self.best, self.save_asked, self.hang = Best(getattr(args, "patience", None)), False, ""

    def open(self, plan, **data):
        """Locks the folder and looks for a checkpoint to continue from; writes no records yet.

        Args:
            plan (Plan): the schedule of the run.
            data (str): name -> what else must be the same when the run continues, such as a
                checksum of the data; recorded in args.json under `data`.

        Raises:
            UserError: see `record.claim` and `opening.find`.
        """
        self._plan = plan
        may_change = LENGTH | MAY_CHANGE | self._may_change
        arguments = record.comparable(vars(self._args))
        self.identity = opening.Identity(arguments, data, may_change, self._args.resume)
        owner = run_on_main(self.accelerator, self._claim)
        run_on_all(self.accelerator, lambda: self.is_main or record.check_shared(self.path, owner))
        start = opening.find(self.accelerator, self.path, self.identity, plan)
        self._place, self._start, self.finished = self.path.stat(), start, start.results
        self.run_id = start.run_id or self.run_id
        if start.checkpoint:
            self.progress, self.init_from = start.manifest["progress"], None
        if self.finished and self.is_main:
            opening.announce_finished(self.path, self.finished)

    def _claim(self):
        owner, self._lock = record.claim(self.path)
        return owner

    def start(self, rates=None):
        """Loads the checkpoint that `open` found, if any, and opens the logs.

        Call it on every process, after `prepare`. Returns the number of optimizer steps done.

        Args: rates (dict | None): name -> amount per sample, of more rates (`tokens_per_second`).
        """
        accelerator, plan = self.accelerator, self._plan
        checkpoint.check_objects(accelerator)
        if self._start.checkpoint:
            # accelerator.load_state
            checkpoint.load(accelerator, self._start.checkpoint, bool(self._start.changes))
        step = self.progress.get("step", 0)
        self.evaluation_due = self.progress.get("evaluation_due", False)
        self._resumed_from, self._start_time = step, time.perf_counter()
        process.record_with(self._record_failed, self._record_preempted if self.is_main else None)
        if self.is_main:  # first, since it says whose folder this is
            run = {"arguments": self.identity.arguments, "data": self.identity.data}
            run |= {"run_id": self.run_id, "total_steps": plan.total_steps}
            self.record = record.write(self.path, accelerator, run, step)
            record.write_status(self.path, "running", f"from step {step}", step=step)
            record.tell_batch_script(self.path, step)
        self.meter = Meter(accelerator.device, self._args.batch_size, rates or {})
        self.metrics = Metrics(self.path, accelerator, plan, self.meter, step, self._loggers)
        keep = getattr(self._args, "keep_checkpoints", 1)
        log = partial(self.metrics.write, "checkpoint")
        self.saves = Saves(accelerator, self.path, keep, log, self._writer)
        self.saves.resume(step, self.evaluation_due)
        if self._start.checkpoint:
            longer = self._start.manifest["total_steps"] != plan.total_steps
            self.best.restore(self.progress, longer)
        if self.is_main:
            for logger in self._loggers:
                logger.start(self)
            opening.announce(accelerator, self.path, plan, self._start)
        return step

    def timed(self, batches):
        """Yields `batches`, and measures which share of the time the loop waits for them."""
        return self.meter.timed(batches)

    def log(self, split, step, score=None, **figures):
        """Logs metrics of this step to the screen, to metrics.jsonl and to the loggers.

        Call it on every process.

        Args:
            split (str): `train` (adds the speed, the memory and the time left), `val`, `test`, ...
            score (float | None): score of an evaluation, higher is better: the highest-scoring
                checkpoint is kept (of equal ones, that with the lower `loss`, then the later one).
                Raises ValueError for a test split: it must not select a model.
            figures: numbers, scalar tensors or text; None: not measured in this step, left out.
        """
        if split == "test" and score is not None:
            raise ValueError("a test split never chooses a checkpoint: log it without a score")
        record.check_place(self.path, self._place)
        score = None if score is None else float(score)  # it may be a tensor
        self.metrics.log(split, step, figures, score)
        if score is not None:
            loss = None if figures.get("loss") is None else float(figures["loss"])
            self.best.add(step, *same_everywhere(self.accelerator, [score, loss]))
        if split in ("val", "test"):
            self.evaluation_due = False
            self.metrics.sync()  # before a checkpoint says that it is evaluated
            self.saves.evaluated(step, {**self.best.record(step), "evaluation_due": False})
            if self._is_last(step) and self.saves.newest_step == step:
                process.training_ends()

    def save_due(self, step):
        """Whether to save after `step`. Call it after each step: it also notes earlier saves."""
        self.saves.look()
        asked, self.save_asked = self.save_asked, False
        return asked or self._plan.save_due(step)

    def print(self, text):
        """Prints on the main process only."""
        if self.is_main:
            print(text)

    @contextlib.contextmanager
    def checkpoint(self, step, guard, model, **state):
        """Yields the folder for `accelerator.save_state`, which becomes `checkpoints/step_N`.

        Every file is hashed and synced to disk before the folder gets its final name. A write error
        costs a warning and this checkpoint; three in a row end the run.

        Args:
            guard (Guard): checks that `model` has not diverged.
            state: values to save with it, as JSON; after a restart they are in `run.progress`.
        """
        guard.check(model)
        record.check_place(self.path, self._place)
        self.metrics.sync()  # the lines up to a checkpoint are not written again after a power cut
        progress = {"step": step, **self.best.record(step), **state}
        progress["train_seconds"] = self.train_seconds()
        progress["evaluation_due"] = self._plan.evaluation_due(step)
        contents = {"progress": progress, **(self.record or {})}
        wait = self._is_last(step) or process.is_stopping()
        with self.saves.write(contents, wait) as folder:
            yield folder
        self.meter.restart(step)  # the time of a save does not count as training

    def _is_last(self, step):
        return step == self._plan.total_steps or self.best.out_of_patience()

    def train_seconds(self):
        """Seconds since the first step, without the time between an interruption and a restart."""
        return self.progress.get("train_seconds", 0.0) + time.perf_counter() - self._start_time

    def exit_preempted(self, step):
        """Ends every process after a signal, with exit code `PREEMPTED`, and records why."""
        signal_name = process.signal_name() or "a signal to another process"
        reason = f"stopped by {signal_name} at step {step}, saved at step {self.saves.newest_step}"
        if self.is_main:
            print(f"{reason}: {self._record_preempted(reason)}")
        wait_for_all(self.accelerator)  # a scheduler may stop the other machines when one exits
        self.accelerator.end_training()
        sys.exit(process.PREEMPTED)

    def _record_preempted(self, reason):
        again = record.how_to_continue(self.path, self._start.checkpoint)
        step = self.saves.newest_step
        record.write_status(self.path, "preempted", reason, step=step, next=again)
        return again

    def _record_failed(self, reason, retry):
        again = record.how_to_continue(self.path, self._start.checkpoint) if retry else None
        first = record.write_failure(self.path, f"{reason}\n{self.hang}".strip(), again)
        return first, [line for line in (self.hang, again) if line]

    def finish(self, step, **figures):
        """Writes results.json and the status `finished`; call it once the weights are written.

        Plots and samples come after it: an error in them costs no result. `figures`: final metrics.
        """
        record.check_place(self.path, self._place)
        self.saves.finish()
        self.results = {**figures, **self.metrics.totals(step, self.train_seconds())}
        self.results["resumed_from"] = self._resumed_from
        if self.best.out_of_patience():
            early = {"patience": self._args.patience, "total_steps": self._plan.total_steps}
            self.results["stopped_early"] = early
        if self.is_main:
            best = manifest.best(manifest.all_in(self.path))
            self.results["best_checkpoint"] = best and best.name
            write_json(self.path / "results.json", self.results)
            record.write_status(self.path, "finished", self.best.reason(), step=step)
            process.record_with(self._record_failed)  # nothing is left to do

    def close(self, next_command=None):
        """Finishes the loggers and prints a summary, with a command (str | None) to see more."""
        if self.is_main:
            for logger in self._loggers:
                logger.finish(self)
            ended = f"finished: {self.best.reason()}" if self.best.out_of_patience() else "done"
            print(summary(self.results, self.path, ended))
            if next_command:
                print(f"next: {next_command}")
            self.metrics.close()
        wait_for_all(self.accelerator)  # a scheduler may stop the other machines when one exits
        if self.is_main:
            self._lock.close()
