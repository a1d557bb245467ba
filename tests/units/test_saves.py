"""The checkpoints that a run writes, beside the training or not.

What a folder holds after any sequence of saves is in properties/test_run_folder_machine.py.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import fakes

from utils.run import manifest
from utils.run.failures import RunFailed
from utils.run.saves import Best, Saves, Writer


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


def test_failed_saves_in_a_row_end_the_run(tmp_path):
    saves, full = saves_of(tmp_path), OSError("the disk is full")
    save(saves, 1, error=full)
    save(saves, 2)
    for step in (3, 4):
        save(saves, step, error=full, wait=True)
    with pytest.raises(RunFailed, match=r"^3 checkpoints in a row .* is of step 2\. Make"):
        save(saves, 5, error=full, wait=True)
    assert [(step, line["written"]) for step, line in saves.lines][1:3] == [(2, True), (3, False)]


@pytest.mark.parametrize("longer", [True, False])
def test_a_restart_goes_on_where_the_run_stood(longer, tmp_path):
    """A longer run gets new patience. An older checkpoint goes when the newer one is evaluated."""
    for step in (2, 3):
        before = saves_of(tmp_path)
        save(before, step, due=True, wait=True)
    [(_, figures)] = before.lines
    assert figures["blocked_seconds"] == figures["seconds"]
    saves, best = saves_of(tmp_path), Best(2)
    saves.resume(3, True)
    best.restore({"best": 0.5, "best_loss": 1.0, "stale": 1}, longer)
    best.add(3, 0.5, 1.5)
    assert saves.newest_step == 3 and best.out_of_patience() != longer
    saves.evaluated(2, {"score": 0.1})  # of another step
    assert len(manifest.all_in(tmp_path)) == 2
    saves.evaluated(3, best.record(3))
    [path] = manifest.all_in(tmp_path)
    scores = {"score": 0.5, "loss": 1.5, "best": 0.5, "best_loss": 1.0, "stale": 2 - longer}
    expected = scores | {"step": 3, "evaluation_due": True}
    assert manifest.read(path)["progress"] == expected
    saves.finish()
    saves.evaluated(3, {"score": 0.9})  # nobody listens
    assert manifest.read(path)["progress"] == expected
    best.add(4, 0.5, 0.75)  # of equal scores, the lower loss
    assert best.stale == 0
