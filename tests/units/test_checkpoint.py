"""Checkpoints without a training run: what is written, found, loaded and deleted, on several processes."""

# ruff: noqa: F811 (fixtures of other files)
import errno
import io
import os
import pickle
import random
import shutil
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from test_collectives import world  # noqa: F401 (a fixture)
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from utils.run import checkpoint, manifest
from utils.run.failures import UserError

ALONE = SimpleNamespace(
    num_processes=1, process_index=0, is_main_process=True, is_local_main_process=True
)


def saved(folder, step, keep=9, value=1.0, **progress):
    """Saves a checkpoint with one tensor, as a script does."""
    writing, error = checkpoint.start(ALONE, folder)
    assert error is None and os.listdir(writing) == []
    save_file({"weight": torch.tensor([0.0, value])}, writing / "model.safetensors")
    record = {"progress": {"step": step, **progress}}
    assert checkpoint.finish(ALONE, writing, None, record, keep)
    return folder / "checkpoints" / f"step_{step:08d}"


def steps_in(folder):
    return [int(path.name.removeprefix("step_")) for path in manifest.all_in(folder)]


# ------------------------------------------------------------------------------------------- saving


def test_what_an_earlier_save_left_is_removed_first(tmp_path):
    writing, error = checkpoint.start(ALONE, tmp_path)
    assert writing == tmp_path / "checkpoints" / ".writing" and error is None
    (writing / "half").write_text("of a file")
    writing, error = checkpoint.start(ALONE, str(tmp_path))
    assert error is None and os.listdir(writing) == []


