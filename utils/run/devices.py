"""The GPUs or the CPU of a process: what they can do, and their settings."""

import ctypes
import math
import os
import platform
from pathlib import Path

import torch

from utils.run import launcher, process
from utils.run.failures import UserError
from utils.run.output import notice


def local_processes():
    """The number of training processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


# --------------------------------------------------------------------------------------------- GPUs


def set_up_gpus(config, gpus, deterministic):
    """Sets up the GPUs of this process; raises UserError if `gpus` (int) are too few.

    Args:
        config (str): name of the launcher's configuration, for messages.
        deterministic (bool): whether a restart must give the same bytes.
    """
    processes = local_processes()
    if gpus < processes:
        fits = max(size for size in (1, 2, 4, 8) if size <= gpus)
        raise UserError(
            f"{config} starts {processes} processes on this machine, which has {gpus} "
            f"{'GPU' if gpus == 1 else 'GPUs'}: use {fits}gpu.yaml",
            rank_variable="LOCAL_RANK",
        )
    if not deterministic:
        torch.backends.cudnn.benchmark = True  # times its algorithms, and takes the fastest
        return
    # Deterministic algorithms make a resumed run identical bit for bit. An operation that has none
    # prints a warning. They also keep NCCL from reducing inside NVLink switches, where the order of
    # summation varies.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # for speed


def check_bf16(config):
    """Raises UserError, on every process of this machine, if one of its GPUs lacks bf16."""
    for device in range(local_processes()):
        with torch.cuda.device(device):
            if torch.cuda.is_bf16_supported(including_emulation=False):
                continue
        raise UserError(
            f"{config} asks for bf16, which {torch.cuda.get_device_name(device)} only emulates, "
            'slowly (it is older than Ampere, 2020): set mixed_precision: fp16, or "no" if the '
            "model is sharded",
            rank_variable="LOCAL_RANK",
        )


# ---------------------------------------------------------------------------------------------- CPU


def set_up_cpu(config, wants_cpu):
    """Sets the threads and the memory allocation of this process, and checks its precision.

    Args:
        config (str): name of the launcher's configuration, for messages.
        wants_cpu (bool): whether it asks for the CPU (UserError with fp16); else there is no GPU.
    """
    processes, precision = local_processes(), os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    torch.set_num_threads(threads_per_process())
    keep_freed_memory()
    if not wants_cpu and "ACCELERATE_MIXED_PRECISION" in os.environ:
        if precision == "fp16" or (precision == "bf16" and not has_bf16()):
            precision = os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        if process.is_main():
            several = f"{processes} processes over gloo" if processes > 1 else "1 process"
            notice(
                f"NO GPU FOUND: {config} runs on the CPU with {several}, precision {precision}. "
                "This is fine for a test, but far too slow for training"
            )
    elif precision == "fp16":
        raise UserError(
            "mixed_precision fp16 silently computes in float32 on a CPU: use bf16 or no"
        )


def threads_per_process():
    """The number of threads that a person asked for, or else this process's share of the cores.

    The variable of this process does not count: `accelerate launch` and `torchrun` always set it.
    """
    threads = launcher.option("--num_cpu_threads_per_process")
    threads = threads or launcher.variable("OMP_NUM_THREADS") or ""
    return (int(threads) if threads.isdecimal() else 0) or cores_per_process()


def cores():
    """The number of CPU cores that this process may use: its affinity, or its container's quota."""
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))  # not on macOS
    return max(1, int(min(len(affinity(0)), cpu_quota())))


def cpu_quota(path="/sys/fs/cgroup/cpu.max"):
    """CPU time per second that the container of this process allows, as a float; or infinity.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst.
    """
    quota, period = Path(path).read_text().split() if Path(path).exists() else ("max", "1")
    return math.inf if quota == "max" else int(quota) / int(period)


def cores_per_process():
    """The cores of this machine divided by its training processes, at least 1."""
    return max(1, cores() // local_processes())


def has_bf16():
    """Whether this CPU has native bf16 (AVX-512 BF16 or AMX)."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(check() for name in names if (check := getattr(torch.cpu, name, None)))


def keep_freed_memory():
    """Makes malloc keep freed memory, so that a step on the CPU reuses that of the step before.

    By default glibc returns that of large tensors to the system at once, and each step gets it back
    page by page, which takes 5 to 10 % of the time.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_max = -1, -4  # the numbers of mallopt's parameters in malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)
