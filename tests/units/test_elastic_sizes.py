"""How many processes a launch can have, and which batches fit all of these numbers."""

import pytest
from harness.fakes import accelerator

from utils.run import launcher
from utils.run.failures import UserError
from utils.scale import elastic


@pytest.fixture
def launched(monkeypatch):
    """`launched(nodes, **environment)`: the value of `--nnodes`, and variables."""

    def launch_with(nodes=None, **environment):
        monkeypatch.setattr(launcher, "option", {"--nnodes": nodes}.__getitem__)
        for name in ("PET_NNODES", "GROUP_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return launch_with


@pytest.mark.parametrize(
    ("nodes", "environment", "processes", "possible", "words"),
    [
        (None, {"PET_NNODES": "1:4"}, 3, [3, 6, 9, 12], "3, 6, 9 or 12"),
        (None, {"PET_NNODES": "1:4", "GROUP_WORLD_SIZE": "2"}, 4, [2, 4, 6, 8], "2, 4, 6 or 8"),
        (None, {"PET_NNODES": "1:4", "GROUP_WORLD_SIZE": "2"}, 3, [3], "3"),  # machines differ
        ("2:3", {"PET_NNODES": "1", "GROUP_WORLD_SIZE": "2"}, 4, [4, 6], "4 or 6"),
        ("2", {"GROUP_WORLD_SIZE": "2"}, 4, [4], "4"),
    ],
)
def test_the_processes_that_a_launch_can_have(
    nodes, environment, processes, possible, words, launched
):
    launched(nodes, **environment)
    assert elastic.possible_processes(accelerator(processes)) == possible
    assert elastic.either(possible) == words


def test_a_batch_must_fit_every_number_of_processes(launched, capsys):
    launched()
    assert elastic.divide_batch(accelerator(2), 8, 2) == 2
    assert "elastic" not in capsys.readouterr().out
    launched("1:3", GROUP_WORLD_SIZE="1")
    assert elastic.divide_batch(accelerator(2, rank=1), 24, 2) == 6
    assert capsys.readouterr().out == ""
    elastic.divide_batch(accelerator(2), 24, 2)
    assert capsys.readouterr().out == (
        "global batch 24 = 2 processes x 6 samples x 2 accumulation steps\n"
        "elastic training: when machines leave or join, the run continues from its last "
        "checkpoint with 2, 4 or 6 processes\n"
    )
    with pytest.raises(UserError, match=r"over 2, 4 or 6 process.* x 2 .*: use 24 or 48$"):
        elastic.divide_batch(accelerator(2), 32, 2)
    with pytest.raises(UserError, match=r": use 24$"):
        elastic.divide_batch(accelerator(2), 8, 2)