def test_only_the_main_process_knows_that_a_folder_could_not_be_made(world, tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    results = world(2).run(lambda accelerator: checkpoint.start(accelerator, tmp_path))
    assert isinstance(results[0][1], OSError) and results[1][1] is None
    assert results[0][0] == results[1][0] == tmp_path / "checkpoints" / ".writing"


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, score in ((1, 0.3), (2, 0.9), (3, 0.5), (4, None), (5, 0.9)):
        saved(tmp_path, step, keep=2, score=score, loss=0.1 * step)
    assert steps_in(tmp_path) == [2, 4, 5]  # of the two best ones, that with the lower loss
    saved(tmp_path, 6, keep=1)
    assert steps_in(tmp_path) == [2, 6]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_checkpoints_after_the_one_continued_from_are_deleted(tmp_path):
    """They are damaged, whatever their scores, and would be taken for newer ones."""
    for step in (1, 2, 3, 4):
        saved(tmp_path, step, score=0.1 * step)
    saved(tmp_path, 3, score=0.2)  # again, in place of the damaged one
    assert steps_in(tmp_path) == [1, 2, 3]
    assert manifest.read(tmp_path / "checkpoints" / "step_00000003")["progress"]["score"] == 0.2


def test_an_old_checkpoint_that_cannot_be_deleted_costs_nothing(tmp_path, monkeypatch, capsys):
    saved(tmp_path, 1)
    trash = tmp_path / "checkpoints" / ".deleting_step_00000001"
    with monkeypatch.context() as patch:
        real = shutil.rmtree

        def rmtree(path, ignore_errors=False):
            if path == trash and trash.exists():
                if not ignore_errors:
                    raise OSError(errno.EBUSY, "Device or resource busy")
            else:
                real(path, ignore_errors=ignore_errors)

        patch.setattr(shutil, "rmtree", rmtree)
        saved(tmp_path, 2, keep=1)
    assert steps_in(tmp_path) == [2] and trash.exists()
    line = "warning: the old checkpoint step_00000001 was not deleted (Device or resource busy)"
    assert capsys.readouterr().err == f"{line}; the next save tries again\n"
    saved(tmp_path, 3, keep=1)
    assert steps_in(tmp_path) == [3] and not trash.exists()


@pytest.mark.parametrize("failing", [0, 1])
def test_one_process_that_cannot_write_costs_the_checkpoint_on_all(
    failing, world, tmp_path, capsys
):
    writing = tmp_path / "checkpoints" / ".writing"
    writing.mkdir(parents=True)
    (writing / "model.safetensors").write_bytes(b"half")

    def finish(accelerator):
        error = OSError("no room\nat all") if accelerator.process_index == failing else None
        return checkpoint.finish(accelerator, writing, error, {"progress": {"step": 7}}, 2)

    assert world(2).run(finish) == [False, False]
    line = "warning: checkpoint of step 7 not written, training continues: no room\n"
    assert capsys.readouterr().err == line and not writing.exists() and steps_in(tmp_path) == []


def test_processes_share_the_hashing_and_agree(world, tmp_path, monkeypatch):
    writing = tmp_path / "checkpoints" / ".writing"
    writing.mkdir(parents=True)
    sizes = {"a": 70, "b": 40, "c": 30, "d": 5, "e": 5}
    for name, size in sizes.items():
        (writing / name).write_bytes(os.urandom(size))
    hashed, real = {}, manifest._sha256

    def sha256(path):
        hashed.setdefault(path.name, []).append(path.stat().st_size)
        return real(path)

    monkeypatch.setattr(manifest, "_sha256", sha256)
    described = world(2).run(lambda accelerator: manifest.hash_and_sync(accelerator, writing))
    assert described[0] == described[1] and described[0].keys() == sizes.keys()
    assert {name: found["size"] for name, found in described[0].items()} == sizes
    assert all(len(times) == 1 for times in hashed.values())  # by one process each

    def finish(accelerator):
        return checkpoint.finish(accelerator, writing, None, {"progress": {"step": 3}}, 2)

    assert world(2).run(finish) == [True, True] and steps_in(tmp_path) == [3]
    assert manifest.verify(tmp_path / "checkpoints" / "step_00000003")["progress"] == {"step": 3}


def test_a_file_that_cannot_be_hashed_is_an_error_on_all(world, tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"weights")

    def fails(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(manifest, "_sha256", fails)
    errors = world(2).run(lambda accelerator: manifest.hash_and_sync(accelerator, tmp_path))
    assert [error.errno for error in errors] == [errno.EIO] * 2


def test_folders_that_differ_are_compared_again_and_then_refused(world, tmp_path, monkeypatch):
    views, slept = {}, []
    monkeypatch.setattr(manifest.time, "sleep", slept.append)
    monkeypatch.setattr(manifest, "SHARED_CHECKS", 3)
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "model").write_bytes(b"x" * (rank + 1))

    def compare(accelerator):
        views[accelerator.process_index] = True
        return manifest.hash_and_sync(accelerator, tmp_path / str(accelerator.process_index))

    errors = world(2).run(compare)
    assert all(isinstance(error, UserError) for error in errors) and slept == [0.5] * 6
    assert "rank 0 and rank 1 do not see the same model" in str(errors[0])


@pytest.mark.parametrize(
    ("error", "is_write_error"),
    [
        (OSError("no room"), True),
        (SafetensorError("no room"), True),
        (
            RuntimeError("[enforce fail at inline_container.cc:862] . PytorchStreamWriter failed"),
            True,
        ),
        (RuntimeError("shapes differ"), False),
        (TimeoutError("a process is lost"), False),
        (ConnectionError("a process is lost"), False),
        (BrokenPipeError("a process is lost"), False),
        (CheckpointException("x", {0: (OSError("no room"), None)}), True),
        (
            CheckpointException("x", {0: (OSError("no room"), None), 1: (ValueError("x"), None)}),
            False,
        ),
    ],
)
def test_only_a_failed_write_lets_training_go_on(error, is_write_error):
    assert checkpoint.is_write_error(error) == is_write_error


def test_a_failure_of_every_process_says_why(monkeypatch):
    monkeypatch.setattr(checkpoint, "gather", lambda accelerator, line, group: [None, line])
    error = CheckpointException("save", {1: (OSError(28, "No space left on device"), None)})
    says = "[Errno 28] No space left on device"
    assert checkpoint._first_problem(None, error, None) == says
    assert checkpoint._first_problem(None, None, None) is None


# ---------------------------------------------------------------------------------- finding, loading


def test_the_newest_undamaged_checkpoint_is_found(tmp_path, capsys):
    assert checkpoint.find(tmp_path, "auto") is None
    paths = [saved(tmp_path, step) for step in (1, 2, 3)]
    assert checkpoint.find(tmp_path, "never") is None
    path, found = checkpoint.find(tmp_path, "auto")
    assert path == paths[2] and found["progress"] == {"step": 3}
    (paths[2] / "model.safetensors").write_bytes(b"damaged")
    assert checkpoint.find(tmp_path, "auto")[0] == paths[1]
    assert capsys.readouterr().err.endswith("; trying the one before it\n")
    for path in paths[:2]:
        (path / "manifest.json").unlink()
    with pytest.raises(UserError, match=f"all checkpoints in {tmp_path}/checkpoints are damaged"):
        checkpoint.find(tmp_path, "auto")


def test_a_checkpoint_of_another_run_counts_until_there_is_an_own_one(tmp_path):
    theirs = saved(tmp_path / "theirs", 5)
    assert checkpoint.find(tmp_path / "own", str(theirs))[0] == theirs
    own = saved(tmp_path / "own", 6)
    assert checkpoint.find(tmp_path / "own", str(theirs))[0] == own
    with pytest.raises(UserError, match="belongs to this run"):
        checkpoint.find(tmp_path / "own", str(own))
    (theirs / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.find(tmp_path / "new", str(theirs))
    assert checkpoint.is_own(own, tmp_path / "own")
    assert not checkpoint.is_own(theirs, tmp_path / "own")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    assert checkpoint.is_own(tmp_path / "link" / "checkpoints" / own.name, tmp_path / "own")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_continued(bad, tmp_path, capsys):
    good = saved(tmp_path, 1)
    saved(tmp_path, 2, value=bad)
    assert checkpoint.find(tmp_path, "auto")[0] == good
    assert "weight in model.safetensors is not finite" in capsys.readouterr().err


def loading(monkeypatch, load_state, rank=0):
    accelerator = SimpleNamespace(**vars(ALONE) | {"process_index": rank}, step=7, scaler=None)
    accelerator.load_state = load_state
    return accelerator


def test_a_checkpoint_without_a_scale_is_loaded_in_fp16(tmp_path, monkeypatch):
    """The scaler itself is kept, and gets the scale of a checkpoint that has one."""
    seen = []
    accelerator = loading(monkeypatch, lambda *_, **__: seen.append(accelerator.scaler))
    accelerator.scaler = scaler = object()
    checkpoint.load(accelerator, tmp_path)
    (tmp_path / "scaler.pt").touch()
    checkpoint.load(accelerator, tmp_path)
    assert seen == [None, scaler] and accelerator.scaler is scaler


def test_loading_counts_micro_batches_anew_and_names_what_does_not_fit(tmp_path, monkeypatch):
    seen = []
    accelerator = loading(monkeypatch, lambda *args, **kwargs: seen.append((args, kwargs)))
    checkpoint.load(accelerator, tmp_path)
    assert seen == [((str(tmp_path),), {"map_location": "cpu"})] and accelerator.step == 0

    def misfit(*_, **__):
        raise RuntimeError("Error(s) in loading:\n\tsize mismatch for a\n\tsize mismatch for b")

    with pytest.raises(UserError) as error:
        checkpoint.load(loading(monkeypatch, misfit), tmp_path)
    assert str(error.value).startswith(f"checkpoint {tmp_path} does not fit this run: Error(s) in")
    assert "size mismatch for a. If the script" in str(error.value)
    assert "for b" not in str(error.value)

    def code(*_, **__):
        raise pickle.UnpicklingError("Unsupported global: posix.system\nmore")

    with pytest.raises(UserError, match=r"execute code \(Unsupported global: posix.system\)$"):
        checkpoint.load(loading(monkeypatch, code), tmp_path)


def states():
    """The random states as Accelerate saves them."""
    return {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }


@pytest.mark.parametrize("other", [None, "random", "numpy", "numpy position", "torch"])
def test_random_states_that_were_not_restored_are_an_error(other, tmp_path, monkeypatch):
    """Accelerate only logs it, and the resumed run would differ."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    kept = states()
    monkeypatch.setattr(checkpoint, "load_plain", lambda path: kept)
    (tmp_path / "random_states_2.pkl").write_bytes(b"")
    if other == "random":
        random.random()
    elif other == "numpy":
        np.random.seed(2)
    elif other == "numpy position":
        np.random.random()
    elif other == "torch":
        torch.manual_seed(2)
    accelerator = loading(monkeypatch, lambda *_, **__: None, rank=2)
    if other:
        with pytest.raises(UserError, match=r"its random states, random_states_2\.pkl, could not"):
            checkpoint.load(accelerator, tmp_path)
    else:
        checkpoint.load(accelerator, tmp_path)
        # A process that the run did not have before has no states.
        (tmp_path / "random_states_2.pkl").unlink()
        kept.clear()
        checkpoint.load(accelerator, tmp_path)


def test_the_learning_rate_follows_the_length_of_the_run():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [dict(params=[weights[0]], lr=1.0), dict(params=[weights[1]], lr=0.5)]
    optimizer = torch.optim.SGD(groups)
    length = SimpleNamespace(steps=10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / length.steps)
    for _ in range(5):
        optimizer.step()
        schedule.step()
    prepared = SimpleNamespace(scheduler=schedule, get_last_lr=schedule.get_last_lr)
    alone = SimpleNamespace(_schedulers=[prepared])
    assert checkpoint.apply_schedule(alone, prepared, 5) == "the learning rate at step 5 stays 0.5"
    length.steps = 20
    change = "the learning rate at step 5 changes from 0.5 to 0.75"
    assert checkpoint.apply_schedule(alone, prepared, 5) == change
    assert [group["lr"] for group in optimizer.param_groups] == [0.75, 0.375]
    assert schedule.get_last_lr() == [0.75, 0.375]
    assert "continues as it was saved" in checkpoint.apply_schedule(alone, None, 5)
    alone._schedulers = []
    assert "does not depend" in checkpoint.apply_schedule(alone, None, 5)


class Registered:
    """What a script registers for checkpointing."""

    def __init__(self, **state):
        self.state_dict = lambda: state


def test_what_no_checkpoint_could_give_back_is_refused_at_the_start():
    accelerator = SimpleNamespace()
    weights = nn.Linear(2, 2).state_dict()
    plain = [1, 2.0, "a", b"b", None, True, torch.ones(2), (weights, [torch.float32]), {1}]
    plain.append(Counter("a"))
    accelerator._custom_objects = [Registered(values=plain, size=torch.Size([1]))]
    checkpoint.check_objects(accelerator)
    values = [np.zeros(3), np.float64(1), deque([1]), Path("a"), [{"a": (np.ones(1),)}]]
    names = ["ndarray", "float64", "deque", type(Path("a")).__name__, "ndarray"]
    for value, name in zip(values, names, strict=True):
        accelerator._custom_objects[1:] = [Registered(value=value)]
        with pytest.raises(
            UserError, match=f"the registered Registered has a {name}, and no checkpoint"
        ):
            checkpoint.check_objects(accelerator)
        with pytest.raises(pickle.UnpicklingError):  # or it would be wrong to refuse it
            file = io.BytesIO()
            torch.save(value, file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_only_a_prepared_lambda_schedule_is_recomputed():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    accelerator = SimpleNamespace(_custom_objects=[])
    of_lambda = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    checkpoint.check_objects(accelerator, SimpleNamespace(scheduler=of_lambda))
    by_steps = SimpleNamespace(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    for scheduler, name in ((by_steps, "StepLR"), (of_lambda, "LambdaLR")):
        with pytest.raises(UserError, match=f"a prepared LambdaLR, and was given a {name}: leave"):
            checkpoint.check_objects(accelerator, scheduler)
