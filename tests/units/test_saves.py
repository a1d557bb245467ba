"""The checkpoints that a run writes, beside the training or not.

What a folder holds after any sequence of saves, failed ones and restarts among them, is in
properties/test_run_folder_machine.py.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import fakes

from utils.run import manifest
from utils.run.saves import Saves, Writer


class Beside(Writer):
    """Writes in a thread, once `.go_on` is set; `.error` is raised by the next write."""

    def __init__(self):
        self.go_on, self.error, self.pool = threading.Event(), None, ThreadPoolExecutor(1)

    def start(self, writes, finish):
        def write():
            assert self.go_on.wait(20)
            error, self.error = self.error, None
            return finish(error)

        return self.pool.submit(write)


@pytest.fixture
def writer():
    made = Beside()
    yield made
    made.go_on.set()
    made.pool.shutdown()


def saves_of(path, writer=None):
    """The saves of a run in this folder; `.lines` has those of its log."""
    lines = []

    def log(step, **figures):
        lines.append((step, figures))

    made = Saves(fakes.accelerator(), path, 1, log, writer)
    made.lines = lines
    return made


def save(saves, step, due=False, wait=False, error=None):
    with saves.write({"progress": {"step": step, "evaluation_due": due}}, wait) as folder:
        if error is not None:
            raise error
        with open(f"{folder}/state.bin", "w") as file:
            file.write("x")


def finish_writing(writer):
    writer.go_on.set()
    writer.pool.submit(lambda: None).result()


def test_a_checkpoint_is_written_beside_the_training(tmp_path, writer):
    saves = saves_of(tmp_path, writer)
    save(saves, 3)
    saves.look()
    assert (saves.lines, saves.newest_step, manifest.all_in(tmp_path)) == ([], 0, [])
    finish_writing(writer)
    assert saves.lines == []
    for _ in range(2):  # noted once
        saves.look()
        [(step, figures)] = saves.lines
    assert (step, figures["written"], saves.newest_step) == (3, True, 3)
    assert 0 < figures["blocked_seconds"] < figures["seconds"]
    save(saves, 4, wait=True)
    [_, (_, figures)] = saves.lines
    assert figures["blocked_seconds"] == figures["seconds"]


def test_a_write_that_fails_costs_the_checkpoint(tmp_path, writer, capsys):
    saves = saves_of(tmp_path, writer)
    writer.error = OSError("the disk is full")
    save(saves, 4, due=True)
    finish_writing(writer)
    says = "checkpoint of step 4 not written, training continues: the disk is full"
    assert says in capsys.readouterr().err
    saves.look()  # a failure waits for the next save, of all processes
    assert saves.lines == []
    saves.evaluated(4, {"score": 0.5})
    writer.error = ZeroDivisionError()  # ends the run: it is no error of a write
    save(saves, 5)
    finish_writing(writer)
    saves.look()
    [(step, figures)] = saves.lines
    assert (step, figures["written"], saves.newest_step) == (4, False, 0)
    with pytest.raises(ZeroDivisionError):
        save(saves, 8)
    with pytest.raises(KeyError):  # nor is one of the script hidden
        save(saves_of(tmp_path), 9, error=KeyError())
    assert manifest.all_in(tmp_path) == []
