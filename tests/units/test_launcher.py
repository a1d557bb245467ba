"""How `utils.run.launcher` finds the launcher, and what it believes of the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils.run import launcher

PYTHON = "/venv/bin/python3.11"
TORCHRUN = [PYTHON, "/venv/bin/torchrun", "--nnodes=1:3", "--nproc_per_node", "2", "train.py"]
VARIABLES = [*launcher.RANKS, *launcher.MPI]


@pytest.fixture
def started_by(tmp_path, monkeypatch):
    """Makes a /proc in which this process has the parents 40, 30, ... with these command lines."""
    for name in (*VARIABLES, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(launcher, "Path", lambda path: Path(path.replace("/proc", str(tmp_path))))

    def start(*commands, first=40):
        ids = [first - 10 * number for number in range(len(commands))]
        for process, parent, words in zip(ids, [*ids[1:], 0], commands, strict=True):
            folder = tmp_path / str(process)
            folder.mkdir(exist_ok=True)
            # The name of the program is in parentheses, and may itself contain some.
            (folder / "stat").write_text(f"{process} (a) 9 (b) S {parent} 6 7")
            (folder / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
        monkeypatch.setattr(os, "getppid", lambda: ids[0])
        launcher.find.cache_clear()
        return tmp_path / str(first)

    yield start
    launcher.find.cache_clear()


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
    ],
)
def test_a_launcher_is_known_by_its_program_or_module(words, known, started_by):
    started_by(words)
    assert (launcher.find() == 40) is known
    assert launcher.command() == (words if known else [])


def test_the_nearest_launcher_among_the_parents(started_by):
    started_by(["sh", "train.sh"], ["", "a", "b X"], TORCHRUN, ["accelerate", "launch"])
    assert launcher.find() == 20 and launcher.command() == TORCHRUN
    started_by(["bash"], ["sshd"])
    assert launcher.find() is None
    started_by(TORCHRUN, first=1)  # the entry point of a container, where the ids start anew
    assert launcher.find() == 1
    (started_by(TORCHRUN) / "stat").unlink()  # it has ended
    assert launcher.find() is None


def test_options_of_the_launcher(started_by):
    started_by(["bash", "--nnodes", "2"])
    assert launcher.option("--nnodes") is None
    started_by([*TORCHRUN, "--a=b=c", "--last"])
    names = ("--nnodes", "--nproc_per_node", "--nproc-per-node", "--nproc", "--a", "--last")
    assert [launcher.option(name) for name in names] == ["1:3", "2", "2", None, "b=c", ""]


def test_variables_before_the_launcher_changed_them(started_by, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started_by(["bash"])
    assert launcher.variable("OMP_NUM_THREADS") == "1" and launcher.variable("NOT_SET") is None
    folder = started_by(TORCHRUN)
    assert launcher.variable("OMP_NUM_THREADS") is None  # the system does not show it
    (folder / "environ").write_bytes(b"A=1\0OMP_NUM_THREADS=8=x=y\0NOTHING\0B=\xff\0")
    names = ("OMP_NUM_THREADS", "A", "B", "NOTHING")
    assert [launcher.variable(name) for name in names] == ["8=x=y", "1", "\udcff", None]


def test_a_system_without_proc_asks_psutil(started_by, tmp_path, monkeypatch):
    """It gives each word as it is: a path may have spaces."""
    program = tmp_path / "torchrun"
    program.write_text("input()")
    words = [sys.executable, str(program), "a b"]
    environment = {**os.environ, "A": "b=c"}
    with subprocess.Popen(words, stdin=subprocess.PIPE, env=environment) as child:
        (tmp_path / "self").rmdir()
        monkeypatch.setattr(os, "getppid", lambda: child.pid)
        launcher.find.cache_clear()
        assert launcher.find() == child.pid and launcher.command() == words
        assert launcher.variable("A") == "b=c" and launcher.variable("NOT_SET") is None
        child.communicate(b"\n")
    assert launcher.command() == [] and launcher.variable("A") is None
    launcher.find.cache_clear()
    assert launcher.find() is None


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_one_of_several_processes_are_refused_and_gone(name, started_by, monkeypatch):
    """`RANK` 0 of `WORLD_SIZE` 1 is a process alone."""
    started_by(["bash"])
    is_count = "SIZE" in name or name == "MPI_LOCALNRANKS"
    alone, several = ("1", "0") if is_count else ("0", "1")
    monkeypatch.setenv(name, alone)
    assert launcher.drop_variables() is None and name not in os.environ
    monkeypatch.setenv(name, several)
    another = "PMI_RANK" if name != "PMI_RANK" else "RANK"
    monkeypatch.setenv(another, "0")
    error = launcher.drop_variables()
    assert str(error).startswith(f"{name} is set, as for one of several processes, but neither")
    assert set(str(error).partition(": unset ")[2].partition(",")[0].split()) == {name, another}
    assert error.rank_variable is None and not {*VARIABLES} & os.environ.keys()
    assert launcher.drop_variables() is None


def test_an_elastic_launcher_in_a_step_of_mpi(started_by, monkeypatch):
    """`srun` starts one launcher per node: its variables describe the launchers."""
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.setenv(name, "3")
    started_by(TORCHRUN)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launcher.drop_variables() is None
    assert "PMI_RANK" not in os.environ and "PMI_SIZE" not in os.environ
    assert os.environ["RANK"] == os.environ["WORLD_SIZE"] == "3"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert str(launcher.drop_variables()).startswith("RANK, WORLD_SIZE are set, as for one of")
