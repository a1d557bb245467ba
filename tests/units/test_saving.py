"""Checkpoints that a thread writes: what is written, who waits for it, and what an error does."""

import inspect
import os
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import other
from harness import fakes
from safetensors.torch import load_file

from utils.run import checkpoint, process
from utils.scale import saving


@pytest.fixture
def writer():
    return saving.BackgroundWriter(fakes.accelerator())


# --------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_a_gpu_has_pinned_copies_and_each_is_waited_for(device, tmp_path, monkeypatch):
    """Of several GPUs, too: the copies of a pipeline come from all of them."""
    calls = []
    waits = inspect.signature(saving.StateDictStager.stage).parameters["non_blocking"]
    assert waits.default is False

    def stager(**options):
        calls.append(options)
        return SimpleNamespace(stage=lambda state, **how: calls.append(how) or {**state})

    monkeypatch.setattr(saving, "StateDictStager", stager)
    writer = saving.BackgroundWriter(fakes.accelerator(device=device))
    with writer.capture(False):
        torch.save({"step": 3}, tmp_path / "state")
    # Containers have little shared memory.
    assert calls == [{"pin_memory": device == "cuda", "share_memory": False}, {}]


def test_shards_are_copied_too_and_written_in_their_own_group(tmp_path, writer, monkeypatch):
    state = {"weights": torch.ones(2, 3), "step": 4}
    asked, real_save = [], dcp.save
    writer.group = "its own"

    def save(state, process_group=None, **options):
        asked.append(process_group)
        real_save(state, **options)

    monkeypatch.setattr(dcp, "save", save)
    with writer.capture(False) as writes:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    state["weights"].fill_(7)
    assert not list(tmp_path.iterdir())
    assert writer.start(writes, lambda error: error).result() is None and asked == ["its own"]
    loaded = {"weights": torch.zeros(2, 3), "step": 0}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert loaded["step"] == 4 and torch.equal(loaded["weights"], torch.ones(2, 3))


def test_only_files_are_written_later_and_only_in_the_block(tmp_path, writer):
    before = torch.save, other.safe_save_file, dcp.save
    with pytest.raises(ZeroDivisionError), writer.capture(False) as writes:
        with open(tmp_path / "open", "wb") as file:
            torch.save(1, file)
        assert torch.load(tmp_path / "open") == 1 and not writes
        weight = torch.ones(1)
        other.safe_save_file({"a": weight}, tmp_path / "a.safetensors")
        weight.fill_(7)
        assert len(writes) == 1 and torch.save is not before[0]
        1 / 0  # noqa: B018
    assert (torch.save, other.safe_save_file, dcp.save) == before
    writes.pop()()
    assert load_file(tmp_path / "a.safetensors")["a"] == 1


# -------------------------------------------------------------------------------- who waits for it


def test_all_writes_are_tried_and_the_first_error_is_passed_on(writer):
    """Other processes may wait in one of them for this process. The thread gives way to others."""
    done = []

    def fail(error):
        done.append(error)
        raise error

    def finish(error):
        return error, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    # That of shards is no Exception.
    full = dcp.CheckpointException("save", {1: (OSError(28, "No space left"), None)})
    writes = [partial(fail, full), partial(fail, OSError()), partial(done.append, "third")]
    _, here = finish(None)
    assert writer.start(writes, finish).result() == (full, min(here + saving.NICENESS, 19))
    assert len(done) == 3 and checkpoint.is_write_error(full) and not isinstance(full, Exception)
    assert finish(None) == (None, here)


def test_a_process_is_forked_when_nothing_is_written(writer, monkeypatch):
    """A lock that the thread holds would stay locked in the new process."""
    let_go, done, real_wait = threading.Event(), [], saving.wait

    def wait(*args):
        done.append("waits")
        let_go.set()
        return real_wait(*args)

    monkeypatch.setattr(saving, "wait", wait)
    writer.start([let_go.wait], lambda error: done.append("written"))
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert done[:2] == ["waits", "written"]
    done.clear()
    monkeypatch.setattr(saving, "wait", lambda futures, seconds: done.append(seconds))
    process.finish_writing(2.5)
    assert done == [2.5]


def test_nothing_is_copied_where_the_training_waits(tmp_path, writer):
    with writer.capture(True) as writes:
        torch.save(1, tmp_path / "state")
    assert torch.load(tmp_path / "state") == 1 and writes == []
    done, let_go = [], threading.Event()
    writer.start([let_go.wait], lambda error: done.append("written"))
    assert done == []
    let_go.set()
    process.finish_writing(20)
    assert done == ["written"]
