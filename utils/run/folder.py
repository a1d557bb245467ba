"""The folder of a run: how a run starts, continues, saves checkpoints, and ends.

The folder is locked, so that only one job writes to it.
"""

import contextlib
import math
import os
import shlex
import sys
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from utils.report import model_card, tracking
from utils.run import checkpoint, failures, launcher, manifest, memory, process, record, status
from utils.run.arguments import MAY_CHANGE
from utils.run.best import Best
from utils.run.claim import check_same, check_shared, claim
from utils.run.collectives import gather, run_on_all, run_on_main, wait_for_all
from utils.run.failures import RunFailed, UserError
from utils.run.files import read_json, write_json, write_text
from utils.run.metrics import Metrics, memory_bytes, summary
from utils.scale import saving, stacks

FAILED_SAVES = 3  # in a row that end a run: it would lose more and more work
LENGTH = {"epochs", "max_train_steps"}


@dataclass
class Save:
    """A checkpoint that is being written.

    Attributes:
        future: of whether it was written, and after how many seconds.
        asked (bool): by the file `save_now`.
        blocked_seconds (float): how long the training waited for it, at most.
    """

    step: int
    future: Future
    asked: bool
    blocked_seconds: float


class RunFolder:
    """The files of one run. Every process creates one; only the main process touches the files.

    Call `open`, then `start`; in the loop `timed`, `log` and `checkpoint`; and at the end `finish`
    or `exit_preempted`. It never sees the model and never calls the loop.

    Attributes:
        path (Path): the folder.
        finished (dict | None): the results, if this run has already finished: nothing to do.
        init_from (str | None): the value of `--init_from`; None for a run that continues, which has
            weights of its own.
        progress (dict): from the checkpoint to continue from: `step`, the values given to
            `checkpoint`, and more; {} for a new run.
        kept (dict): values of which every checkpoint has a copy in its `progress`.
        arguments (dict): the arguments of the run as they are recorded and compared.
        evaluation_due (bool): whether a signal stopped the run before the evaluation that was due
            after its last step: after `start`, evaluate first.
        metrics (Metrics): the log, after `start`.
    """

    def __init__(self, args, accelerator, may_change=()):
        """Args: may_change: arguments of the script that may change when the run continues."""
        self.path = Path(args.output_dir)
        self.arguments = record.comparable(vars(args))
        self.finished, self.progress, self.kept, self.evaluation_due = None, {}, {}, False
        self.init_from = getattr(args, "init_from", None)
        self._args, self._accelerator = args, accelerator
        self.is_main = accelerator.is_main_process
        self._may_change = MAY_CHANGE | set(may_change)
        self._plan, self._checkpoint, self._earlier = None, None, None
        self._run_id, self._record = uuid.uuid4().hex[:8], None
        self._failed_saves = 0  # in a row
        self._save = None  # the checkpoint that is being written
        self._best = Best(getattr(args, "patience", None))
        self._evaluated_at, self._identity = None, None

    # ----------------------------------------------------------------------------------- start

    def open(self, plan=None):
        """Locks the folder and looks for a checkpoint to continue from; writes no records yet.

        Empties a folder that was left by --dry_run or --overfit_batch, if this run has that flag.

        Args:
            plan (Plan | None): None: a script without checkpoints, whose length may not change.

        Raises:
            UserError: the folder cannot be written, is in use, or belongs to a run that these
                arguments do not continue; all checkpoints are damaged; or the run has already taken
                more steps than `plan` allows.
        """
        self._plan = plan
        outcome = run_on_main(self._accelerator, self._claim_and_find)
        self.finished, found, self._run_id, owner = outcome
        run_on_all(self._accelerator, lambda: self.is_main or check_shared(self.path, owner))
        seen = self.path.stat()
        self._identity = (seen.st_dev, seen.st_ino)
        if self.finished and plan and self.is_main:
            print(summary(self.finished, self.path, "this run has already finished, nothing to do"))
            print(
                "to train longer, run the same command with a larger --epochs or --max_train_steps"
                + ", or a larger --patience" * ("stopped_early" in self.finished)
            )
            self._upload()
        if found:
            self._checkpoint, self._earlier = found
            self.progress, self.init_from = self._earlier["progress"], None

    def start(self, scheduler=None, rates=None):
        """Loads the checkpoint that `open` found, if any, and opens the logs.

        Call it on every process, after `prepare`.

        Args:
            scheduler: the prepared `LambdaLR`; its learning rate is recomputed for the current
                length of the run. Other schedulers are saved and restored without being given here.
            rates (dict | None): name -> amount per sample, of additional rates to log (such as
                `tokens_per_second`).

        Returns:
            int: the number of optimizer steps done; 0 for a new run.
        """
        checkpoint.check_objects(self._accelerator, scheduler)
        if self._checkpoint:
            checkpoint.load(self._accelerator, self._checkpoint)  # accelerator.load_state
        failures.on_failure(partial(status.write_failure, self.path))
        memory.remember_folder(self.path)
        accelerator, seconds = self._accelerator, getattr(self._args, "timeout", 600) / 2
        stacks.Watcher(
            self.path, accelerator.process_index, accelerator.num_processes, seconds
        ).start()
        self._writer = saving.Writer(accelerator)
        if self.is_main:
            process.on_preempted(self._record_preempted)
        step = self.progress.get("step", 0)
        self.evaluation_due = self.progress.get("evaluation_due", False)
        self._resumed_from, self._saved_at = step, step
        if self._checkpoint:
            longer = self._earlier["total_steps"] != self._plan.total_steps
            self._best.restore(self.progress, longer)
        self._start_time = time.perf_counter()
        if self.is_main:  # first, since it says whose folder this is
            own = {"arguments": self.arguments, "run_id": self._run_id}
            own["total_steps"] = self._plan and self._plan.total_steps
            self._record = record.write(self.path, self._accelerator, own, step)
            status.write(self.path, "running", f"from step {step}", step=step)
            _tell_batch_script(self.path, step)
        batch_size = self._args.batch_size
        self.metrics = Metrics(
            self.path, self._accelerator, self._plan, batch_size, rates or {}, step
        )
        if self._checkpoint:
            change = checkpoint.apply_schedule(self._accelerator, scheduler, step)
            was, now = self._earlier["total_steps"], self._plan.total_steps
            if was != now:
                self.print(f"length changed from {was} to {now} steps: {change}")
        if self.is_main and self._plan:
            name = self.path.resolve().name
            project = Path(sys.argv[0]).stem
            tracking.start(self._accelerator, project, name, self._run_id, self.arguments, step)
            self._print_start()
        return step

    def _check_folder(self):
        """Raises RunFailed if the folder of this run was removed or renamed."""
        if self._identity is None:
            return
        try:
            now = self.path.stat()
            there = (now.st_dev, now.st_ino) == self._identity
        except OSError:
            there = False
        if not there:
            raise RunFailed(
                f"--output_dir {self.path} was removed or renamed while the run was writing to it: "
                "undo that and run the same command again, or use another --output_dir",
                retry=False,
            )

    def _claim_and_find(self):
        repository = getattr(self._args, "push_to_hub", None)
        if repository:
            model_card.check_repository(repository)
        args, may_change = self._args, self._may_change | (LENGTH if self._plan else set())
        self._claim = claim(self.path, self.arguments, args.resume, may_change)
        failures.on_failure(lambda reason, retry: self._claim.undo() or True)
        earlier, owner = self._claim.earlier, self._claim.owner
        script = record.script_hash()
        if earlier and earlier.get("script", script) != script:
            print(
                f"warning: {sys.argv[0]} has changed since this run started: use another "
                "--output_dir for a new run"
            )
        if earlier and status.read(self.path).get("state") == "finished":
            results = read_json(self.path / "results.json")
            if results and (self._plan is None or self._has_ended(results)):
                return results, None, None, owner
            if results and not manifest.all_in(self.path):
                raise UserError(
                    f"the run in {self.path} has finished, and its checkpoints are gone: train its "
                    "weights further in another --output_dir"
                )
        found = checkpoint.find(self.path, args.resume) if self._plan else None
        if found:
            path, saved = found
            check_same(saved["arguments"], self.arguments, path, may_change)
            steps_taken = saved["progress"]["step"]
            if self._plan.total_steps < steps_taken:
                raise UserError(
                    f"--epochs or --max_train_steps ask for {self._plan.total_steps} steps, but "
                    f"the run has taken {steps_taken} already ({path}): give at least as many, or "
                    "use another --output_dir"
                )
        return None, found, (earlier or {}).get("run_id", self._run_id), owner

    def _has_ended(self, results):
        """Whether a finished run is one for these arguments, too, or goes on."""
        early, total = results.get("stopped_early"), self._plan.total_steps
        if early:
            patience = getattr(self._args, "patience", None) or math.inf
            return early["total_steps"] == total and early["patience"] >= patience
        return results["global_step"] == total

    def _print_start(self):
        total, per_epoch = self._plan.total_steps, self._plan.steps_per_epoch
        self.print(f"{total} steps, {per_epoch} per epoch; output in {self.path}")
        source = f"continuing from {self._checkpoint}" if self._checkpoint else "starting at step 0"
        self.print(source)
        changes = record.changes(self._accelerator, self._earlier) if self._earlier else []
        if changes:
            self.print(
                f"warning: changed since that checkpoint: {', '.join(changes)}. The final weights "
                "will not be exactly those of an uninterrupted run"
            )
        self._warn_of_short_grace()

    def _warn_of_short_grace(self):
        grace, slowest = process.grace_seconds(), self.metrics.slowest_save
        # One checkpoint may be under way when the signal comes, and the last one follows.
        if launcher.is_elastic() and 2 * slowest > grace:
            self.print(
                f"warning: a checkpoint took {slowest:.0f} s, but the launcher kills its processes "
                f"{grace:.0f} s after SIGTERM: export "
                f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={3 * slowest:.0f}"
            )

    # -------------------------------------------------------------------------------- the loop

    def timed(self, batches):
        """Yields `batches`, and measures which share of the time the loop waits for them."""
        return self.metrics.timed(batches)

    def log(self, split, step, score=None, **figures):
        """Logs metrics of this step to the screen, to metrics.jsonl and to the trackers.

        Call it on every process.

        Args:
            split (str): `train` (adds the speed, the memory and the time left), `val`, `test`, ...
            score (float | None): score of an evaluation, higher is better: the highest-scoring
                checkpoint is kept (of equal ones, that with the lower `loss`, then the later one).
                Do not give one for a test split: it must not select a model.
            figures: numbers, scalar tensors or text; None: not measured in this step, left out.
        """
        if split == "test" and score is not None:
            raise ValueError("a test split never chooses a checkpoint: log it without a score")
        self._check_folder()
        score = None if score is None else float(score)  # a tensor, say
        self.metrics.log(split, step, figures, score)
        if split in ("val", "test"):
            self._evaluated_at = step
        if score is not None:
            self._best.add(step, *self._agree(score, figures.get("loss")))
        if self.evaluation_due and self._evaluated_at == step:
            self.evaluation_due = False
            if self.is_main and checkpoint.is_own(self._checkpoint, self.path):
                changed = {**self._best.record(step), "evaluation_due": False}
                manifest.amend(self._checkpoint, changed)

    def _agree(self, *values):
        """The values of the first process. Raises RunFailed if others differ in more than rounding.

        The processes decide by them when to save and when to stop.
        """
        own = [None if value is None else float(value) for value in values]
        first, *others = gather(self._accelerator, own)
        for other in others:  # as texts, NaN equals NaN
            for one, same in zip(first, other, strict=True):
                if str(one) != str(same) and not math.isclose(
                    one, same, rel_tol=1e-5, abs_tol=1e-9
                ):
                    raise RunFailed(
                        f"the processes have different results, such as {one:.6g} and {same:.6g}: "
                        "gather those of an evaluation with accelerator.gather_for_metrics",
                        retry=False,
                    )
        return first

    def out_of_patience(self):
        """Whether `--patience` evaluations in a row had no better score: the run ends."""
        return self._best.out_of_patience()

    def save_due(self, step):
        """Whether to save after `step`: as planned, at a new highest score, and at the end.

        Call it after each step: it also notes that the checkpoint before is on disk.
        """
        future = self._save and self._save.future
        if future and future.done() and not future.exception() and future.result()[0]:
            self._note_save()
        improved = self._best.improved_at(step)
        return self._plan.save_due(step, improved) or self.out_of_patience()

    def print(self, text):
        """Prints on the main process, above the progress bar if there is one."""
        if self.is_main:
            tqdm.write(text)

    @contextlib.contextmanager
    def checkpoint(self, step, **state):
        """Yields the folder for `accelerator.save_state`, which becomes `checkpoints/step_N`.

        Waits until the state is copied; a thread then writes it, unless this is the last checkpoint
        or `--wait_for_checkpoints` is given. Only one checkpoint is written at a time: waits for
        the one before. Every file is hashed and synced to disk before the folder gets its final
        name. If writing fails, prints a warning, and training continues on all processes without
        this checkpoint; after `FAILED_SAVES` failures in a row, the run ends with an error.

        Args:
            state: values to save with it, as JSON; after a restart they are in `run.progress`.
        """
        self._check_folder()
        start_time = time.perf_counter()
        with process.saving():
            self._finish_save()
        self.metrics.sync()  # the lines up to a checkpoint are not written again after a power cut
        progress = {"step": step, **self._best.record(step), **self.kept, **state}
        progress["train_seconds"] = self.train_seconds()
        last = (self._plan is not None and step == self._plan.total_steps) or self.out_of_patience()
        due = self._plan is not None and self._plan.evaluation_due(step)
        due = progress["evaluation_due"] = due and self._evaluated_at != step
        wait = last or process.is_stopping() or self._args.wait_for_checkpoints
        with process.saving():
            folder, error = checkpoint.start(self._accelerator, self.path)
            asked = self.is_main and stacks.answer_save(self.path)
            writes = []
            try:
                with contextlib.nullcontext(writes) if wait else self._writer.captured() as writes:
                    yield str(folder)
            except (Exception, checkpoint.CheckpointException) as caught:
                if not checkpoint.is_write_error(caught):
                    raise
                error = caught
            saved = {"progress": progress, **(self._record or {})}
            finish = partial(self._complete, folder, error, saved, start_time)
            future = self._writer.start(writes, finish)
            blocked = math.inf if wait else time.perf_counter() - start_time
            self._save = Save(step, future, asked, blocked)
            if wait:
                self._finish_save()
        if last and not due and self._saved_at == step:
            process.training_ends()
        self.metrics.restart_clock(step)

    def _complete(self, folder, error, saved, start_time, write_error):
        """Turns what was written to `folder` into a checkpoint; runs in the writer's thread.

        Returns:
            tuple[bool, float]: whether it was written; the seconds since `start_time`.
        """
        goes_on = False
        try:
            error = error or write_error
            if error is not None and not checkpoint.is_write_error(error):
                raise error
            keep, group = self._args.keep_checkpoints, self._writer.group
            written = checkpoint.finish(self._accelerator, folder, error, saved, keep, group)
            goes_on = written or self._failed_saves + 1 < FAILED_SAVES
        finally:
            if not goes_on:  # all processes call `checkpoint` after their next step, which raises
                stacks.place.save_asked = True
        return written, time.perf_counter() - start_time

    def _finish_save(self):
        """Waits for the checkpoint that is being written, if there is one."""
        if self._save is not None:
            with process.waiting_for("the checkpoint to be written"):
                saving.wait_for_newest()
            stacks.place.moved()
            self._note_save()

    def _note_save(self):
        """Notes that a checkpoint is on disk, or was not written."""
        save, self._save = self._save, None
        written, seconds = save.future.result()
        self.metrics.write(
            "checkpoint",
            save.step,
            seconds=seconds,
            blocked_seconds=min(save.blocked_seconds, seconds),
            written=written,
        )
        self._saved_at = save.step if written else self._saved_at
        self._failed_saves = 0 if written else self._failed_saves + 1
        if self._failed_saves == FAILED_SAVES:
            raise RunFailed(
                f"{FAILED_SAVES} checkpoints in a row could not be written: the last one is of "
                f"step {self._saved_at}. Make {self.path} writable, with enough free space"
            )
        if written and save.asked:
            self.print(f"asked by the file save_now: checkpoint of step {save.step}")

    def train_seconds(self):
        """Seconds since the first step, without the time between an interruption and a restart."""
        return self.progress.get("train_seconds", 0.0) + time.perf_counter() - self._start_time

    # ----------------------------------------------------------------------------------- the end

    def exit_preempted(self, where):
        """Ends every process after a signal, with exit code `PREEMPTED`, and records why.

        Args:
            where (int | str): the optimizer step; for a script without checkpoints, a description.
        """
        if isinstance(where, int):
            where = f"at step {where}, saved at step {self._saved_at}"
        reason = f"stopped by {process.signal_name() or 'a signal to another process'} {where}"
        if self.is_main:
            self._record_preempted(reason)
        self.print(f"{reason}: {failures.SAME_COMMAND}")
        wait_for_all(self._accelerator)  # a scheduler may stop the other machines when one exits
        self._accelerator.end_training()
        sys.exit(process.PREEMPTED)

    def _record_preempted(self, reason):
        again = failures.SAME_COMMAND
        status.write(self.path, "preempted", reason, step=self._saved_at, next=again)

    def finish(self, step, **figures):
        """Writes results.json and the status `finished`; call it once the weights are written.

        Plots, samples and the like come after it: an error in them cannot cost the results.

        Args: figures: final metrics.
        """
        self._check_folder()
        self._finish_save()
        seconds = self.train_seconds()
        samples = step * self._args.batch_size
        results = {
            **figures,
            "global_step": step,
            "samples_seen": samples,
            "train_seconds": seconds,
            "samples_per_second": samples / seconds,
            "num_processes": self._accelerator.num_processes,
            "peak_memory_bytes": memory_bytes(self._accelerator.device),
            "resumed_from": self._resumed_from,
        }
        if self.out_of_patience():
            early = {"patience": self._args.patience, "total_steps": self._plan.total_steps}
            results["stopped_early"] = early
        if self.is_main:
            best = manifest.best(manifest.all_in(self.path))
            results["best_checkpoint"] = best and best.name
            self.metrics.close_bar()
            self.write_results(results)
            process.on_preempted(None)  # nothing is left to do
        self._results = results

    def close(self, next_command=None, card=None):
        """Finishes the trackers, writes the model card, uploads the run, and prints a summary.

        Waits for all processes.

        Args:
            next_command (str | None): the name of a script and its arguments, to suggest for
                looking at the results; not of one that is not beside this script, as in a copy.
            card (dict | None): what the model card says about the model, for `model_card.write`.
        """
        if self.is_main:
            tracking.finish(self._accelerator, self.arguments, self._results)
            with failures.optional("the model card README.md"):
                if model_card.weight_files(self.path):
                    model_card.write(self.path, self._record, self._results, **(card or {}))
            ended = f"finished: {self._best.reason()}" if self.out_of_patience() else "done"
            print(summary(self._results, self.path, ended))
            self._upload()
            if next_command:
                name, _, arguments = next_command.partition(" ")
                script = Path(sys.argv[0]).with_name(name)
                if script.exists():
                    arguments = arguments.replace(str(self.path), shlex.quote(str(self.path)))
                    print(f"next: python {shlex.quote(str(script))} {arguments}")
            self.metrics.close()
        wait_for_all(self._accelerator)  # a scheduler may stop the other machines when one exits
        if self.is_main:
            self._claim.file.close()

    def write_results(self, results):
        """Writes results.json, then the status `finished`."""
        if self.is_main:
            write_json(self.path / "results.json", results)
            done = self._best.reason()
            status.write(self.path, "finished", done, step=results["global_step"])

    def _upload(self):
        repository = getattr(self._args, "push_to_hub", None)
        if repository:
            model_card.upload(self.path, repository)


def _tell_batch_script(path, step):
    """Tells submit.sbatch, which does not parse our arguments, where the status of this run is."""
    file = os.environ.get("RUN_FOLDER_FILE")
    if file:
        with failures.optional(f"{file}, by which a job is requeued,"):
            write_text(file, f"{path.resolve()}\n{step}\n")
