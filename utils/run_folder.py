"""Manages the folder of a run: logs, checkpoints and results, and how a run starts, continues and ends.

The folder is locked, so that only one job can write to it.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from utils import checkpoint, exits, hub, model_card, report, topology, tracking
from utils.arguments import CONTINUE_RULE, MAY_CHANGE
from utils.exits import UserError
from utils.files import read_json, read_json_lines, write_json, write_text

LENGTH = {"epochs", "max_train_steps"}
PATHS = ("dataset", "init_from")  # arguments that may be paths: they are recorded and compared as absolute paths


class RunFolder:
    """The files of one run. Every process creates one and calls `open`; only the main process reads and writes the files.

    Attributes:
        path (Path): the folder.
        finished (dict | None): the results, if this run has already finished and there is nothing to do.
        init_from (str | None): the value of `--init_from`; None for a run that continues, which has weights of its own.
        progress (dict): from the checkpoint to continue from: `step`, the values given to `checkpoint`, and more.
        arguments (dict): the arguments of the run as they are recorded and compared.
        record (dict): the description of the run that is saved in args.json and in every checkpoint.
    """

    def __init__(self, args, accelerator, may_change=()):
        """Args: may_change: names of additional arguments of the script that may change when the run continues."""
        self.path = Path(args.output_dir)
        self.arguments = comparable(vars(args))
        self.finished, self.progress, self.record = None, {}, None
        self.init_from = getattr(args, "init_from", None)
        self._accelerator, self.is_main = accelerator, accelerator.is_main_process
        self._resume, self._may_change = args.resume, MAY_CHANGE | set(may_change)
        self._keep = getattr(args, "keep_checkpoints", None)
        self._max_failures, self._failures = getattr(args, "max_failed_checkpoints", None), 0  # of checkpoints, in a row
        self._batch_size, self._repository = args.batch_size, getattr(args, "push_to_hub", None)
        self._plan, self._checkpoint, self._earlier, self._run_id = None, None, None, uuid.uuid4().hex[:8]
        self._score, self._improved = None, False
        self._slowest_save = 0.0  # seconds, of the checkpoints before a restart
        self._logged, self._sent = set(), set()  # (split, step) in metrics.jsonl, and sent to the trackers before a restart

    # ------------------------------------------------------------------------------------------------------- start

    def open(self, plan=None):
        """Locks the folder for this run and looks for a checkpoint to continue from; does not write records of the run yet.

        Empties a folder that was left by --dry_run or --overfit_batch, if this run has that flag too.

        Args:
            plan (Plan | None): the plan of the run; None: a script without checkpoints, whose length may not change.

        Raises:
            UserError: the folder cannot be written, is in use, or belongs to a run that these arguments do not continue; all
                checkpoints are damaged; or the run has already taken more steps than `plan` allows.
        """
        self._plan = plan
        outcome = topology.run_on_main(self._accelerator, self._claim_and_find)
        self.finished, latest, self._run_id, owner = outcome
        topology.run_on_all(self._accelerator, lambda: self._check_shared(owner))
        if self.is_main and (read_json(self.path / "args.json") or {}).get("script", script_hash()) != script_hash():
            print(f"warning: {sys.argv[0]} has changed since this run started: use another --output_dir for a new run")
        if self.finished and plan and self.is_main:
            print(report.summary(self.finished, self.path, "this run has already finished, nothing to do"))
            print("to train longer, run the same command with a larger --epochs or --max_train_steps")
            self._push()
        if latest:
            self._checkpoint, manifest = latest
            self.progress, self._earlier = manifest["progress"], manifest
            self.init_from = None

    def _claim_and_find(self):
        if self._repository:
            hub.check(self._repository)
        earlier = self.claim()
        status = read_json(self.path / "status.json") or {}
        results = read_json(self.path / "results.json") if earlier and status.get("state") == "finished" else None
        if results and (self._plan is None or results["global_step"] == self._plan.total_steps):
            return results, None, None, self._owner
        latest = checkpoint.find(self.path, self._resume) if self._plan else None
        if latest:
            path, manifest = latest
            self.check_same(manifest["arguments"], path)
            steps_taken = manifest["progress"]["step"]
            if self._plan.total_steps < steps_taken:
                raise UserError(
                    f"--epochs or --max_train_steps ask for {self._plan.total_steps} steps, but the run has taken "
                    f"{steps_taken} already ({path}): give at least as many, or use another --output_dir"
                )
        return None, latest, (earlier or {}).get("run_id", self._run_id), self._owner

    def _check_shared(self, owner):
        """Checks on every other process that it sees the lock of the main process: is it the same folder there?"""
        for _ in range(checkpoint.LOOKS):
            # The main process must not open its lock again: closing any descriptor of a file releases its locks.
            lock = self.path / ".lock"
            if self.is_main or (self.path.is_dir() and lock.name in os.listdir(self.path) and lock.read_text() == owner):
                return
            time.sleep(0.5)
        raise UserError(
            f"--output_dir {self.path} is another folder on {socket.gethostname()} than for {owner}: use one on a file system "
            "that all machines share"
        )

    def claim(self):
        """Locks the folder for this process and checks that this run may use it; main process only.

        Returns:
            dict | None: args.json of the run in the folder, if there is one.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_folder()
            probe = self.path / ".probe"
            probe.write_bytes(bytes(1 << 16))
            probe.unlink()
        except OSError as error:
            raise UserError(f"cannot write to --output_dir {self.path}: {error.strerror or error}") from None
        earlier = read_json(self.path / "args.json")
        if earlier and any(self.arguments.get(f) and earlier["arguments"].get(f) for f in ("dry_run", "overfit_batch")):
            for entry in self.path.iterdir():
                if entry.name != ".lock":
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            earlier = None
        if earlier is None:
            own = (".lock", ".args.json.", "checkpoints")
            if any(not entry.name.startswith(own) for entry in self.path.iterdir()):
                raise UserError(
                    f"{self.path} is not empty and does not contain a run of these scripts: use another --output_dir"
                )
            return None
        if self._resume == "never":
            raise UserError(f"{self.path} already contains a run: with --resume never, use another --output_dir")
        scripts = [Path(command[0]).name for command in (earlier["command"], sys.argv)]
        if scripts[0] != scripts[1] and earlier["arguments"].keys() != self.arguments.keys():
            raise UserError(f"{self.path} holds a run of {scripts[0]}, not {scripts[1]}: use another --output_dir")
        self.check_same(earlier["arguments"], self.path)
        return earlier

    def check_same(self, arguments, place):
        """Raises UserError, which lists each difference, if `arguments` (recorded in `place`) are those of another run."""
        may_change = self._may_change | LENGTH if self._plan else self._may_change
        differences = []
        for name in sorted((arguments.keys() | self.arguments.keys()) - may_change):
            before, now = arguments.get(name), self.arguments.get(name)
            if before != now and not (name in PATHS and moved(before, now)):
                before, now = (repr(value) if "\n" in str(value) else value for value in (before, now))
                differences.append(f"--{name} {now} (was {before})")
        if differences:
            same_model = arguments.get("model") == self.arguments.get("model")
            weights = f" (from these weights: --init_from {place})" if same_model else ""
            raise UserError(
                f"{place} belongs to a run with other arguments: {', '.join(differences)}. {CONTINUE_RULE} Use the earlier "
                f"values, or start a new run with another --output_dir{weights}"
            )

    def start(self, scheduler=None, rates=None):
        """Loads the checkpoint that `open` found, if any, and opens the logs; call it on every process, after `prepare`.

        Args:
            scheduler: the prepared scheduler; its learning rate is set to that of the schedule for the current length.
            rates (dict | None): name -> amount per sample, of additional rates to log (such as `tokens_per_second`).

        Returns:
            int: the number of optimizer steps done; 0 for a new run.
        """
        if self._checkpoint:
            own = self._checkpoint.resolve().is_relative_to(self.path.resolve())
            checkpoint.load(self._accelerator, self._checkpoint, own)  # accelerator.load_state
            self._apply_schedule(scheduler)
        exits.on_failure(self._failed)
        step = self.progress.get("step", 0)
        self._resumed_from, self._saved_at, self._best = step, step, self.progress.get("best")
        self._start_time = time.perf_counter()
        self._meter = report.Meter(self._accelerator.device, self._batch_size, rates or {})
        self._meter.restart(step)
        if self.is_main:
            self._record(step)
            self._open_metrics(step)
        if self.is_main and self._plan:
            project = Path(sys.argv[0]).stem
            tracking.start(self._accelerator, project, self.path.resolve().name, self._run_id, self.arguments, step)
            self._bar = tqdm(
                total=self._plan.total_steps, initial=step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
            )
            self.print(f"{self._plan.total_steps} steps, {self._plan.steps_per_epoch} per epoch; output in {self.path}")
            self.print(f"continuing from {self._checkpoint}" if self._checkpoint else "starting at step 0")
            if self._checkpoint:
                self._warn_of_changes()
            self._warn_of_short_grace()
        return step

    def _apply_schedule(self, scheduler):
        # The learning rate in a checkpoint is for the length of the run at that time.
        step, change = self.progress["step"], "the learning rate does not depend on it"
        if scheduler is not None:
            before = scheduler.get_last_lr()[0]
            checkpoint.apply_schedule(scheduler)
            after = scheduler.get_last_lr()[0]
            change = f"the learning rate at step {step} changes from {before:.3g} to {after:.3g}"
            if before == after:
                change = f"the learning rate at step {step} stays {after:.3g}"
        if self._earlier["total_steps"] != self._plan.total_steps:
            self.print(f"length changed from {self._earlier['total_steps']} to {self._plan.total_steps} steps: {change}")

    def _warn_of_changes(self):
        """Says what else than the arguments has changed, if it can change the last bits."""
        now = topology.describe(self._accelerator) | versions()
        earlier = self._earlier["topology"] | self._earlier["versions"]
        changes = [
            f"{name.replace('_', ' ')} {earlier.get(name)} -> {now[name]}" for name in now if earlier.get(name) != now[name]
        ]
        if changes:
            self.print(
                f"warning: changed since that checkpoint: {', '.join(changes)}. The final weights will not be exactly those "
                "of an uninterrupted run"
            )

    def _warn_of_short_grace(self):
        grace = exits.grace_seconds()
        if grace is not None and self._slowest_save > grace:
            self.print(
                f"warning: a checkpoint took {self._slowest_save:.0f} s, but the launcher kills its processes {grace:.0f} s "
                f"after SIGTERM: export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * self._slowest_save:.0f}"
            )

    def _record(self, step):
        self.record = {
            "arguments": self.arguments,
            "run_id": self._run_id,
            "total_steps": self._plan and self._plan.total_steps,
            "topology": topology.describe(self._accelerator),
            "versions": versions(),
            "git_commit": git_commit(),
            "script": script_hash(),
        }
        starts = (read_json(self.path / "args.json") or {}).get("starts", [])
        starts.append({"step": step, "time": _now(), **self.record["topology"]})
        write_json(self.path / "args.json", {**self.record, "command": sys.argv, "starts": starts})
        self._write_status("running", f"from step {step}", step=step)

    def _open_metrics(self, step):
        path, kept = self.path / "metrics.jsonl", []
        for record in read_json_lines(path) if path.exists() else ():
            self._sent.add((record["split"], record["step"]))
            if record["split"] == "checkpoint":
                self._slowest_save = max(self._slowest_save, record["seconds"])
            if record["step"] <= step:
                kept.append(record)
                self._logged.add((record["split"], record["step"]))
        write_text(path, "".join(f"{json.dumps(record)}\n" for record in kept))
        self._metrics = path.open("a")

    # --------------------------------------------------------------------------------------------------------- log

    def timed(self, batches):
        """Yields `batches`, and measures for the log line which share of the time the loop waits for them."""
        return self._meter.timed(batches)

    def log(self, split, step, score=None, **figures):
        """Logs metrics of this step to the screen, to metrics.jsonl and to the trackers. Call it on every process.

        For the split `train` this adds the speed, the memory and the time left.

        Args:
            score (float | None): score of an evaluation, higher is better; the checkpoint with the best score is kept.
            figures: numbers, scalar tensors or text; None: not measured in this step, left out.
        """
        figures = {name: report.as_number(value) for name, value in figures.items() if value is not None}
        if split == "train":
            speeds, state = self._meter.read(step, self._plan.total_steps)
            figures |= speeds
        else:
            state = {}
            self._meter.restart(step)  # the time of an evaluation does not count as training
        if self.is_main:
            values = {f"{split}/{name}": value for name, value in figures.items()}
            tracking.log(self._accelerator, values, step, sent_before=(split, step) in self._sent)
            scored = {} if score is None else {"score": score}
            self.write(split, step, epoch=self._plan.epoch_at(step), **figures, **state, **scored)
            self._show(split, step, figures | state)
        if score is not None:
            self._score = (step, score)
            self._improved = self._best is None or score > self._best
            if self._improved:
                self._best = score

    def improved_at(self, step):
        """Whether the evaluation after `step`, if there was one, had the best score so far."""
        return self._score is not None and self._score[0] == step and self._improved

    def _show(self, split, step, figures):
        if split == "train":
            self._bar.update(step - self._bar.n)
            shown = {"step": step, "epoch": self._plan.epoch_at(step), **figures}
            if self._bar.disable:  # not a terminal
                self.print(report.train_line(shown, self._plan.total_steps))
            else:
                self._bar.set_postfix_str(report.train_summary(shown))
        elif "text" not in figures:
            self.print(report.evaluation_line(split, step, figures))

    def write(self, split, step, **figures):
        """Appends a line to metrics.jsonl, unless the line of this step was already written before a restart."""
        if self.is_main and (split, step) not in self._logged:
            self._logged.add((split, step))
            self._metrics.write(json.dumps({"split": split, "step": step, **figures}) + "\n")
            self._metrics.flush()

    def print(self, text):
        """Prints on the main process, above the progress bar if there is one."""
        if self.is_main:
            tqdm.write(text)

    # -------------------------------------------------------------------------------------------------- checkpoint

    @contextlib.contextmanager
    def checkpoint(self, step, **state):
        """Yields the folder for `accelerator.save_state`, which becomes `checkpoints/step_N` atomically.

        Every file is hashed and synced to disk before the folder gets its final name. If writing fails, this prints a warning,
        and training continues on all processes without this checkpoint; after `--max_failed_checkpoints` failures in a row,
        the run ends with an error.

        Args:
            state: values to save with it, as JSON; after a restart they are in `run.progress`.
        """
        start_time = time.perf_counter()
        if self.is_main:
            os.fsync(self._metrics.fileno())  # the lines up to a checkpoint are not written again after a power cut
        score = self._score[1] if self._score and self._score[0] == step else None  # of the evaluation after this step
        progress = {"step": step, "train_seconds": self.train_seconds(), "score": score, "best": self._best, **state}
        folder, error = checkpoint.start(self._accelerator, self.path)
        try:
            yield str(folder)
        except (Exception, checkpoint.CheckpointException) as caught:
            if not checkpoint.is_write_error(caught):
                raise
            error = caught
        manifest = {"progress": progress, **(self.record or {})}
        written = checkpoint.finish(self._accelerator, folder, error, manifest, self._keep)
        self.write("checkpoint", step, seconds=time.perf_counter() - start_time, written=written)
        self._meter.restart(step)
        self._failures = 0 if written else self._failures + 1
        if written:
            self._saved_at = step
        elif self._failures == self._max_failures:
            raise exits.RunFailed(
                f"{self._failures} checkpoints in a row could not be written (--max_failed_checkpoints): the last one is of "
                f"step {self._saved_at}. Make {self.path} writable, with enough free space"
            )

    def train_seconds(self):
        """Seconds since the first step, without the time between an interruption and the restart."""
        return self.progress.get("train_seconds", 0.0) + time.perf_counter() - self._start_time

    # --------------------------------------------------------------------------------------------------------- end

    def exit_preempted(self, where):
        """Ends every process after a signal: records `where` the run stopped, and exits with code `PREEMPTED`.

        Args:
            where (int | str): the optimizer step; for a script without checkpoints, a description.
        """
        if isinstance(where, int):
            where = f"at step {where}, saved at step {self._saved_at}"
        reason = f"stopped by {exits.signal_name() or 'a signal to another process'} {where}"
        self._write_status("preempted", reason, step=self._saved_at, next=exits.SAME_COMMAND)
        self.print(f"{reason}: {exits.SAME_COMMAND}")
        topology.gather(self._accelerator, None)  # wait: a scheduler may stop the other machines when one exits
        self._accelerator.end_training()
        sys.exit(exits.PREEMPTED)

    def finish(self, step, next_command=None, **figures):
        """Writes results.json and then status.json, both atomically, prints a summary, and waits for all processes.

        Args:
            next_command (str | None): a command to suggest for looking at the results.
            figures: final metrics.
        """
        seconds = self.train_seconds()
        results = {
            **figures,
            "global_step": step,
            "samples_seen": step * self._batch_size,
            "train_seconds": seconds,
            "samples_per_second": step * self._batch_size / seconds,
            "num_processes": self._accelerator.num_processes,
            "peak_memory_bytes": report.memory_bytes(self._accelerator.device),
            "resumed_from": self._resumed_from,
        }
        if self.is_main:
            best = checkpoint.best(sorted(self.path.glob("checkpoints/step_*")))
            results["best_checkpoint"] = best and best.name
            self._bar.close()
            final = {f"final/{name}": value for name, value in figures.items() if name.startswith(("test_", "val_"))}
            tracking.finish(self._accelerator, self.arguments, final)
            weights = self.path / "model.safetensors"
            if weights.exists():
                write_text(self.path / "README.md", model_card.card(weights, {**self.record, "command": sys.argv}, results))
            self.write_results(results)
            print(report.summary(results, self.path, "done"))
            self._push()
            if next_command:
                print(f"next: {next_command}")
        topology.gather(self._accelerator, None)  # wait: a scheduler may stop the other machines when one exits

    def _push(self):
        if self._repository:
            hub.push(self.path, self._repository)

    def write_results(self, results):
        """Writes results.json, then the status `finished`."""
        if self.is_main:
            write_json(self.path / "results.json", results)
            self._write_status("finished", "all steps done", step=results["global_step"])

    def _write_status(self, state, reason, **more):
        if self.is_main:
            write_json(self.path / "status.json", {"state": state, "reason": reason, "time": _now(), **more})

    def _failed(self, reason, retry):
        """Records why the run failed; returns False if another process has already recorded a reason.

        The first process to fail knows the reason; the others fail later, because they lose contact with it.
        """
        with (self.path / ".lock_status").open("a") as lock:
            with contextlib.suppress(OSError):  # on a file system without locks two processes may both be the first
                fcntl.lockf(lock, fcntl.LOCK_EX)
            if (read_json(self.path / "status.json") or {}).get("state") != "running":
                return False
            advice = exits.SAME_COMMAND if retry else None
            write_json(self.path / "status.json", {"state": "failed", "reason": reason, "time": _now(), "next": advice})
        return True

    def _lock_folder(self):
        # A POSIX record lock belongs to the process: the kernel releases it however the process ends, and forked data loader
        # workers do not inherit it. The processes of a killed job may take a few seconds to exit: wait for them.
        self._lock = (self.path / ".lock").open("a+")
        self._owner = f"process {os.getpid()} on {socket.gethostname()}"
        deadline = time.monotonic() + 2 * exits.ORPHAN_SECONDS
        while True:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # Lustre or NFS, mounted without locks
                    print(
                        f"warning: the file system of {self.path} has no locks: nothing keeps two jobs from writing to it",
                        file=sys.stderr,
                        flush=True,
                    )
                    break
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if time.monotonic() > deadline:
                    self._lock.seek(0)
                    owner = self._lock.read().strip() or "another process"
                    raise UserError(f"{self.path} is in use by {owner}: wait for it, or use another --output_dir") from None
                time.sleep(0.2)
        self._lock.truncate(0)
        self._lock.write(self._owner)
        self._lock.flush()


def comparable(arguments):
    """The arguments that JSON can store. Paths to existing data are made absolute, so that they compare equal."""
    plain = {name: value for name, value in arguments.items() if isinstance(value, (str, int, float, bool, type(None)))}
    for name in PATHS:
        path = plain.get(name)
        if path is not None and (name == "init_from" or Path(path).exists()):  # a dataset may be a Hub id
            plain[name] = str(Path(path).resolve())
    return plain


def moved(before, now):
    """Whether data was moved: `before` no longer exists, and `now` has the same name. Allows a whole project to be moved."""
    before, now = Path(str(before)), Path(str(now))
    return before.is_absolute() and not before.exists() and now.is_absolute() and before.name == now.name


def script_hash():
    """SHA-256 of the script's file; None in a notebook."""
    file = Path(sys.argv[0])
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def versions():
    """Versions of Python and of the packages that can change results."""
    packages = ("torch", "torchvision", "accelerate", "datasets")
    installed = {}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return {"python": platform.python_version(), **installed}


def git_commit():
    """The git commit of the running script, with `-dirty` if files were changed since, or None outside a repository."""
    folder = Path(sys.argv[0]).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _now():
    return datetime.now(UTC).isoformat(timespec="seconds")
