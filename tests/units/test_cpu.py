"""What `utils.run.cpu` finds out about the CPU, and how it makes malloc keep memory."""

import ctypes
import math
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from utils.run import cpu, launcher


@pytest.mark.parametrize(
    ("option", "variable", "threads"),
    [
        ("3", "4", 3),
        (None, "4", 4),
        (None, " 4 , 2", 4),
        (None, "0", None),
        (None, "four", None),
        (None, "²", None),
        (None, "４", None),
        (None, "-2", None),
        (None, None, None),
        ("x", "4", None),
    ],
)
def test_the_threads_that_a_person_asked_for(option, variable, threads, monkeypatch):
    words = ["torchrun", *(["--num_cpu_threads_per_process", option] if option else [])]
    monkeypatch.setattr(launcher, "command", lambda: words)
    monkeypatch.setattr(launcher, "variable", {"OMP_NUM_THREADS": variable}.__getitem__)
    monkeypatch.setattr(cpu, "cores_per_process", lambda: 12)
    assert cpu.threads_per_process() == (threads or 12)


def test_the_cores_of_this_process(monkeypatch):
    monkeypatch.setattr(cpu, "quota", lambda: math.inf)
    monkeypatch.setattr(os, "sched_getaffinity", {0: {3, 5}}.__getitem__)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert cpu.cores() == 2
    monkeypatch.setattr(cpu, "quota", lambda: 1.9)
    assert cpu.cores() == 1
    monkeypatch.setattr(cpu, "quota", lambda: 0.5)
    assert cpu.cores() == 1
    monkeypatch.setattr(cpu, "quota", lambda: math.inf)
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    for output, count in (("4\n", 4), ("", 7)):  # the second: an Intel Mac
        answers = {("sysctl", "-n", "hw.perflevel0.physicalcpu", True, True): output}

        def run(line, capture_output, text, answers=answers):
            return SimpleNamespace(stdout=answers[(*line, capture_output, text)])

        monkeypatch.setattr(cpu.subprocess, "run", run)
        assert cpu.cores() == count
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cpu.cores_per_process() == 7
    for processes, cores in (("2", 3), ("4", 1), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert cpu.cores_per_process() == cores


def test_where_the_kernel_keeps_the_quota(tmp_path, monkeypatch):
    """The path of a group may have colons; what is not a number is no limit."""
    own, groups = tmp_path / "own", tmp_path / "groups"
    (groups / "X:b").mkdir(parents=True)
    own.write_text("0::/X:b\n")
    for text, cores in (
        ("150000 100000", 1.5),
        ("0 100000", math.inf),
        ("1 100000", 1e-5),
        ("max 100000", math.inf),
    ):
        (groups / "X:b" / "cpu.max").write_text(text)
        assert cpu.quota(groups, own) == cores
    (groups / "cpu.max").write_text("30 10")
    assert cpu.quota(groups, own) == 3  # in a container: that of its root
    (tmp_path / "cpu.max").write_text("10 10")  # beside the groups
    assert cpu.quota(groups, own) == 3
    first = groups / "cpu,cpuacct" / "job"
    first.mkdir(parents=True)
    own.write_text("4:memory:/X:b\n3:cpu,cpuacct:/job\n")
    (first / "cpu.cfs_quota_us").write_text("-1\n")
    (first / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu.quota(groups, own) == 3
    (first / "cpu.cfs_quota_us").write_text("250000\n")
    assert cpu.quota(groups, own) == 2.5
    assert cpu.quota(groups, tmp_path / "none") == math.inf
    asked = []
    monkeypatch.setattr(cpu, "Path", lambda *parts: asked.append(parts) or Path(own))
    cpu.quota()  # by default that of this process
    assert asked == [("/proc/self/cgroup",), ("/sys/fs/cgroup", "cpu,cpuacct", "job")]


@pytest.mark.parametrize("avx512", [True, False, None])
@pytest.mark.parametrize("amx", [True, False, None])
def test_either_unit_computes_in_bf16(avx512, amx, monkeypatch):
    """None: a release of torch that does not say."""
    says = {"_is_avx512_bf16_supported": avx512, "_is_amx_tile_supported": amx}
    functions = {name: lambda v=value: v for name, value in says.items() if value is not None}
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(**functions))
    assert cpu.has_bf16() == bool(avx512 or amx)


@pytest.mark.parametrize("libc", ["glibc", ""])
def test_malloc_is_told_to_keep_freed_memory(libc, monkeypatch):
    """M_MMAP_MAX (-4) 0: no mmap; M_TRIM_THRESHOLD (-1) -1: never return memory."""
    calls = []
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "2.36"))
    library = SimpleNamespace(mallopt=lambda *call: calls.append(call))
    monkeypatch.setattr(ctypes, "CDLL", {None: library}.__getitem__)
    cpu.keep_freed_memory()
    assert calls == ([(-4, 0), (-1, -1)] if libc else [])
