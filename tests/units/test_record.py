"""Which folders a run may write to; what is recorded of it, and how two records are compared."""

import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from harness import fakes

from utils.run import manifest, record
from utils.run.failures import RunFailed, UserError

CPU = fakes.accelerator(4, mixed_precision="bf16")
GPU = fakes.accelerator(8, device="cuda", mixed_precision="bf16")


def test_only_paths_to_data_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    arguments = {"dataset": "link", "init_from": "data", "output_dir": "data", "lr": 0.1}
    arguments |= {"seed": 3, "compile": False, "eval_every": None}
    arguments |= {"weights": "link", "columns": ["a b", "c"], "call": print}
    absolute = {name: str(tmp_path / "data") for name in ("dataset", "weights", "init_from")}
    absolute["columns"] = "'a b' c"
    plain = {"output_dir": "data", "lr": 0.1, "seed": 3, "compile": False, "eval_every": None}
    assert record.comparable(arguments) == absolute | plain
    several = record.comparable({"dataset": ["link", "me/it"]})
    assert several == {"dataset": f"{tmp_path / 'data'} me/it"}
    names = {"dataset": "uoft-cs/cifar10", "init_from": None, "weights": "DEFAULT"}
    assert record.comparable(names) == names
    assert arguments["dataset"] == "link"


def test_each_difference_is_a_line_in_order():
    """A path of data may move: its last part counts."""
    earlier = {"lr": 1, "text": "a\nb", "only_before": 5, "same": 2, "epochs": 3}
    earlier |= {"track": "/gone/a", "dataset": "/gone/a", "weights": "/a/b"}
    now = {"lr": 0.30000001, "text": "c", "only_now": 6, "same": 2, "epochs": 4}
    now |= {"track": "/elsewhere/a", "dataset": "/elsewhere/a", "weights": "/a/c"}
    assert record.differences(earlier, now, {"epochs"}) == [
        "lr 0.3 (was 1)",
        "only_before None (was 5)",
        "only_now 6 (was None)",
        r"text c (was 'a\nb')",
        "track /elsewhere/a (was /gone/a)",
        "weights /a/c (was /a/b)",
    ]


def test_the_topology_of_a_launch_and_each_change_of_it(monkeypatch):
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    on_cpu = {"processes": 4, "machines": 1, "device": "CPU", "mixed_precision": "bf16"}
    on_cpu["threads_per_process"] = torch.get_num_threads()
    assert record.topology(CPU) == on_cpu
    earlier = {"topology": on_cpu, "versions": record.versions()}
    assert record.changes(CPU, earlier) == []
    earlier = {"topology": on_cpu | {"gone": 1}, "versions": earlier["versions"] | {"torch": "1.0"}}
    del earlier["topology"]["threads_per_process"]
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    on_gpu = {"processes": 8, "machines": 2, "device": "NVIDIA H100 80GB HBM3"}
    assert record.topology(GPU) == on_cpu | on_gpu
    assert record.changes(GPU, earlier) == [
        "processes 4 -> 8",
        "machines 1 -> 2",
        "device CPU -> NVIDIA H100 80GB HBM3",
        f"threads per process None -> {torch.get_num_threads()}",
        f"torch 1.0 -> {metadata.version('torch')}",
    ]


def test_every_start_of_a_run_is_recorded(tmp_path, monkeypatch):
    for name in ("git_commit", "script_hash", "timestamp"):
        monkeypatch.setattr(record, name, lambda name=name: f"the {name}")
    monkeypatch.setattr(sys, "argv", ["scripts/train_a.py", "--lr", "1"])
    own = {"arguments": {"lr": 1}}
    written = record.write(tmp_path, CPU, own, 0)
    made = {"topology": record.topology(CPU), "versions": record.versions(), "command": sys.argv}
    made |= {"git_commit": "the git_commit", "script": "the script_hash"}
    assert own == {"arguments": {"lr": 1}} and written == own | made
    record.write(tmp_path, CPU, own, 30)
    start = {"time": "the timestamp"} | record.topology(CPU)
    starts = [{"step": 0} | start, {"step": 30} | start]
    assert json.loads((tmp_path / "args.json").read_text()) == written | {"starts": starts}


