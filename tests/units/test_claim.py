"""Which folders a run may write to, and what is left in those to which it does not."""

import errno
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils.run import claim as module
from utils.run.claim import check_place, check_shared, claim
from utils.run.failures import RunFailed, UserError


def me():
    return f"process {os.getpid()} on {socket.gethostname()}"


def refused(folder, match):
    with pytest.raises(UserError, match=match):
        claim(folder)


class Locks:
    """Stands for `fcntl.lockf` and the clock: the lock is free after `busy` seconds."""

    def __init__(self, monkeypatch, busy, number=errno.EAGAIN):
        self.now, self.flags, self.busy, self.number = 100.0, [], busy, number
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module.fcntl, "lockf", self.lockf)

    def sleep(self, seconds):
        self.now += seconds

    def lockf(self, file, flags):
        self.flags.append(flags)
        assert len(self.flags) < 100
        if self.now < 100 + self.busy:
            raise OSError(self.number, os.strerror(self.number))


def test_a_folder_and_the_lock_in_it_are_made(tmp_path, monkeypatch):
    """And are on disk: a power cut would lose folders, and another machine would not see who it is."""
    synced, fsync = [], os.fsync

    def follow(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((path, os.path.isfile(path) and Path(path).read_text()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", follow)
    path = tmp_path / "a" / "b" / "c"
    owner, file = claim(path)
    assert (owner, file.name) == (me(), str(path / ".lock"))
    assert (path / ".lock").read_text() == me() and os.listdir(path) == [".lock"]
    folders = {(str(folder), False) for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")}
    assert folders | {(str(path / ".lock"), me())} <= set(synced)


OURS = '{"arguments": {}, "data": {}, "command": []}'
BEGUN = [".lock", ".args.json.7.writing", "checkpoints", "status.json", ".DS_Store", "Thumbs.db"]


@pytest.mark.parametrize(
    ("files", "ours"),
    [
        (dict.fromkeys(BEGUN, "{}"), True),  # and what macOS and Windows add
        ({"args.json": OURS, "a.png": ""}, True),
        ({".lock": "", "metrics.jsonl": ""}, False),
        ({"args.json": "[1]"}, False),
        ({"args.json": '{"arguments": {}, "command": []}'}, False),
    ],
)
def test_a_folder_of_something_else_is_no_place_for_a_run(files, ours, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    if ours:
        assert claim(tmp_path)[0] == me()
    else:
        refused(tmp_path, "is not empty and does not contain a run of these")
        assert {name: (tmp_path / name).read_text() for name in os.listdir(tmp_path)} == files


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError("odd")])
def test_a_folder_that_cannot_be_written_is_refused(error, tmp_path, monkeypatch):
    """On a full disk a folder and an empty file can still be made: what is in the lock is synced."""

    def fsync(descriptor):
        raise error

    monkeypatch.setattr(os, "fsync", fsync)
    reason = error.strerror or "odd"
    refused(tmp_path / "run", f"^cannot write to --output_dir {tmp_path / 'run'}: {reason}$")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", r"cannot write to --output_dir .*/file: it is a file")


def test_a_lock_is_waited_for_as_long_as_a_killed_job_may_take_to_end(tmp_path, monkeypatch):
    lock = tmp_path / ".lock"
    for number in (errno.EAGAIN, errno.EACCES):
        lock.write_text("process 7 on a-host-with-a-long-name-of-its-own.example.org\n")
        locks = Locks(monkeypatch, 6.9, number)
        with claim(tmp_path)[1]:
            assert lock.read_text() == me()
        assert locks.now == pytest.approx(107) and len(locks.flags) == 36
        assert set(locks.flags) == {module.fcntl.LOCK_EX | module.fcntl.LOCK_NB}
    for owner, named in (("process 7 on a\n", "process 7 on a"), ("", "another process")):
        lock.write_text(owner)
        locks = Locks(monkeypatch, 60)
        refused(tmp_path, f"^{tmp_path} is in use by {named}: wait for it, or use another --output")
        assert lock.read_text() == owner and 107 < locks.now < 107.5


def test_a_file_system_without_locks_is_used_all_the_same(tmp_path, monkeypatch, capsys):
    locks = Locks(monkeypatch, 60, errno.EOPNOTSUPP)
    assert claim(tmp_path)[0] == (tmp_path / ".lock").read_text() and locks.now == 100
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path} is on a file system without")
    Locks(monkeypatch, 60, errno.EIO)
    refused(tmp_path, "Input/output error")


def test_the_lock_of_the_main_process_may_take_a_while_to_show(tmp_path, monkeypatch):
    """A network file system shows a new file to other machines after seconds."""
    owner, seconds = "process 7 on a", []
    lock = tmp_path / "run" / ".lock"
    stages = [lock.parent.mkdir, lambda: lock.write_text("me"), lambda: lock.write_text(owner)]

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


def test_a_folder_that_is_taken_away_ends_the_run(tmp_path):
    place = tmp_path.stat()
    check_place(tmp_path, place)
    (tmp_path / "another").mkdir()
    for path in (tmp_path / "another", tmp_path / "none"):
        with pytest.raises(RunFailed, match="was removed or renamed") as caught:
            check_place(path, place)
        assert not caught.value.retry
