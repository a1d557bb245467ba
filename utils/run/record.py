"""The lock of a run's folder; args.json, and how two of them differ; status.json."""

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from utils.run import manifest, process
from utils.run.failures import RunFailed, UserError
from utils.run.files import read_json, sync, write_json, write_text
from utils.run.output import warn

# Arguments that may be paths: compared as absolute paths.
PATHS = ("dataset", "init_from", "weights")


def claim(path):
    """Locks the folder `path` (Path), which is made if necessary; main process only.

    Returns its owner (str), and the open file `.lock`, which releases the lock when it is closed.
    Raises UserError if the folder cannot be written, is in use, or holds something else.
    """
    _refuse_other_folders(path)
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        file = _lock(path / ".lock")
        file.truncate(0)
        file.write(owner)
        file.flush()
        os.fsync(file.fileno())  # other machines read it; also an error if the disk is full
        for folder in made:  # a power cut would lose them with all that they hold
            sync(folder.parent)
    except OSError as error:
        reason = "it is a file" if path.is_file() else error.strerror or error
        raise UserError(f"cannot write to --output_dir {path}: {reason}") from None
    return owner, file


def _refuse_other_folders(path):
    """Raises UserError for a folder of something else, before anything is written to it."""
    earlier = read_json(path / "args.json")
    if earlier is None:
        # What a run has before its args.json, if it is stopped there, and what systems add.
        begun = (".", "checkpoints", "status.json", *manifest.JUNK)
        names = [entry.name for entry in path.glob("*")]  # none of a folder that cannot be read
        is_ours = all(name.startswith(begun) for name in names)
    else:
        is_ours = isinstance(earlier, dict) and {"arguments", "data", "command"} <= earlier.keys()
    if not is_ours:
        raise UserError(
            f"{path} is not empty and does not contain a run of these scripts (or of another "
            "version of them): use another --output_dir"
        )


def _lock(path):
    """Locks the file `path` for this process, and returns it open; raises UserError if it is taken.

    A POSIX record lock belongs to the process: the kernel releases it however the process ends, and
    forked data loader workers do not inherit it. Closing any descriptor of the file releases it.
    """
    file = path.open("a+")
    # The processes of a killed job may take a few seconds to exit.
    deadline = time.monotonic() + 2 * process.ORPHAN_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # Lustre or NFS
                warn(f"{path.parent} is on a file system without locks: only one job may use it")
                return file
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() > deadline:
            file.seek(0)
            other = file.read().strip() or "another process"
            raise UserError(
                f"{path.parent} is in use by {other}: wait for it, or use another --output_dir"
            )
        time.sleep(0.2)


def check_shared(path, owner):
    """Checks on every process but the main one that it sees the lock of the main process.

    (The main process must not open its lock again: closing it would release it.)

    Raises:
        UserError: it does not: this is another folder.
    """
    file = path / ".lock"
    for _ in range(manifest.SHARED_CHECKS):
        if path.is_dir() and file.name in os.listdir(path) and file.read_text() == owner:
            return
        time.sleep(0.5)
    raise UserError(
        f"--output_dir {path} is a different folder on {socket.gethostname()} than for {owner}: "
        "use one on a file system that all machines share"
    )


def check_place(path, place):
    """Raises RunFailed if a folder is no longer the one whose `stat` was `place`."""
    with contextlib.suppress(OSError):
        if os.path.samestat(path.stat(), place):
            return
    raise RunFailed(
        f"--output_dir {path} was removed or renamed while the run was writing to it: undo that "
        "and run the same command again, or use another --output_dir",
        retry=False,
    )


def comparable(arguments):
    """The arguments (dict) as JSON: lists become text, and paths to existing data absolute."""
    plain = (str, int, float, bool, type(None))
    values = {}
    for name, value in arguments.items():
        if isinstance(value, list | tuple):
            value = shlex.join(str(_absolute(name, item)) for item in value)
        if isinstance(value, plain):
            values[name] = _absolute(name, value)
    return values