def test_a_script_is_known_by_its_content_and_its_commit(tmp_path, monkeypatch):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path / "a", check=True)

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "script.py").write_text("1\n")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "a" / "script.py"), "--x"])
    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert record.script_hash() == hashlib.sha256(b"1\n").hexdigest()
    assert record.git_commit() is None
    git("init", "-q")
    git("add", "script.py")
    git("commit", "-qm", "one")
    git("tag", "-am", "a tag", "v1")  # a name may move; the hash does not
    commit = record.git_commit()
    assert len(commit) == 40 and int(commit, 16)
    (tmp_path / "a" / "script.py").write_text("2\n")
    assert record.git_commit() == f"{commit}-dirty"
    monkeypatch.setattr(sys, "argv", [str(tmp_path)])  # a notebook has no script
    assert record.script_hash() is None


# ----------------------------------------------------------------------------------------- the lock


def me():
    return f"process {os.getpid()} on {socket.gethostname()}"


def refused(folder, match):
    with pytest.raises(UserError, match=match):
        record.claim(folder)


class Locks:
    """Stands for `fcntl.lockf` and the clock: the lock is free after `busy` seconds."""

    def __init__(self, monkeypatch, busy, number=errno.EAGAIN):
        self.now, self.flags, self.busy, self.number = 100.0, [], busy, number
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(record, "time", clock)
        monkeypatch.setattr(record.fcntl, "lockf", self.lockf)

    def sleep(self, seconds):
        self.now += seconds

    def lockf(self, file, flags):
        self.flags.append(flags)
        assert len(self.flags) < 100
        if self.now < 100 + self.busy:
            raise OSError(self.number, os.strerror(self.number))


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
        assert record.claim(tmp_path)[0] == me()
        return
    refused(tmp_path, "is not empty and does not contain a run of these")
    assert {name: (tmp_path / name).read_text() for name in os.listdir(tmp_path)} == files


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    """On a full disk a folder and an empty file can still be made: what is in the lock is synced."""

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a" / "run"
    assert record.claim(path)[0] == me() == (path / ".lock").read_text()
    monkeypatch.setattr(os, "fsync", fsync)
    refused(path, f"^cannot write to --output_dir {path}: No space left on device$")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", r"cannot write to --output_dir .*/file: it is a file")


def test_a_lock_is_waited_for_as_long_as_a_killed_job_may_take_to_end(tmp_path, monkeypatch):
    lock = tmp_path / ".lock"
    for number in (errno.EAGAIN, errno.EACCES):
        lock.write_text("process 7 on a-host-with-a-long-name-of-its-own.example.org\n")
        locks = Locks(monkeypatch, 6.9, number)
        with record.claim(tmp_path)[1]:
            assert lock.read_text() == me()
        assert locks.now == pytest.approx(107) and len(locks.flags) == 36
        assert set(locks.flags) == {record.fcntl.LOCK_EX | record.fcntl.LOCK_NB}
    for owner, named in (("process 7 on a\n", "process 7 on a"), ("", "another process")):
        lock.write_text(owner)
        locks = Locks(monkeypatch, 60)
        refused(tmp_path, f"^{tmp_path} is in use by {named}: wait for it, or use another --output")
        assert lock.read_text() == owner and 107 < locks.now < 107.5


def test_a_file_system_without_locks_is_used_all_the_same(tmp_path, monkeypatch, capsys):
    locks = Locks(monkeypatch, 60, errno.EOPNOTSUPP)
    assert record.claim(tmp_path)[0] == (tmp_path / ".lock").read_text() and locks.now == 100
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

    monkeypatch.setattr(record, "time", SimpleNamespace(sleep=sleep))
    record.check_shared(tmp_path / "run", owner)
    assert seconds == [0.5] * 3 and not stages
    with pytest.raises(UserError, match=f"different folder on {socket.gethostname()} than for me"):
        record.check_shared(tmp_path / "run", "me")
    assert len(seconds) == 3 + manifest.SHARED_CHECKS


def test_a_folder_that_is_taken_away_ends_the_run(tmp_path):
    place = tmp_path.stat()
    record.check_place(tmp_path, place)
    (tmp_path / "another").mkdir()
    for path in (tmp_path / "another", tmp_path / "none"):
        with pytest.raises(RunFailed, match="was removed or renamed") as caught:
            record.check_place(path, place)
        assert not caught.value.retry
