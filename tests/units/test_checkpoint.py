"""Checkpoints without a training run: what is written, found, loaded and deleted, and by whom.

That only what was written is accepted is in tests/properties/test_manifest_properties.py.
"""

import errno
import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import fakes
from harness.worlds import World
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from utils.run import checkpoint, collectives, manifest
from utils.run.failures import UserError

ALONE = fakes.accelerator()
NO_ROOM = OSError(errno.ENOSPC, "No space left\nat all")


@pytest.fixture
def world(monkeypatch):
    """Two processes: threads, each with an accelerator of its own."""
    made = World(2)
    monkeypatch.setattr(collectives, "dist", made)
    return made


def write(folder, *names):
    """What a script does between the start and the end of a save."""
    writing = folder / "checkpoints" / ".writing"
    for name in names or ["state"]:
        (writing / name).parent.mkdir(parents=True, exist_ok=True)
        (writing / name).write_bytes(b"state")
    return writing


def saved(folder, step):
    assert checkpoint.finish(ALONE, write(folder), None, {"progress": {"step": step}})
    return folder / "checkpoints" / f"step_{step:08d}"


# ------------------------------------------------------------------------------------------- saving


def test_all_processes_write_to_one_folder_or_none_has_a_checkpoint(world, tmp_path, capsys):
    def start(here):
        return checkpoint.start(here, str(tmp_path))

    writing = tmp_path / "checkpoints" / ".writing"
    for _ in range(2):
        assert world.run(start) == [(writing, None)] * 2 and os.listdir(writing) == []
        write(tmp_path, "half")  # left by an earlier save
    of_shards = CheckpointException("save", {1: (NO_ROOM, None)})

    def finish(accelerator):
        error = of_shards if accelerator.process_index == 1 else None
        return checkpoint.finish(accelerator, writing, error, {"progress": {"step": 7}})

    assert world.run(finish) == [False, False] and os.listdir(writing.parent) == []
    line = "warning: checkpoint of step 7 not written, training continues: [Errno 28] No space left"
    assert capsys.readouterr().err == f"{line}\n"
    writing.parent.rmdir()
    writing.parent.write_text("a file")
    for place, error in world.run(start):
        assert isinstance(error, OSError) and place == writing


def test_an_old_checkpoint_that_cannot_be_deleted_costs_nothing(tmp_path, monkeypatch, capsys):
    def busy(path):
        raise OSError(errno.EBUSY, "Device or resource busy")

    old, newer = saved(tmp_path, 1), saved(tmp_path, 2)
    trash = old.with_name(f".deleting_{old.name}")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        checkpoint.prune(newer, 1)
    assert manifest.all_in(tmp_path) == [newer] and trash.exists()
    line = "warning: old checkpoints were not deleted (Device or resource busy)"
    assert capsys.readouterr().err == f"{line}; the next save tries again\n"
    shutil.copytree(trash, old)  # it is saved, and deleted, once more
    checkpoint.prune(saved(tmp_path, 3), 1)
    assert [path.name for path in old.parent.iterdir()] == ["step_00000003"]


def test_a_checkpoint_has_its_name_only_when_all_files_are_synced(tmp_path, monkeypatch):
    """After a power cut, only data that was synced is certain to exist."""
    names = ["model.safetensors", "optimizer.bin", "shards/0.distcp"]
    writing, done, groups, rename = write(tmp_path, *names), [], [], os.rename
    os.chmod(writing / "optimizer.bin", 0o600)  # torch may write it for its owner only

    def fsync(descriptor):
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), writing))

    def gather(_, value, group=None):
        groups.append(group)
        return [value]

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", lambda *paths: done.append("rename") or rename(*paths))
    for module in (checkpoint, manifest):
        monkeypatch.setattr(module, "gather", gather)
    record = {"progress": {"step": 3}}
    assert checkpoint.finish(ALONE, writing, None, record, "of the thread")
    assert groups == ["of the thread"] * 4
    before, last = done[: done.index("rename")], done.index("manifest.json")
    # The last one names the folder of checkpoints; the manifest names what is on disk.
    assert {*names, "shards", ".", "../.."} <= set(before) and set(names) <= set(done[:last])
    assert "." in before[last:] and done[len(before) :] == ["rename", ".."]
    file = tmp_path / "checkpoints" / "step_00000003" / "manifest.json"
    assert manifest.verify(ALONE, file.parent)["files"].keys() == set(names)
    assert file.with_name("optimizer.bin").stat().st_mode == file.stat().st_mode
    # People can read it.
    assert file.read_text() == json.dumps(json.loads(file.read_text()), indent=2)


