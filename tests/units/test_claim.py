"""Which folders a run may write to, and what is left in those to which it does not."""

import os
import socket
from types import SimpleNamespace

import pytest

from utils.run import claim as module
from utils.run.claim import check_shared, claim
from utils.run.failures import UserError


def refused(folder, match):
    with pytest.raises(UserError, match=match):
        claim(folder)


def test_a_claim_that_is_undone_leaves_no_folder(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file),
    )
    path = tmp_path / "a" / "b" / "c"
    claimed = claim(path)
    assert claimed.file.name == str(path / ".lock")
    assert claimed.owner == f"process {os.getpid()} on {socket.gethostname()}"
    assert (path / ".lock").read_text() == claimed.owner and os.listdir(path) == [".lock"]
    assert claimed.made == [path, tmp_path / "a" / "b", tmp_path / "a"]
    # A power cut would lose folders whose names are not on disk.
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)
    claimed.undo()
    assert os.listdir(tmp_path) == []
    claimed.undo()  # the folder is gone
    there = claim(tmp_path)
    there.undo()
    assert there.made == [] and tmp_path.exists() and os.listdir(tmp_path) == []


@pytest.mark.parametrize("other", ["args.json", "a file of another process"])
def test_a_claim_is_undone_only_where_nothing_was_written(other, tmp_path):
    claimed = claim(tmp_path / "run")
    (tmp_path / "run" / other).write_text("x")
    claimed.undo()
    assert (tmp_path / "run" / ".lock").exists() == (other == "args.json")
    assert (tmp_path / "run" / other).exists()


def test_a_name_that_is_no_folder_is_refused_before_anything_is_made(tmp_path):
    refused(tmp_path / "caf\udce9", "is not valid UTF-8, and weights cannot be written to it")
    assert os.listdir(tmp_path) == []
    (tmp_path / "run").touch()
    refused(tmp_path / "run", r"cannot write to --output_dir .*/run: it is a file")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError("odd")])
def test_a_folder_on_a_full_disk_is_refused(error, tmp_path, monkeypatch):
    """By writing a file that is not empty: on a full disk an empty one can still be made."""
    tried = []

    def write_bytes(path, data):
        tried.append((path, len(data)))
        path.touch()  # a part of it fits
        raise error

    monkeypatch.setattr(type(tmp_path), "write_bytes", write_bytes)
    reason = error.strerror or "odd"
    refused(tmp_path / "run", f"^cannot write to --output_dir {tmp_path / 'run'}: {reason}$")
    assert tried == [(tmp_path / "run" / ".probe", 65536)] and not (tmp_path / "run").exists()


def test_the_processes_of_a_killed_job_are_waited_for(tmp_path, monkeypatch):
    seen = []

    def lock(path, owner, patience):
        seen.append((path, patience))
        return path.open("w")

    monkeypatch.setattr(module, "lock", lock)
    claim(tmp_path)
    assert seen == [(tmp_path / ".lock", 2 * module.process.ORPHAN_SECONDS)]


def test_the_lock_of_the_main_process_may_take_a_while_to_show(tmp_path, monkeypatch):
    """A network file system shows a new file to other machines after seconds."""
    owner, seconds = "process 7 on a", []
    stages = [
        lambda: (tmp_path / "run").mkdir(),
        lambda: (tmp_path / "run" / ".lock").write_text("process 6"),
        lambda: (tmp_path / "run" / ".lock").write_text(owner),
    ]

    def sleep(delay):
        seconds.append(delay)
        if stages:
            stages.pop(0)()

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    check_shared(tmp_path / "run", owner)
    assert seconds == [0.5] * 3 and not stages
    with pytest.raises(UserError, match=f"different folder on {socket.gethostname()} than for me"):
        check_shared(tmp_path / "run", "me")
    assert len(seconds) == 3 + module.SHARED_CHECKS
