"""Finds the launcher that started this process. Only its variables of the environment are believed.

`accelerate launch` and `torchrun` (`python -m torch.distributed.run`) are supported. Their names
are looked up among the parents of this process, because variables say little: `RANK` may be left
over from another job, and whatever a training process starts inherits `TORCHELASTIC_RUN_ID`.

Imports only the standard library (psutil where there is no /proc): it comes before torch.
"""

import os
import re
from functools import cache
from pathlib import Path

from utils.run.failures import UserError

PROGRAMS = {"accelerate", "accelerate-launch", "torchrun"}
MODULES = {
    "accelerate.commands.accelerate_cli",
    "accelerate.commands.launch",
    "torch.distributed.run",
    "torch.distributed.launch",
}
# What describes this process among others. Accelerate takes the size from the first that is set.
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = (
    "PMI_RANK",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
)


@cache
def find():
    """Finds the launcher among the parents of this process.

    Returns:
        int | None: its process id; None: a person or another program started this process.
    """
    process = os.getppid()
    while process > 0:  # process 1 may be a launcher: the entry point of a container
        parent, words = _parent_and_command(process)
        if _is_launcher(words):
            return process
        process = parent
    return None


def is_elastic():
    """Whether the launcher starts several processes, watches them and can start them again."""
    return find() is not None and "TORCHELASTIC_RUN_ID" in os.environ


def command():
    """The command line of the launcher as a list of words; [] without one."""
    return _parent_and_command(find())[1] if find() else []


def option(name):
    """The value of an option on the launcher's command line; None without it.

    A name may have dashes in place of underscores, as launchers accept both.
    """
    words, name = command(), name.replace("_", "-")
    for position, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag.replace("_", "-") == name:
            return value or "".join(words[position + 1 : position + 2])
    return None


def variable(name):
    """A variable of the environment as the person set it, before the launcher changed it.

    Returns:
        str | None: None: it was not set, or the system does not show it.
    """
    if find() is None:
        return os.environ.get(name)
    if not Path("/proc/self").exists():  # macOS
        return _ask_psutil(find(), lambda process: process.environ().get(name), None)
    try:
        lines = Path(f"/proc/{find()}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = dict(line.split(b"=", 1) for line in lines if b"=" in line)
    value = found.get(name.encode())
    return None if value is None else os.fsdecode(value)


def drop_variables():
    """Removes variables from the environment that describe processes of another launch.

    Returns:
        UserError | None: the error to raise, if they describe several processes: then either they
        are left over, or an unsupported launcher expects this process to be one of them.
    """
    mine = MPI if is_elastic() else RANKS + MPI
    dropped = {name: os.environ.pop(name) for name in mine if name in os.environ}
    alone = {name: "1" if re.search("SIZE|NRANKS", name) else "0" for name in dropped}
    several = [name for name, value in dropped.items() if value != alone[name]]
    if is_elastic() or not several:  # an `srun` step with one launcher per node sets MPI variables
        return None
    names = ", ".join(several)
    return UserError(
        f"{names} {'is' if len(several) == 1 else 'are'} set, as for one of several processes, but "
        "neither accelerate launch nor torchrun started this one as such: "
        f"unset {' '.join(dropped)}, or start several processes with one of these two",
        rank_variable=None,
    )


def _is_launcher(words):
    names = [os.path.basename(word) for word in words[:2]]
    if PROGRAMS & set(names):  # a program, or a script that Python runs
        return True
    return "-m" in words[:3] and bool(MODULES & set(words[1:4]))


def _parent_and_command(process):
    """The parent's process id and the command line of a process; 0 and [] if it has ended."""
    folder = Path(f"/proc/{process}")
    if not folder.parent.joinpath("self").exists():  # macOS
        return _ask_psutil(process, lambda process: (process.ppid(), process.cmdline()), (0, []))
    try:
        parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        words = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return parent, [os.fsdecode(word) for word in words]
    except (OSError, ValueError):
        return 0, []


def _ask_psutil(number, question, otherwise):
    """What a function of a `psutil.Process` returns; `otherwise` if the process has ended."""
    import psutil  # Linux does without: this module is imported before anything that takes time

    try:
        return question(psutil.Process(number))
    except psutil.Error:
        return otherwise
