"""A checkpoint has the files that its manifest names, and nothing else: it may come from anywhere."""

import builtins
import contextlib
import json
import os
import socket
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import fakes
from harness.worlds import World

from utils.run import checkpoint, collectives, manifest
from utils.run.failures import UserError

ALONE = SimpleNamespace(num_processes=1, process_index=0, is_local_main_process=True)


@pytest.fixture
def saved(tmp_path):
    """A complete checkpoint with two files, one of them in a folder, as a sharded one has."""
    for step in (1, 3):
        writing = tmp_path / "checkpoints" / ".writing"
        (writing / "shards").mkdir(parents=True)
        (writing / "shards" / "0.distcp").write_bytes(b"shard")
        (writing / "optimizer.bin").write_bytes(b"state of it")
        described = manifest.hash_and_sync(ALONE, writing)
        target = writing.with_name(f"step_{step:08d}")
        record = {"progress": {"step": step, "score": None, "best": None}, "arguments": {}}
        manifest.complete(writing, target, {**record, "files": described})
        assert manifest.verify(fakes.accelerator(), target)["progress"]["step"] == step
    return target


def test_people_can_read_a_manifest(saved):
    text = (saved / "manifest.json").read_text()
    assert text.count("\n") > 10 and json.dumps(json.loads(text), indent=2) == text
    in_order = json.dumps(json.loads(text), sort_keys=True)  # which does not matter
    (saved / "manifest.json").write_text(in_order)
    assert manifest.verify(fakes.accelerator(), saved)


def test_new_files_have_the_usual_permissions(tmp_path):
    """torch and safetensors may write them for the owner only."""
    (tmp_path / "file").write_bytes(b"")
    os.chmod(tmp_path / "file", 0o600)
    before = os.umask(0o027)
    try:
        manifest.hash_and_sync(ALONE, tmp_path)
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def alter(path):
    """A change that leaves a valid manifest, of another run."""
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))


def replace_by_link(path):
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


def add_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (truncate, "optimizer.bin", "optimizer.bin does not match its checksum"),
        (flip, "shards/0.distcp", "shards/0.distcp does not match its checksum"),
        (os.remove, "shards/0.distcp", "shards/0.distcp is missing"),
        (alter, "manifest.json", "manifest.json was changed"),
        (os.remove, "manifest.json", "manifest.json is missing or unreadable"),
        (lambda path: path.write_text("{"), "manifest.json", "is missing or unreadable"),
        (lambda path: path.write_text("[" * 100_000), "manifest.json", "missing or unreadable"),
        (lambda path: path.write_bytes(b""), "other.bin", "other.bin is not in its manifest"),
        (replace_by_link, "shards", "shards is neither a file nor a folder"),
        (replace_by_link, "shards/0.distcp", "0.distcp is neither"),
        (lambda path: path.symlink_to("nowhere"), "dangling", "dangling is neither"),
        (os.mkfifo, "pipe", "pipe is neither"),
        (add_socket, "socket", "socket is neither"),
    ],
)
def test_a_checkpoint_has_only_the_files_that_were_saved(change, name, says, saved, capsys):
    """Anything else is found before it is loaded; the checkpoint before it is used."""
    change(saved / name)
    with pytest.raises(UserError, match=says):
        manifest.verify(fakes.accelerator(), saved)
    assert checkpoint.find(fakes.accelerator(), saved.parents[1], "auto")[0].name == "step_00000001"
    warning = capsys.readouterr().err
    assert warning.count("warning: ") == 1 and "; trying the one before it" in warning


def test_each_process_hashes_its_share_and_all_of_them_refuse_what_one_finds(saved, monkeypatch):
    hashed, file_digest = {0: [], 1: []}, manifest.hashlib.file_digest

    def follow(file, algorithm):
        hashed[world.rank()].append(Path(file.name).name)
        return file_digest(file, algorithm)

    world = World(2)
    monkeypatch.setattr(collectives, "dist", world)
    monkeypatch.setattr(manifest.hashlib, "file_digest", follow)
    # In threads of their own, no rank is known.
    monkeypatch.setattr(manifest, "ThreadPoolExecutor", lambda _: contextlib.nullcontext(builtins))
    one, other = world.run(lambda accelerator: manifest.verify(accelerator, saved))
    assert one == other and hashed == {0: ["optimizer.bin"], 1: ["0.distcp"]}
    (saved / "shards" / "0.distcp").write_bytes(b"drahs")
    for error in world.run(lambda accelerator: manifest.verify(accelerator, saved)):
        assert "shards/0.distcp does not match" in str(error)


@pytest.mark.parametrize(
    "value",
    [
        [],
        "text",
        {"progress": [], "files": {}},
        {"progress": {"step": "3"}, "files": {}},
        {"progress": {"step": True}, "files": {}},
        {"progress": {"step": 3, "score": "high"}, "files": {}},
        {"progress": {"step": 3}, "files": []},
        {"progress": {"step": 3}, "files": {"a": 5}},
        {"progress": {"step": 3}, "files": {"a": {"size": 5}}},
        {"progress": {"step": 3}, "files": {}, "arguments": []},
    ],
)
def test_a_manifest_of_other_types_is_not_a_manifest(value, saved):
    (saved / "manifest.json").write_text(json.dumps(value))
    assert manifest.read(saved) is None and manifest.best([saved]) is None
    with pytest.raises(UserError, match="is not a checkpoint"):
        manifest.verify(fakes.accelerator(), saved)


def test_a_file_that_another_machine_sees_late_is_waited_for(tmp_path, monkeypatch):
    """As over NFS."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    slept, views = [], iter([{}, {}, {"model.safetensors": 7}, {}])  # the last: what it hashed
    monkeypatch.setattr(manifest, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(manifest, "gather", lambda _, value, group: [value, next(views)])
    one_of_two = SimpleNamespace(num_processes=2, process_index=0, is_local_main_process=True)
    described = manifest.hash_and_sync(one_of_two, tmp_path)
    assert described == {"model.safetensors": {"size": 7, "sha256": sha256(b"weights").hexdigest()}}
    assert slept == [0.5, 0.5]
