"""A checkpoint has the files that its manifest names, and nothing else: it may come from anywhere."""

import builtins
import contextlib
import json
import os
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import fakes
from harness.worlds import World

from utils.run import collectives, manifest

ALONE = SimpleNamespace(num_processes=1, process_index=0, is_local_main_process=True)


@pytest.fixture
def saved(tmp_path):
    """A complete checkpoint with two files, one of them in a folder, as a sharded one has."""
    writing, target = tmp_path / ".writing", tmp_path / "checkpoints" / "step_00000003"
    for name in ("optimizer.bin", "shards/0.distcp"):
        (writing / name).parent.mkdir(parents=True, exist_ok=True)
        (writing / name).write_bytes(b"state")
    target.parent.mkdir()
    record = {"progress": {"step": 3, "score": None}, "arguments": {}}
    record["files"] = manifest.hash_and_sync(ALONE, writing)
    manifest.complete(writing, target, record)
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
    (saved / "shards" / "0.distcp").write_bytes(b"etats")
    for error in world.run(lambda accelerator: manifest.verify(accelerator, saved)):
        assert "shards/0.distcp does not match" in str(error)


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