def _absolute(name, value):
    # A dataset may also be a Hub id, and weights a name.
    is_path = name in PATHS and value is not None and Path(value).exists()
    return str(Path(value).resolve()) if is_path else value


def differences(earlier, now, may_change=()):
    """Lists, as text, the values (of two dicts) in which two runs differ and may not change."""
    lines = []
    for name in sorted((earlier.keys() | now.keys()) - set(may_change)):
        was, value = earlier.get(name), now.get(name)
        # A path may differ if its last part does not: a whole project can be moved.
        moved = name in PATHS and Path(str(was)).name == Path(str(value)).name
        if was != value and not moved:
            was, value = map(_shown, (was, value))
            lines.append(f"{name} {value} (was {was})")
    return lines


def _shown(value):
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if "\n" in str(value) else value


def topology(accelerator):
    """The processes and devices of this launch, for args.json and checkpoints."""
    on_gpu = accelerator.device.type == "cuda"
    return {
        "processes": accelerator.num_processes,
        "machines": int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "threads_per_process": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
    }


def versions():
    """Versions of Python and of the packages that can change results."""
    installed = {"python": platform.python_version()}
    optional = [package for package in ("transformers", "peft") if package in sys.modules]
    for package in ("torch", "torchvision", "accelerate", "datasets", *optional):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return installed


def changes(accelerator, earlier):
    """Lists how topology and versions differ from those of the record `earlier` (dict)."""
    now = topology(accelerator) | versions()
    before = earlier["topology"] | earlier["versions"]
    return [
        f"{name.replace('_', ' ')} {before.get(name)} -> {now[name]}"
        for name in now
        if before.get(name) != now[name]
    ]


def write(folder, accelerator, record, step):
    """Writes args.json, which also lists all starts of the run, to its `folder` (Path).

    Args:
        record (dict): what only the run knows, such as its `arguments`.
        step (int): optimizer steps done before this start.

    Returns:
        dict: the record of the run, which also becomes a part of every checkpoint.
    """
    record = {
        **record,
        "topology": topology(accelerator),
        "versions": versions(),
        "git_commit": git_commit(),
        "script": script_hash(),
        "command": sys.argv,
    }
    starts = (read_json(folder / "args.json") or {}).get("starts", [])
    starts.append({"step": step, "time": timestamp(), **record["topology"]})
    write_json(folder / "args.json", {**record, "starts": starts})
    return record


def script_hash():
    """SHA-256 of the script's file; None in a notebook."""
    file = Path(sys.argv[0])
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def git_commit():
    """The git commit of the running script, with `-dirty` if files were changed since; or None."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    folder = Path(sys.argv[0]).resolve().parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def timestamp():
    """The time now, UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_status(folder):
    """The status in a run's folder; {} if there is none."""
    return read_json(folder / "status.json") or {}


def write_status(folder, state, reason, **more):
    """Replaces the status, atomically."""
    status = {"state": state, "reason": reason, "time": timestamp(), **more}
    write_json(folder / "status.json", status)


def how_to_continue(folder, origin=None):
    """What a person does after a run was stopped; `origin`: the checkpoint with which it began."""
    if origin or manifest.all_in(folder):
        return "run the same command again to continue"
    return "run the same command again: it starts anew, since there is no checkpoint yet"


def write_failure(folder, reason, again):
    """Records why the run failed; returns False if another process has already done so.

    The first process to fail knows the reason; the others fail later, because they lose contact
    with it.
    """
    with (folder / ".lock_status").open("a") as file:
        # On a file system without locks two processes may both be the first.
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)
        if read_status(folder).get("state") != "running":
            return False
        write_status(folder, "failed", reason, next=again)
    return True


def tell_batch_script(folder, step):
    """Tells submit.sbatch, which does not parse our arguments, where the status of this run is."""
    file = os.environ.get("RUN_FOLDER_FILE")
    if file:
        write_text(file, f"{folder.resolve()}\n{step}\n")
