"""What a run leaves behind: args.json, metrics.jsonl, status.json, results.json, and a lock on the folder."""

import fcntl
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from utils import checkpoint, exits, topology
from utils.exits import UserError

# Arguments that do not change what is computed (accumulation: to rounding), so that a run may go on with others.
FREE = {"output_dir", "resume", "checkpoint_every", "keep_checkpoints", "log_every", "eval_every", "num_workers"} | {
    "profile",
    "timeout",
    "compile",
    "gradient_accumulation_steps",
}


class RunFolder:
    """The files of one run. Made and opened by every process; the main process reads and writes.

    Attributes:
        path (Path): the folder.
        arguments (dict): the run's arguments as they are recorded and compared.
    """

    def __init__(self, args, accelerator, free=()):
        """Args: free: names of further arguments that may change when the run is continued."""
        self.path = Path(args.output_dir)
        self._accelerator, self.is_main = accelerator, accelerator.is_main_process
        self.arguments = comparable(vars(args))
        self.resume = args.resume
        self._free = free
        self.record = None  # said of the run in args.json and in every checkpoint
        self._logged = set()

    def open(self):
        """Takes the folder for this run, and finds where to go on; writes nothing of its own yet.

        Returns:
            tuple: the results (dict), if this same run is finished already, else None; and, as from `checkpoint.find`,
            the checkpoint to start from.

        Raises:
            UserError: the folder cannot be written, is in use, or holds a run that this one must not continue; or
            there is no whole checkpoint where there should be one.
        """

        def take_and_find():
            finished = self.take()
            found = None if finished else checkpoint.find(self.path, self.resume)
            if found:
                self.check_same(found[1]["arguments"], found[0])
            return finished, found

        return topology.from_main(self._accelerator, take_and_find)

    def take(self):
        """Locks the folder for this process and checks that this run may have it: the main process' part of `open`.

        Returns:
            dict | None: the results, if this same run is finished already.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
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
                raise UserError(f"{self.path} is not empty and holds no run of these scripts: name another --output_dir")
            return None
        if self.resume == "never":
            raise UserError(f"{self.path} already holds a run: with --resume never, name another --output_dir")
        self.check_same(earlier["arguments"], self.path)
        status = read_json(self.path / "status.json") or {}
        longer = any((self.arguments.get(n) or 0) > (earlier["arguments"].get(n) or 0) for n in self._free)
        return read_json(self.path / "results.json") if status.get("state") == "finished" and not longer else None

    def check_same(self, arguments, place):
        """Raises UserError, naming each difference, if `arguments` (found in `place`) are those of another run."""
        names = sorted((arguments.keys() | self.arguments.keys()) - FREE - set(self._free))
        differences = [
            f"--{name} {self.arguments.get(name)} (was {arguments.get(name)})"
            for name in names
            if arguments.get(name) != self.arguments.get(name)
            and not (name == "dataset" and moved(arguments.get(name), self.arguments.get(name)))
        ]
        if differences:
            raise UserError(
                f"{place} is of a run with other arguments: {', '.join(differences)}. Use the earlier ones to continue it, "
                "or name another --output_dir"
            )

    def begin(self, step, topology):
        """Writes args.json and opens metrics.jsonl, dropping what was logged after `step`: it is about to be done again."""
        exits.on_failure(self._failed)
        if not self.is_main:
            return
        self.record = {"arguments": self.arguments, "topology": topology, "versions": versions(), "git_commit": git_commit()}
        write_json(self.path / "args.json", {**self.record, "command": sys.argv})
        self.status("running", f"from step {step}", step=step)
        path = self.path / "metrics.jsonl"
        kept = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break  # the line that was being written when the run was killed
            if record["step"] <= step:
                kept.append(line)
                self._logged.add((record["split"], record["step"]))
        write_text(path, "".join(f"{line}\n" for line in kept))
        self._metrics = path.open("a")

    def log(self, split, step, **figures):
        """Appends a line to metrics.jsonl; a line that is already there, from before a restart, is not repeated."""
        if self.is_main and (split, step) not in self._logged:
            self._logged.add((split, step))
            self._metrics.write(json.dumps({"split": split, "step": step, **figures}) + "\n")
            self._metrics.flush()

    def status(self, state, reason, **more):
        """Writes status.json. `state`: running, preempted, finished or failed."""
        if self.is_main:
            write_json(self.path / "status.json", {"state": state, "reason": reason, "time": _now(), **more})

    def _failed(self, reason):
        # From any process. The first to fail knows why: what the others say, who have lost it, comes later.
        if (read_json(self.path / "status.json") or {}).get("state") == "running":
            write_json(self.path / "status.json", {"state": "failed", "reason": reason, "time": _now()})

    def preempted(self, where, **more):
        """Ends every process as a signal asked: says `where` the run stopped, and leaves with the code that means it."""
        reason = f"stopped by {exits.signal_name() or 'a signal to another process'} {where}"
        self.status("preempted", reason, **more)
        if self.is_main:
            print(f"{reason}: the same command continues from there")
        self._accelerator.wait_for_everyone()  # a scheduler may end the other machines once one has left
        self._accelerator.end_training()
        sys.exit(exits.PREEMPTED)

    def finish(self, results):
        """Writes results.json, then the status; both atomically."""
        if self.is_main:
            write_json(self.path / "results.json", results)
            self.status("finished", "all steps done", step=results.get("global_step"))

    def _take_lock(self):
        # A POSIX record lock belongs to the process: the kernel drops it at any death, and forked data loader
        # workers do not inherit it. A killed job's processes may take a few seconds to go: wait for them.
        self._lock = (self.path / ".lock").open("a+")
        deadline = time.monotonic() + 2 * exits.ORPHAN_SECONDS
        while True:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    self._lock.seek(0)
                    owner = self._lock.read().strip() or "another process"
                    raise UserError(f"{self.path} is in use by {owner}: wait for it, or name another --output_dir") from None
                time.sleep(0.2)
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._lock.flush()


def scratch_name(args):
    """--dry_run and --overfit_batch get a folder beside the run's own, which `RunFolder.take` makes anew each time."""
    for flag in ("dry_run", "overfit_batch"):
        if getattr(args, flag):
            return f"{args.output_dir.rstrip('/')}_{flag}"
    return args.output_dir


