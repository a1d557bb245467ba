"""How `utils.run.launcher` finds the launcher, and what it believes of the environment."""

import os
from types import SimpleNamespace

import psutil
import pytest

from utils.run import launcher

PYTHON = "/venv/bin/python3.11"
TORCHRUN = [PYTHON, "/venv/bin/torchrun", "--nnodes=1:3", "--nproc_per_node", "2", "train.py"]
VARIABLES = [*launcher.RANKS, *launcher.MPI]


class Parent:
    """A process among the parents of this one; without `words` it has ended."""

    def __init__(self, words, environment):
        self.words, self.environment = words, environment

    def cmdline(self):
        if self.words is None:
            raise psutil.NoSuchProcess(1)
        return self.words

    def environ(self):
        if self.environment is None:
            raise psutil.AccessDenied(1)
        return self.environment


@pytest.fixture
def started_by(monkeypatch):
    """Gives this process parents with these command lines; returns them, the nearest first."""
    for name in (*VARIABLES, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    def start(*commands, environment=None):
        parents = [Parent(words, environment) for words in commands]
        this = SimpleNamespace(parents=lambda: parents)
        monkeypatch.setattr(psutil, "Process", lambda: this)
        launcher.find.cache_clear()
        return parents

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
    [parent] = started_by(words)
    assert launcher.find() is (parent if known else None)


def test_the_nearest_launcher_among_the_parents(started_by, monkeypatch):
    parents = started_by(["sh", "train.sh"], ["", "a", "b X"], TORCHRUN, ["accelerate", "launch"])
    assert launcher.find() is parents[2] and not launcher.is_elastic()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launcher.is_elastic()
    started_by(["bash"], [], ["sshd"])
    assert launcher.find() is None and not launcher.is_elastic()
    started_by(None, TORCHRUN)  # it has ended
    assert launcher.find() is None


def test_options_of_the_launcher(started_by):
    started_by(["bash", "--nnodes", "2"])
    assert launcher.option("--nnodes") is None
    [parent] = started_by([*TORCHRUN, "--a=b=c", "--last"])
    names = ("--nnodes", "--nproc_per_node", "--nproc-per-node", "--nproc", "--a", "--last")
    assert [launcher.option(name) for name in names] == ["1:3", "2", "2", None, "b=c", ""]
    parent.words = None  # it ends
    assert launcher.option("--nnodes") is None


def test_variables_before_the_launcher_changed_them(started_by, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started_by(["bash"], environment={"OMP_NUM_THREADS": "2"})
    assert launcher.variable("OMP_NUM_THREADS") == "1" and launcher.variable("NOT_SET") is None
    [parent] = started_by(TORCHRUN)
    assert launcher.variable("OMP_NUM_THREADS") is None  # the system does not show it
    parent.environment = {"OMP_NUM_THREADS": "8"}
    assert launcher.variable("OMP_NUM_THREADS") == "8" and launcher.variable("RANK") is None


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
