"""How `utils.run.launcher` finds the launcher, and `utils.run.cpu` the threads that it set."""

import ctypes
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from utils.run import cpu, launcher

PYTHON = "/venv/bin/python3.11"
TORCHRUN = [PYTHON, "/venv/bin/torchrun", "--nnodes=1:3", "--nproc_per_node", "2", "train.py"]


@pytest.fixture
def parents(monkeypatch):
    """Gives this process the parents 40, 30, ... with these command lines; or no launcher."""
    for name in (*launcher.RANKS, *launcher.MPI, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    def give(*commands):
        processes = [40 - 10 * number for number in range(len(commands))] + [1, 0]
        table = {
            process: (processes[number + 1], words)
            for number, (process, words) in enumerate(zip(processes, commands, strict=False))
        }
        launcher.find.cache_clear()
        monkeypatch.setattr(launcher.os, "getppid", lambda: processes[0])
        monkeypatch.setattr(launcher, "_parent_and_command", lambda p: table.get(p, (0, ["init"])))

    find = launcher.find
    give(["bash"])
    yield give
    find.cache_clear()


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["accelerate", "launch", "train.py"], True),
        ([PYTHON, "/venv/bin/accelerate", "launch", "train.py"], True),
        ([PYTHON, "/venv/bin/accelerate-launch", "train.py"], True),
        (TORCHRUN, True),
        (["/venv/bin/torchrun", "train.py"], True),
        ([PYTHON, "-m", "accelerate.commands.accelerate_cli", "launch"], True),
        ([PYTHON, "-m", "accelerate.commands.launch", "train.py"], True),
        ([PYTHON, "-m", "torch.distributed.run", "train.py"], True),
        ([PYTHON, "-u", "-m", "torch.distributed.launch", "train.py"], True),
        ([PYTHON, "train.py", "torchrun"], False),
        ([PYTHON, "train.py", "accelerate.commands.launch"], False),
        ([PYTHON, "-u", "train.py", "-m", "torch.distributed.run"], False),
        ([PYTHON, "-m", "pytest", "-k", "torch.distributed.run"], False),
        (["bash", "-c", "torchrun train.py"], False),
        (["vim", "torchrun.txt"], False),
        ([], False),
    ],
)
def test_a_launcher_is_known_by_its_program_or_module(words, known):
    assert launcher._is_launcher(words) is known


def test_the_nearest_launcher_among_the_parents(parents):
    assert launcher.find() is None and launcher.command() == []
    parents(["sh", "train.sh"], TORCHRUN, ["accelerate", "launch"])
    assert launcher.find() == 30 and launcher.command() == TORCHRUN
    parents(["bash"], ["sshd"])
    assert launcher.find() is None


def test_a_launcher_may_be_the_first_process(parents, monkeypatch):
    """As the entry point of a container, where the ids start anew."""
    monkeypatch.setattr(launcher.os, "getppid", lambda: 1)
    monkeypatch.setattr(launcher, "_parent_and_command", lambda process: (0, TORCHRUN))
    launcher.find.cache_clear()
    assert launcher.find() == 1


def test_an_elastic_launcher_is_there_and_says_so(parents, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "left over")
    assert not launcher.is_elastic()
    parents(TORCHRUN)
    assert launcher.is_elastic()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not launcher.is_elastic()  # `accelerate launch` of a single process


def test_options_of_the_launcher(parents):
    assert launcher.option("--nnodes") is None
    parents([*TORCHRUN, "--a=b=c", "--last"])
    assert launcher.option("--nnodes") == "1:3" and launcher.option("--nproc_per_node") == "2"
    assert launcher.option("--a") == "b=c" and launcher.option("--last") == ""
    assert launcher.option("--nproc") is None
    assert launcher.option("--nproc-per-node") == "2"


