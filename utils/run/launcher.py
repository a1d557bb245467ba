"""What the environment says about the launcher of this process, and what its command line does.

`accelerate launch` and `torchrun` (`python -m torch.distributed.run`) are supported, started in any
way: their variables are believed if they are complete, and if the launcher answers. The command
line of a launcher, which is looked up among the parents of this process, only has details.
"""

import os
import re
import socket
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
# All that torchrun sets for a process.
COMPLETE = (*RANKS, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
# What a training process leaves to the processes that it starts: its process id, and the file of
# `TORCHELASTIC_ERROR_FILE`, which each launch has anew.
MARK = "TRAINING_PROCESS"
CONNECT_SECONDS = 10


@cache
def find():
    """Finds the launcher among the parents of this process: a `psutil.Process`, or None."""
    import psutil  # here, so that signals are handled before it is imported

    try:
        for process in psutil.Process().parents():
            if (PROGRAMS | MODULES) & set(map(os.path.basename, process.cmdline())):
                return process
    except psutil.Error:  # a parent ended, or belongs to somebody else
        pass
    return None


def is_elastic():
    """Whether a launcher starts several processes, watches them and can start them again."""
    return all(name in os.environ for name in COMPLETE)


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
    """An environment variable as the person set it, before the launcher changed it; None: unset."""
    environment = os.environ if find() is None else _ask("environ") or {}
    return environment.get(name)


def _ask(fact):
    """A fact about the launcher, by a method of psutil's `Process`; None without a launcher."""
    import psutil

    try:
        return find() and getattr(find(), fact)()
    except psutil.Error:  # it has ended
        return None


def check_variables():
    """Removes variables from the environment that describe processes of another launch.

    Returns:
        UserError | None: the error to raise if this process is not what its variables say.
    """
    foreign = MPI if is_elastic() else RANKS + MPI
    dropped = {name: os.environ.pop(name) for name in foreign if name in os.environ}
    if is_elastic():  # an `srun` step with one launcher per node sets MPI variables
        return _check_launch()
    alone = {name: "1" if re.search("SIZE|NRANKS", name) else "0" for name in dropped}
    several = [name for name, value in dropped.items() if value != alone[name]]
    if not several:
        return None
    verb = "is" if len(several) == 1 else "are"
    return _refusal(
        f"{', '.join(several)} {verb} set, as for one of several processes, but neither accelerate "
        f"launch nor torchrun started this one as such: unset {' '.join(dropped)}, or start "
        "several processes with one of these two"
    )


def _check_launch():
    """As `check_variables`, for a process with the variables of torchrun."""
    unset = f"unset {' '.join(COMPLETE)}"
    pid, _, error_file = os.environ.get(MARK, "").partition(" ")
    own_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if pid and pid != str(os.getpid()) and error_file == own_file:
        return _refusal(f"this process inherited the variables of a training process: {unset}")
    os.environ[MARK] = f"{os.getpid()} {own_file}"
    place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the launcher listens there
        try:
            socket.create_connection(place, CONNECT_SECONDS).close()
        except OSError as error:
            return _refusal(
                f"RANK and WORLD_SIZE are set, as by torchrun, but no launcher answers at "
                f"{':'.join(place)} ({error}): if they are left over from another job, {unset}"
            )
    return None


def _refusal(line):
    return UserError(line, rank_variable=None)
