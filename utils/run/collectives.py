"""Gathers Python values, and runs functions whose errors are raised everywhere, over gloo.

NCCL would end a run when one process works on files for longer than `--timeout`.
"""

import contextlib
import math
import socket
from datetime import timedelta
from functools import cache

import psutil
import torch.distributed as dist

from utils.run import failures
from utils.run.failures import RunFailed, Unexpected, UserError

# How long processes wait for one that downloads, tokenizes, hashes or writes: as long as it takes.
# If it dies instead, its launcher stops them.
HOST_TIMEOUT = timedelta(days=30)


def gather(accelerator, value, group=None):
    """Gathers a picklable value from every process: a list by rank, the same on all of them.

    Args: group: one of `new_group`, for a thread other than the main one.
    """
    if accelerator.num_processes == 1:
        return [value]
    values = [None] * accelerator.num_processes
    dist.all_gather_object(values, value, group=group or _host_group(dist.group.WORLD))
    return values


@cache
def _host_group(_world):
    """The group for collectives on the CPU, made once for each group of all processes."""
    return new_group()


def new_group():
    """Creates a group of all processes for collectives on the CPU."""
    group = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)
    keep_alive()
    return group


def same_everywhere(accelerator, numbers):
    """The numbers of the first process (list of float or None), by which all of them decide.

    Raises:
        RunFailed: those of another process differ in more than rounding.
    """
    first, *others = gather(accelerator, numbers)
    for other in others:  # as texts, NaN equals NaN
        for one, same in zip(first, other, strict=True):
            if str(one) != str(same) and not math.isclose(one, same, rel_tol=1e-5, abs_tol=1e-9):
                raise RunFailed(
                    f"the processes have different results, such as {one:.6g} and {same:.6g}: "
                    "gather those of an evaluation with accelerator.gather_for_metrics",
                    retry=False,
                )
    return first


def wait_for_all(accelerator):
    """Waits until every process has called this function."""
    gather(accelerator, None)


def run_on_main(accelerator, function):
    """Runs `function()` on the main process; returns its result, or raises its error, on each."""
    outcome = _attempt(function) if accelerator.is_main_process else None
    return _result(gather(accelerator, outcome)[0])


def run_on_all(accelerator, function):
    """Runs `function()` on every process; an error on any of them is raised on every one."""
    result, error = _attempt(function)
    errors = gather(accelerator, error)
    return _result([result, next(filter(None, errors), None)])


def keep_alive():
    """Turns on TCP keepalive for the connections of this process, those of gloo among them.

    If a machine loses its power or network, it cannot close its connections. With keepalive, the
    kernel reports it after 40 seconds of silence; without, a process would wait `HOST_TIMEOUT`.
    """
    for connection in psutil.Process().net_connections("tcp"):
        if not connection.raddr:
            continue
        address = (connection.fd, connection.family, connection.type)
        # An error: the connection was closed since it was listed.
        with contextlib.suppress(OSError), socket.fromfd(*address) as shared:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
                if hasattr(socket, option):  # other systems have other names, and longer defaults
                    shared.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _attempt(function):
    try:
        return [function(), None]
    except UserError as error:
        return [None, error]
    except Exception as error:
        line = failures.describe(error)
        if line:
            return [None, RunFailed(line, retry=failures.may_pass(error))]
        trace = failures.short_traceback(error)  # as text: an error loses it on its way
        return [None, Unexpected(failures.headline(error), trace)]


def _result(outcome):
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
