"""Finds the launcher that started this process. Only its variables of the environment are believed.

`accelerate launch` and `torchrun` (`python -m torch.distributed.run`) are supported. Their names
are looked up among the parents of this process, because variables say little: `RANK` may be left
over from another job, and whatever a training process starts inherits `TORCHELASTIC_RUN_ID`.
"""

import os
import re
from functools import cache

from utils.run.failures import UserError

PROGRAMS = {"accelerate", "accelerate-launch", "torchrun"}
MODULES = {
    "accelerate.commands.accelerate_cli",
    "accelerate.commands.launch",
    "torch.distributed.run",
    "torch.distributed.launch",
}
# What describes this process among others, of torchrun and of implementations of MPI. Accelerate
# takes the size from the first that is set.
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS") + tuple(
    f"{name}_COMM_WORLD_{fact}"
    for name in ("OMPI", "MV2")
    for fact in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)


@cache
def find():
    """Finds the launcher among the parents of this process.

    Returns:
        psutil.Process | None: None: a person or another program started this process.
    """
    import psutil  # here, so that signals are handled before it is imported

    try:
        for process in psutil.Process().parents():
            if _is_launcher(process.cmdline()):
                return process
    except psutil.Error:  # a parent ended, or belongs to somebody else
        pass
    return None


def is_elastic():
    """Whether the launcher starts several processes, watches them and can start them again."""
    return find() is not None and "TORCHELASTIC_RUN_ID" in os.environ


def option(name):
    """The value of an option on the launcher's command line; None without it.

    A name may have dashes in place of underscores, as launchers accept both.
    """
    words, name = _ask("cmdline") or [], name.replace("_", "-")
    for position, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag.replace("_", "-") == name:
            return value or "".join(words[position + 1 : position + 2])
    return None


def variable(name):
    """A variable of the environment as the person set it, before the launcher changed it.

    Returns:
        str | None: None: it was not set.
    """
    environment = os.environ if find() is None else _ask("environ") or {}
    return environment.get(name)


def _ask(fact):
    """A fact about the launcher, by a method of psutil's `Process`; None without a launcher."""
    import psutil

    try:
        return find() and getattr(find(), fact)()
    except psutil.Error:  # it has ended
        return None


def drop_variables():
    """Removes variables from the environment that describe processes of another launch.

    Returns:
        UserError | None: the error to raise, if they describe several processes: then either they
        are left over, or an unsupported launcher expects this process to be one of them.
    """
    foreign = MPI if is_elastic() else RANKS + MPI
    dropped = {name: os.environ.pop(name) for name in foreign if name in os.environ}
    alone = {name: "1" if re.search("SIZE|NRANKS", name) else "0" for name in dropped}
    several = [name for name, value in dropped.items() if value != alone[name]]
    if is_elastic() or not several:  # an `srun` step with one launcher per node sets MPI variables
        return None
    verb = "is" if len(several) == 1 else "are"
    return UserError(
        f"{', '.join(several)} {verb} set, as for one of several processes, but neither accelerate "
        f"launch nor torchrun started this one as such: unset {' '.join(dropped)}, or start "
        "several processes with one of these two",
        rank_variable=None,
    )


def _is_launcher(words):
    names = [os.path.basename(word) for word in words[:2]]
    if PROGRAMS & set(names):  # a program, or a script that Python runs
        return True
    return "-m" in words[:3] and bool(MODULES & set(words[1:4]))