def comparable(arguments):
    """Arguments as JSON keeps them; a path to existing data is made absolute, so that it compares equal."""
    plain = {name: value for name, value in arguments.items() if isinstance(value, (str, int, float, bool, type(None)))}
    if Path(str(plain.get("dataset"))).exists():
        plain["dataset"] = str(Path(plain["dataset"]).resolve())
    return plain


def moved(before, now):
    """Whether a path to data of before is no more, and that of now has its name: so that a whole project can be moved."""
    before, now = Path(str(before)), Path(str(now))
    return before.is_absolute() and not before.exists() and now.is_absolute() and before.name == now.name


def versions():
    """Versions of Python and of the packages that decide what is computed."""
    packages = ("torch", "torchvision", "accelerate", "datasets")
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {"python": platform.python_version(), **found}


def git_commit():
    """The commit of the script that runs, `-dirty` if it was changed since, or None outside a checkout."""
    folder = Path(sys.argv[0]).resolve().parent
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() if told.returncode == 0 else None


def read_json(path):
    """The JSON in `path`, or None if there is no such file. Raises UserError if it is damaged."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{path} is damaged: restore it, or move it away") from None


def write_json(path, value):
    """Writes `value` so that a reader, at any moment, finds the whole old file or the whole new one."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path, text):
    """Like `write_json`, for text."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.writing")  # processes that fail together all write the status
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _now():
    return datetime.now(UTC).isoformat(timespec="seconds")
