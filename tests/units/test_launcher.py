"""What `utils.run.launcher` believes of the environment, and how it finds the launcher."""

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from utils.run import launcher

PYTHON = "/venv/bin/python3.11"
TORCHRUN = [PYTHON, "/venv/bin/torchrun", "--nnodes=1:3", "--nproc_per_node", "2", "train.py"]
VARIABLES = [*launcher.RANKS, *launcher.MPI]
OF_TORCHRUN = dict.fromkeys(launcher.COMPLETE, "3") | {"MASTER_ADDR": "127.0.0.1"}


class Parent:
    """A process among the parents of this one; without `words` it has ended."""

    pid = 7

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
    for name in (*VARIABLES, *launcher.COMPLETE, launcher.MARK, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)

    def start(*commands, environment=None):
        parents = [Parent(words, environment) for words in commands]
        this = SimpleNamespace(parents=lambda: parents)
        monkeypatch.setattr(psutil, "Process", lambda: this)
        launcher.find.cache_clear()
        return parents

    yield start
    launcher.find.cache_clear()


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
    assert launcher.check_variables() is None and name not in os.environ
    monkeypatch.setenv(name, several)
    another = "PMI_RANK" if name != "PMI_RANK" else "RANK"
    monkeypatch.setenv(another, "0")
    error = launcher.check_variables()
    assert str(error).startswith(f"{name} is set, as for one of several processes, but neither")
    assert set(str(error).partition(": unset ")[2].partition(",")[0].split()) == {name, another}
    assert error.rank_variable is None and not {*VARIABLES} & os.environ.keys()
    assert launcher.check_variables() is None


def test_the_variables_of_torchrun_are_believed_if_they_are_complete(started_by, monkeypatch):
    """Whatever program started this one. Those of MPI, as in a step of `srun`, go."""
    for missing in (*launcher.COMPLETE, None):
        started_by(["bash"])
        for name, value in {**OF_TORCHRUN, "PMI_RANK": "3"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv(str(missing), raising=False)
        error = launcher.check_variables()
        assert launcher.is_elastic() == (missing is None) == (error is None)
        assert error is None or " are set, as for one of several processes, but" in str(error)
        assert "PMI_RANK" not in os.environ


def test_a_launcher_that_has_ended_is_named_at_once(started_by, monkeypatch):
    started_by(["bash"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        used = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": port}
        for name, value in {**OF_TORCHRUN, **used}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv(launcher.MARK, raising=False)
        assert launcher.check_variables() is None
    error = launcher.check_variables()
    assert f"no launcher answers at 127.0.0.1:{port}" in str(error) and error.rank_variable is None
    waited = []
    monkeypatch.setattr(socket, "create_connection", lambda *where: waited.append(where) or server)
    assert launcher.check_variables() is None
    assert waited == [(("127.0.0.1", port), 10)]  # seconds
    assert "left over from another job, unset RANK WORLD_SIZE" in str(error)


@pytest.mark.parametrize("error_file", [None, "/tmp/a b/error.json"])
def test_a_child_of_a_training_process_is_no_training_process(error_file, started_by, monkeypatch):
    """But a process of another launch in it is one."""
    started_by(["bash"])
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if error_file:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", error_file)
    monkeypatch.setenv(launcher.MARK, "")
    assert launcher.check_variables() is None
    assert launcher.check_variables() is None  # the same process
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert "inherited the variables of a training process" in str(launcher.check_variables())
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/b/error.json")
    assert launcher.check_variables() is None