def test_variables_before_the_launcher_changed_them(parents, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launcher.variable("OMP_NUM_THREADS") == "1" and launcher.variable("NOT_SET") is None
    parents(TORCHRUN)
    monkeypatch.setattr(launcher, "find", lambda: os.getpid())
    content = b"A=1\0OMP_NUM_THREADS=8=x=y\0NOTHING\0B=\xff\0"

    def read_bytes(path):
        if str(path) != f"/proc/{os.getpid()}/environ":
            raise FileNotFoundError
        return content

    monkeypatch.setattr(launcher.Path, "read_bytes", read_bytes)
    assert launcher.variable("OMP_NUM_THREADS") == "8=x=y" and launcher.variable("A") == "1"
    assert launcher.variable("B") == "\udcff" and launcher.variable("NOT_SET") is None
    monkeypatch.setattr(launcher, "find", lambda: 10**9)
    assert launcher.variable("A") is None


@pytest.mark.parametrize("name", [*launcher.RANKS, *launcher.MPI])
def test_variables_of_one_of_several_processes_are_refused_and_gone(name, parents, monkeypatch):
    monkeypatch.setenv(name, "7")
    monkeypatch.setenv("PMI_RANK" if name != "PMI_RANK" else "RANK", "0")
    error = launcher.drop_variables()
    assert str(error).startswith(f"{name} is set, as for one of several processes, but neither")
    assert name in str(error).partition(": unset ")[2] and error.rank_variable is None
    assert not {*launcher.RANKS, *launcher.MPI} & os.environ.keys()


def test_which_names_mean_several_processes(parents, monkeypatch):
    """`RANK` 0 of `WORLD_SIZE` 1 is a process alone."""
    for name in {*launcher.RANKS, *launcher.MPI}:
        is_count = "SIZE" in name or name == "MPI_LOCALNRANKS"
        alone, other = ("1", "0") if is_count else ("0", "1")
        monkeypatch.setenv(name, alone)
        assert launcher.drop_variables() is None, name
        monkeypatch.setenv(name, other)
        assert launcher.drop_variables() is not None and name not in os.environ, name
    assert launcher.drop_variables() is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("PMI_RANK", "1")
    assert str(launcher.drop_variables()).startswith("RANK, PMI_RANK are set, as for one of")


def test_an_elastic_launcher_in_a_step_of_mpi(parents, monkeypatch):
    """`srun` starts one launcher per node: its variables describe the launchers."""
    parents(TORCHRUN)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.setenv(name, "3")
    assert launcher.drop_variables() is None
    assert "PMI_RANK" not in os.environ and "PMI_SIZE" not in os.environ
    assert os.environ["RANK"] == os.environ["WORLD_SIZE"] == "3"


def test_a_process_and_its_parent():
    parent, words = launcher._parent_and_command(os.getpid())
    lines = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert parent == os.getppid() and words == [os.fsdecode(line) for line in lines]
    assert launcher._parent_and_command(2**31) == (0, [])


def test_a_program_may_have_any_name(tmp_path, monkeypatch):
    """The kernel writes it in parentheses into `stat`, and it may itself contain some."""
    (tmp_path / "self").mkdir()
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) 9 (b) S 5 6 7")
    (tmp_path / "7" / "cmdline").write_bytes(b"\0a\0b X\0\0")
    monkeypatch.setattr(launcher, "Path", lambda path: Path(path.replace("/proc", str(tmp_path))))
    assert launcher._parent_and_command(7) == (5, ["", "a", "b X"])


def test_a_system_without_proc_asks_psutil(tmp_path, monkeypatch):
    """It gives each word as it is: a path may have spaces."""
    monkeypatch.setattr(launcher, "Path", lambda path: Path(path.replace("/proc", str(tmp_path))))
    words = [sys.executable, "-c", "input()", "a b"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, "A": "b=c"})
    assert launcher._parent_and_command(child.pid) == (os.getpid(), words)
    monkeypatch.setattr(launcher, "find", lambda: child.pid)
    assert launcher.variable("A") == "b=c" and launcher.variable("NOT_SET") is None
    child.communicate(b"\n")
    assert launcher._parent_and_command(child.pid) == (0, [])
    assert launcher.variable("A") is None


# -------------------------------------------------------------------------------------------- cpu


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
    options = {"--num_cpu_threads_per_process": option}
    monkeypatch.setattr(cpu.launcher, "option", options.__getitem__)
    monkeypatch.setattr(cpu.launcher, "variable", {"OMP_NUM_THREADS": variable}.__getitem__)
    monkeypatch.setattr(cpu, "cores_per_process", lambda: 12)
    assert cpu.threads_per_process() == (threads or 12)


def test_the_cores_of_this_process(monkeypatch):
    monkeypatch.setattr(cpu, "quota", lambda: math.inf)
    allowed = {0: {3, 5}}
    monkeypatch.setattr(cpu.os, "sched_getaffinity", allowed.__getitem__)
    monkeypatch.setattr(cpu.os, "cpu_count", lambda: 7)
    assert cpu.cores() == 2
    monkeypatch.delattr(cpu.os, "sched_getaffinity")  # macOS
    for output, count in (("4\n", 4), ("", 7)):  # the second: an Intel Mac
        asked = []

        def run(line, output=output, asked=asked, **options):
            asked.append((line, options))
            return SimpleNamespace(stdout=output)

        monkeypatch.setattr(cpu.subprocess, "run", run)
        assert cpu.cores() == count
        line = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
        assert asked == [(line, {"capture_output": True, "text": True})]
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
    for text, cores in (("150000 100000", 1.5), ("0 100000", math.inf), ("1 100000", 1e-5)):
        (groups / "X:b" / "cpu.max").write_text(text)
        assert cpu.quota(groups, own) == cores
    (tmp_path / "cpu.max").write_text("100 100000")  # beside the groups
    assert cpu.quota(groups, own) == 1e-5
    assert cpu.quota(groups, tmp_path / "none") == math.inf
    monkeypatch.setattr(cpu, "Path", lambda *parts: paths.append(parts) or Path(tmp_path, "none"))
    paths = []
    cpu.quota()
    assert paths == [("/proc/self/cgroup",)]
    defaults = cpu.quota.__defaults__
    assert defaults == ("/sys/fs/cgroup", "/proc/self/cgroup")


@pytest.mark.parametrize("avx512", [True, False, None])
@pytest.mark.parametrize("amx", [True, False, None])
def test_either_unit_computes_in_bf16(avx512, amx, monkeypatch):
    """None: a release of torch that does not say."""
    for name, value in (("_is_avx512_bf16_supported", avx512), ("_is_amx_tile_supported", amx)):
        if value is None:
            monkeypatch.delattr(torch.cpu, name, raising=False)
        else:
            monkeypatch.setattr(torch.cpu, name, lambda value=value: value, raising=False)
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
