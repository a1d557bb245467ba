"""What `utils.run.record` records of a run, and how it compares two records."""

import errno
import hashlib
import json
import os
import platform
import subprocess
import sys
from datetime import datetime
from importlib import metadata

import torch
from harness import fakes

from utils.run import record

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


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    def version(package):
        if package == "torchvision":
            raise metadata.PackageNotFoundError
        return f"{package} 1"

    monkeypatch.setattr(record.metadata, "version", version)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setitem(sys.modules, "peft", None)  # imported: it can change results
    installed = {name: f"{name} 1" for name in ("torch", "accelerate", "datasets", "peft")}
    installed |= {"python": platform.python_version(), "torchvision": None}
    assert record.versions() == installed


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


def test_the_time_of_a_record_is_utc_in_seconds():
    now = datetime.fromisoformat(record.timestamp())
    assert now.utcoffset().total_seconds() == 0 and now.microsecond == 0


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


def test_the_first_process_to_fail_says_why_also_without_locks(tmp_path, monkeypatch):
    def lockf(file, flags):
        assert (file.name, flags) == (str(tmp_path / ".lock_status"), record.fcntl.LOCK_EX)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(record.fcntl, "lockf", lockf)
    assert record.write_failure(tmp_path, "no run yet", None) is False
    assert record.read_status(tmp_path) == {}
    record.write_status(tmp_path, "running", None, step=3)
    assert record.write_failure(tmp_path, "the loss is nan", "again") is True
    assert record.write_failure(tmp_path, "lost contact", "again") is False
    failed = {"state": "failed", "reason": "the loss is nan", "next": "again"}
    assert record.read_status(tmp_path).items() >= failed.items()
    # There is no checkpoint yet.
    assert record.how_to_continue(tmp_path).startswith("run the same command again: it starts anew")
