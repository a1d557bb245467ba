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


def test_a_folder_and_the_lock_in_it_are_made(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file),
    )
    path = tmp_path / "a" / "b" / "c"
    owner, file = claim(path)
    assert file.name == str(path / ".lock")
    assert owner == f"process {os.getpid()} on {socket.gethostname()}"
    assert (path / ".lock").read_text() == owner and os.listdir(path) == [".lock"]
    # A power cut would lose folders whose names are not on disk.
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)


def test_a_name_that_is_no_folder_is_refused_before_anything_is_made(tmp_path):
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
    assert tried == [(tmp_path / "run" / ".probe", 65536)]
    assert os.listdir(tmp_path / "run") == [".lock"]


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
