"""What is set up on GPUs and on a CPU, and what each of them can do."""

import contextlib
import ctypes
import math
import os
import platform
from types import SimpleNamespace

import pytest
import torch

from utils.run import devices, launcher
from utils.run.failures import UserError


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """None of these variables is set; what the code sets is taken back."""
    names = "ACCELERATE_MIXED_PRECISION CUBLAS_WORKSPACE_CONFIG LOCAL_WORLD_SIZE RANK"
    for name in names.split():
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def calls(monkeypatch):
    """What is set in libraries."""
    made = []
    for owner, name in (
        (torch, "set_num_threads"),
        (torch, "use_deterministic_algorithms"),
        (devices, "keep_freed_memory"),
    ):
        monkeypatch.setattr(
            owner, name, lambda *how, name=name, **more: made.append((name, *how, more))
        )
    monkeypatch.setattr(devices, "threads_per_process", lambda: 3)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    return made


# --------------------------------------------------------------------------------------------- GPUs


def test_gpus_compute_the_same_bits_after_a_restart_or_are_fast(calls, monkeypatch):
    devices.set_up_gpus("a.yaml", 1, deterministic=False)
    assert torch.backends.cudnn.benchmark and not torch.backends.cudnn.deterministic
    assert calls == [] and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    torch.backends.cudnn.benchmark = False
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    devices.set_up_gpus("a.yaml", 2, deterministic=True)
    assert calls == [("use_deterministic_algorithms", True, {"warn_only": True})]
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    devices.set_up_gpus("a.yaml", 2, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # a person's choice


def test_too_few_gpus_name_the_largest_configuration_that_fits(monkeypatch):
    for gpus, fits in ((1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (12, 8)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(gpus + 1))
        has = f"has {gpus} GPU{'s' if gpus > 1 else ''}: use {fits}gpu.yaml"
        with pytest.raises(UserError, match=f"^9gpu.yaml starts {gpus + 1} .*{has}$") as error:
            devices.set_up_gpus("9gpu.yaml", gpus, deterministic=True)
        assert error.value.rank_variable == "LOCAL_RANK"


def test_bf16_needs_gpus_that_compute_in_it(monkeypatch):
    """PyTorch by default also calls a GPU that emulates it able to compute in it."""
    current, native = [], [True, False]

    @contextlib.contextmanager
    def use(device):
        current[:] = [device]
        yield

    def is_supported(including_emulation=True):
        return including_emulation or native[current[0]]

    monkeypatch.setattr(torch.cuda, "device", use)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    devices.check_bf16("a.yaml")  # one process uses the first
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"^a\.yaml .*GPU 1 only emulates.* fp16,") as error:
        devices.check_bf16("a.yaml")
    assert error.value.rank_variable == "LOCAL_RANK"


# ---------------------------------------------------------------------------------------------- CPU


@pytest.mark.parametrize(
    ("asked", "native", "gets"),
    [("bf16", True, "bf16"), ("bf16", False, "no"), ("fp16", True, "no"), ("no", True, "no")],
)
def test_the_precision_on_a_cpu(asked, native, gets, calls, monkeypatch, capsys):
    """What the configuration asks for, if it is of a GPU that is not there: what the CPU has."""
    monkeypatch.setattr(devices, "has_bf16", lambda: native)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
        calls.clear()
        devices.set_up_cpu("4gpu.yaml", False)
        assert calls == [("set_num_threads", 3, {}), ("keep_freed_memory", {})]
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == gets
        says = f"NO GPU FOUND: 4gpu.yaml runs on the CPU with 1 process, precision {gets}. This is"
        said = capsys.readouterr().err
        assert said.startswith(f"*** {says}") if rank == "0" else said == ""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    if asked == "fp16":
        with pytest.raises(UserError, match="fp16 silently computes in float32 on a CPU"):
            devices.set_up_cpu("cpu.yaml", wants_cpu=True)
    else:
        devices.set_up_cpu("cpu.yaml", wants_cpu=True)
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
        devices.set_up_cpu("this launch", wants_cpu=False)  # a script on its own
    assert capsys.readouterr().err == ""


def test_the_threads_of_this_process(monkeypatch):
    """Those that a person asked for, or its share of the cores: of its affinity, or of its quota."""
    monkeypatch.setattr(os, "sched_getaffinity", {0: {3, 5, 6}}.__getitem__)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    for quota, cores in ((math.inf, 3), (1.9, 1), (0.5, 1), (2.0, 2)):
        monkeypatch.setattr(devices, "cpu_quota", lambda quota=quota: quota)
        assert devices.cores() == cores
    monkeypatch.setattr(devices, "cpu_quota", lambda: math.inf)
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    for processes, cores in ((None, 7), ("2", 3), ("4", 1), ("16", 1)):
        if processes:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert devices.cores_per_process() == cores
    for asked, variable, threads in (("3", "4", 3), (None, "4", 4), (None, "0", 1), ("x", None, 1)):
        options = {"--num_cpu_threads_per_process": asked}
        monkeypatch.setattr(launcher, "option", options.__getitem__)
        monkeypatch.setattr(launcher, "variable", {"OMP_NUM_THREADS": variable}.__getitem__)
        assert devices.threads_per_process() == threads


def test_the_quota_of_a_container(tmp_path):
    for limit, quota in ((None, math.inf), ("max 100000", math.inf), ("150000 100000", 1.5)):
        if limit:
            (tmp_path / "cpu.max").write_text(f"{limit}\n")
        assert devices.cpu_quota(tmp_path / "cpu.max") == quota


def test_malloc_of_glibc_is_told_to_keep_freed_memory(monkeypatch):
    """M_MMAP_MAX (-4) 0: no mmap; M_TRIM_THRESHOLD (-1) -1: never return memory."""
    calls = []
    library = SimpleNamespace(mallopt=lambda *call: calls.append(call))
    monkeypatch.setattr(ctypes, "CDLL", {None: library}.__getitem__)
    for libc in ("", "glibc"):
        assert calls == []
        monkeypatch.setattr(platform, "libc_ver", lambda libc=libc: (libc, "2.36"))
        devices.keep_freed_memory()
    assert calls == [(-4, 0), (-1, -1)]