def test_the_folders_of_all_machines_are_compared_until_they_are_the_same(
    world, tmp_path, monkeypatch
):
    """Over NFS a file shows late. What one process cannot read is an error on all."""
    folders = [write(tmp_path / "0", "a"), write(tmp_path / "1", "a", "model")]
    slept, late = [], []

    def sleep(seconds):
        slept.append(seconds)
        if late:
            write(tmp_path / "0", *late)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    def hashed():
        return world.run(lambda here: manifest.hash_and_sync(here, folders[here.process_index]))

    monkeypatch.setattr(manifest, "time", SimpleNamespace(sleep=sleep))
    for error in hashed():
        assert isinstance(error, UserError)
        assert "rank 0 and rank 1 do not see the same model" in str(error)
    assert slept == [0.5] * 2 * manifest.SHARED_CHECKS
    late.append("model")
    described = {"size": 5, "sha256": hashlib.sha256(b"state").hexdigest()}
    assert hashed() == [dict.fromkeys(["a", "model"], described)] * 2
    monkeypatch.setattr(hashlib, "file_digest", fail)
    assert [error.errno for error in hashed()] == [errno.EIO] * 2


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (NO_ROOM, True),
        (SafetensorError("no room"), True),
        (RuntimeError("[enforce fail at inline_container.cc:862] . PytorchStreamWriter f"), True),
        (CheckpointException("x", {0: (NO_ROOM, None)}), True),
        (CheckpointException("x", {0: (NO_ROOM, None), 1: (ValueError("x"), None)}), False),
        (RuntimeError("shapes differ"), False),
        (TimeoutError("lost"), False),
    ],
)
def test_only_a_failed_write_lets_training_go_on(error, goes_on):
    assert checkpoint.is_write_error(error) == goes_on


# ---------------------------------------------------------------------------------- finding, loading


def test_the_newest_undamaged_checkpoint_is_found(tmp_path, capsys):
    """One of another run counts until there is an own one."""
    theirs, folder = saved(tmp_path / "theirs", 5), tmp_path / "own"

    def find(resume="auto"):
        return checkpoint.find(ALONE, folder, str(resume))

    assert find() is None and find(theirs)[0] == theirs
    first, second = saved(folder, 1), saved(folder, 2)
    assert find("never") is None and find(theirs) == find()
    assert find()[0] == second and find()[1]["progress"] == {"step": 2}
    (tmp_path / "link").symlink_to(folder)
    for path in (first, tmp_path / "link" / "checkpoints" / second.name):
        with pytest.raises(UserError, match="belongs to this run"):
            find(path)
    (second / "state").write_bytes(b"damaged")
    assert find()[0] == first
    assert capsys.readouterr().err.endswith("; trying the one before it\n")
    (first / "manifest.json").unlink()
    with pytest.raises(UserError, match=f"all checkpoints in {folder}/checkpoints are damaged"):
        find()


def loading(load_state, **more):
    return fakes.accelerator(step=7, load_state=load_state, **more)


