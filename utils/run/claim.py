"""Claims the folder of a run: one job at a time, and only a run that may write to it."""

import contextlib
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from utils.run import process, record
from utils.run.arguments import CONTINUE_RULE
from utils.run.failures import UserError
from utils.run.files import lock, read_json, sync
from utils.run.manifest import JUNK, SHARED_CHECKS


class Claim(NamedTuple):
    """A folder that this process has locked.

    Attributes:
        earlier (dict | None): args.json of the run in the folder, if there is one.
        owner (str): what the lock says: this process and its host.
        file: the open lock; closing it releases the lock.
        made (list[Path]): the folders that were made for it, innermost first.
    """

    earlier: dict | None
    owner: str
    file: object
    made: list

    def undo(self):
        """Removes what the claim has made, if the run has not written anything yet."""
        path = Path(self.file.name).parent
        if not (path / "args.json").exists():
            _undo(path, self.made)


def _undo(path, made):
    with contextlib.suppress(OSError):  # a folder with other files, or gone
        for name in (".probe", ".lock"):
            (path / name).unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()


def claim(path, arguments, resume, may_change):
    """Locks a folder and checks that this run may use it; main process only.

    Empties a folder that was left by --dry_run or --overfit_batch, if this run has that flag.

    Args:
        path (Path): the folder; it is made if necessary.
        arguments (dict): those of this run, as `record.comparable` returns them.
        resume (str): the value of `--resume`.
        may_change (set): names of arguments that may differ from those of the run in the folder.

    Raises:
        UserError: the folder cannot be written, is in use, or holds another run.
    """
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"--output_dir {path} is not valid UTF-8, and weights cannot be written to it: use "
            "another name"
        ) from None
    made = []
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        # The processes of a killed job may take a few seconds to exit: wait for them.
        file = lock(path / ".lock", owner, 2 * process.ORPHAN_SECONDS)
        probe = path / ".probe"
        probe.write_bytes(bytes(1 << 16))
        probe.unlink()
        for folder in made:  # a power cut would lose them with all that they hold
            sync(folder.parent)
    except OSError as error:
        if made:
            _undo(path, made)
        reason = "it is a file" if path.is_file() else error.strerror or error
        raise UserError(f"cannot write to --output_dir {path}: {reason}") from None
    claimed = Claim(None, owner, file, made)
    try:
        earlier = _check(path, arguments, resume, may_change)
    except UserError:
        claimed.undo()
        raise
    return claimed._replace(earlier=earlier)


def _check(path, arguments, resume, may_change):
    """Returns args.json of the run in a folder, which this run may continue; None for a new one."""
    earlier = read_json(path / "args.json")
    known = isinstance(earlier, dict) and {"arguments", "command"} <= earlier.keys()
    if earlier is not None and not known:
        raise UserError(f"{path} has an args.json of another program: use another --output_dir")
    checks = ("dry_run", "overfit_batch")
    if earlier and any(arguments.get(name) and earlier["arguments"].get(name) for name in checks):
        _empty(path)
        earlier = None
    if earlier is None:
        # What a run has before its args.json, if it is stopped there.
        own = (".lock", ".args.json.", "checkpoints", "status.json", ".status.json.", *JUNK)
        if any(not entry.name.startswith(own) for entry in path.iterdir()):
            raise UserError(
                f"{path} is not empty and does not contain a run of these scripts: use another "
                "--output_dir"
            )
    else:
        _check_earlier(path, earlier, arguments, resume, may_change)
    return earlier


def _empty(path):
    # args.json last: if this is killed, the folder still says whose it is.
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == "args.json"):
        if entry.name != ".lock":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _check_earlier(path, earlier, arguments, resume, may_change):
    if resume == "never":
        raise UserError(
            f"{path} already contains a run: with --resume never, use another --output_dir"
        )
    theirs, ours = (Path(words[0]).name for words in (earlier["command"], sys.argv))
    if theirs != ours and earlier["arguments"].keys() != arguments.keys():
        raise UserError(f"{path} holds a run of {theirs}, not {ours}: use another --output_dir")
    check_same(earlier["arguments"], arguments, path, may_change)


def check_same(earlier, arguments, place, may_change):
    """Raises UserError, which lists each difference, if `earlier` are those of another run.

    Args:
        earlier (dict): the arguments recorded in `place`, a run's folder or a checkpoint.
    """
    differences = record.differences(earlier, arguments, may_change)
    if differences:
        same_model = earlier.get("model") == arguments.get("model") and "init_from" in arguments
        weights = f" (from these weights: --init_from {place})" if same_model else ""
        raise UserError(
            f"{place} belongs to a run with other arguments: {', '.join(differences)}. "
            f"{CONTINUE_RULE} Use the earlier values, or start a new run with another "
            f"--output_dir{weights}"
        )


def check_shared(path, owner):
    """Checks on every process but the main one that it sees the lock of the main process.

    (The main process must not open its lock again: closing it would release it.)

    Raises:
        UserError: it does not: this is another folder.
    """
    file = path / ".lock"
    for _ in range(SHARED_CHECKS):
        if path.is_dir() and file.name in os.listdir(path) and file.read_text() == owner:
            return
        time.sleep(0.5)
    raise UserError(
        f"--output_dir {path} is a different folder on {socket.gethostname()} than for {owner}: "
        "use one on a file system that all machines share"
    )
