"""How many cores and threads a process gets, what its CPU can do, and how it uses memory."""

import ctypes
import math
import os
import platform
import subprocess
from pathlib import Path

import torch

from utils.run import launcher


def threads_per_process():
    """The number of threads that a person asked for, or else this process's share of the cores."""
    return _wanted_threads() or cores_per_process()


def _wanted_threads():
    """The threads per process that a person asked for; None: nobody did.

    The variable of this process does not count: `accelerate launch` and `torchrun` always set it.
    """
    wanted = launcher.option("--num_cpu_threads_per_process")
    wanted = wanted or launcher.variable("OMP_NUM_THREADS") or ""
    first = wanted.split(",")[0].strip()  # it may be a list, for nested parallel regions
    return int(first) if first.isascii() and first.isdigit() and int(first) else None


def cores():
    """The number of CPU cores that this process may use: its affinity, or its container's quota.

    Of Apple's processors, those for performance: parallel loops would wait for the other ones.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:  # macOS
        line = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
        output = subprocess.run(line, capture_output=True, text=True).stdout
        count = int(output) if output.strip() else os.cpu_count()
    return max(1, int(min(count, quota())))


def quota(groups="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """The CPU time per second of real time that the control groups of this process allow.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst, `cpu.max`, and for version 1
    Documentation/scheduler/sched-bwc.rst.

    Returns:
        float: infinity without a limit.
    """
    try:
        lines = Path(own).read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    quotas = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = Path(groups, controllers, path.lstrip("/"))
        # In a container the path may be that on its host: then its root shows the quota.
        for group in (folder, *folder.parents):
            if group.is_relative_to(groups):
                quotas.append(_quota_of(group))
    return min(quotas)


def _quota_of(group):
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # no such group, or `max`
        return math.inf


def cores_per_process():
    """The cores of this machine divided by its training processes, at least 1."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def has_bf16():
    """Whether this CPU has native bf16 (AVX-512 BF16 or AMX)."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(check() for name in names if (check := getattr(torch.cpu, name, None)))


def keep_freed_memory():
    """Makes malloc keep freed memory, so that a step on the CPU reuses that of the step before.

    By default glibc returns the memory of large tensors to the system at once. Each step then gets
    it back page by page, which takes 5 to 10 % of the time.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_max = -1, -4  # the numbers of mallopt's parameters in malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)