def test_a_checkpoint_without_a_scale_is_loaded_in_fp16(tmp_path, monkeypatch):
    """The scaler itself is kept, and gets the scale of a checkpoint that has one. Meanwhile
    `torch.load` builds nothing but plain values, whatever its caller asks for.
    """
    seen, scaler = [], object()
    torch.save(Path("a"), tmp_path / "a")

    def load_state(path, map_location):
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "a", weights_only=False)
        seen.append((path, map_location, accelerator.scaler))

    accelerator = loading(load_state, scaler=scaler)
    for before in ("0", None):
        if before:
            monkeypatch.setenv(checkpoint.FORCE, before)
        else:
            monkeypatch.delenv(checkpoint.FORCE)
            (tmp_path / "scaler.pt").touch()
        checkpoint.load(accelerator, tmp_path)
        assert os.environ.get(checkpoint.FORCE) == before
    assert seen == [(str(tmp_path), "cpu", None), (str(tmp_path), "cpu", scaler)]
    assert accelerator.scaler is scaler and accelerator.step == 0  # micro-batches count anew


def trained(rates, decay, steps):
    """An optimizer of two groups and its schedule, after so many steps."""
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(2)
        optimizer.step()
        schedule.step()
    return optimizer, schedule


@pytest.mark.parametrize("keep", [True, False])
def test_a_fork_keeps_its_rates_and_gets_the_state_of_the_optimizer(keep, tmp_path):
    theirs, (optimizer, schedule) = trained((0.1, 0.2), 0.5, 3), trained((1.0, 4.0), 0.25, 0)

    def load_state(path, map_location):
        optimizer.load_state_dict(theirs[0].state_dict())
        schedule.load_state_dict(theirs[1].state_dict())

    more = dict(optimizers=[optimizer], schedulers=[SimpleNamespace(scheduler=schedule)])
    checkpoint.load(loading(load_state, **more), tmp_path, keep)
    groups = optimizer.param_groups
    facts = [(group["initial_lr"], group["weight_decay"]) for group in groups]
    assert facts == ([(1.0, 0.25), (4.0, 0.25)] if keep else [(0.1, 0.5), (0.2, 0.5)])
    assert schedule.base_lrs == [rate for rate, _ in facts] and schedule.last_epoch == 3
    assert [group["lr"] for group in groups] == ([1.0, 4.0] if keep else [0.1 / 8, 0.2 / 8])
    assert len(optimizer.state_dict()["state"]) == 2  # the momentum


def test_random_states_that_were_not_restored_are_an_error(tmp_path):
    """Accelerate only logs it, and the resumed run would differ."""
    states = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    file, accelerator = tmp_path / "random_states_2.pkl", loading(lambda *_, **__: None, rank=2)
    torch.save(states, file)
    checkpoint.load(accelerator, tmp_path)
    for draw in (random.random, np.random.random, lambda: torch.rand(1)):
        draw()
        with pytest.raises(UserError, match=r"its random states, random_states_2\.pkl, could not"):
            checkpoint.load(accelerator, tmp_path)
        random.setstate(states["random_state"])
        np.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"])
    torch.rand(1)
    file.unlink()  # as of a process that the run did not have
    checkpoint.load(accelerator, tmp_path)


class Registered:
    """What a script registers for checkpointing."""

    def __init__(self, **state):
        self.state_dict = lambda: state


def test_what_no_checkpoint_could_give_back_is_refused_at_the_start(monkeypatch):
    """Tensors of any size are not written for this."""
    written, real_save = [], torch.save
    monkeypatch.setattr(
        torch, "save", lambda state, file: real_save(state, file) or written.append(file.tell())
    )
    weights = nn.Linear(1000, 1000).state_dict()
    plain = [1, 2.0, "a", b"b", None, True, torch.ones(2), (weights, [torch.float32]), {1}]
    fine = Registered(values=[*plain, Counter("a")], size=torch.Size([1]))
    checkpoint.check_objects(fakes.accelerator(registered=[fine]))
    assert written[0] < 10**4
    values = [np.zeros(3), np.float64(1), deque([1]), Path("a"), [{"a": (np.ones(1),)}], lambda: 1]
    for value in values:
        accelerator = fakes.accelerator(registered=[fine, Registered(value=value)])
        says = "^no checkpoint with the state of the registered Registered could be loaded: use ten"
        with pytest.raises(UserError, match=says) as error:
            checkpoint.check_objects(accelerator)
        name = str(error.value).rpartition("(")[2]  # what is refused, not where in PyTorch
        assert re.search("numpy|deque|Path|lambda", name), name
