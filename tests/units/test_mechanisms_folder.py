"""To be merged into the tests of its modules."""

import argparse
import errno
import fcntl
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from utils.run import (
    checkpoint,
    launcher,
    manifest,
)
from utils.run.claim import claim
from utils.run.failures import UserError
from utils.run.folder import RunFolder
from utils.run.metrics import Metrics
from utils.run.record import moved


def folder_of(path, **arguments):
    args = argparse.Namespace(
        output_dir=str(path), resume="auto", lr=0.1, log_every=1, batch_size=10, **arguments
    )
    main = dict(is_main_process=True, is_local_main_process=True, process_index=0, num_processes=1)
    nothing = dict(_custom_objects=[], _schedulers=[], is_fsdp2=False)
    return RunFolder(
        args, SimpleNamespace(**main, **nothing, device=torch.device("cpu"), mixed_precision="no")
    )


def claimed(run):
    """Claims the folder of a run, as `open` does.

    Returns args.json of the run in the folder, or None.
    """
    run._claim = claim(run.path, run.arguments, run._args.resume, run._may_change)
    return run._claim.earlier


def test_metrics_are_cut_back_to_the_checkpoint_and_never_repeated(tmp_path):
    run = folder_of(tmp_path)
    assert claimed(run) is None
    run.start()
    for step in (1, 2, 3):
        run.metrics.write("train", step, loss=1.0 / step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "st')  # killed while writing
    again = folder_of(tmp_path)
    # The same process: locking again would succeed, and closing the file would release the first
    # lock.
    again._claim = run._claim
    again.progress = {"step": 2}
    again.start()
    again.metrics.write("train", 2, loss=9.0)
    again.metrics.write("train", 3, loss=0.3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, 0.3)]


def test_of_equal_scores_the_lower_loss_then_the_later_one_is_better(tmp_path):
    def saved(step, **progress):
        path = tmp_path / "checkpoints" / f"step_{step:08d}"
        path.mkdir(parents=True)
        manifest_file = {"progress": {"step": step, **progress}, "files": {}}
        (path / "manifest.json").write_text(json.dumps(manifest_file))
        return path

    saved(1, score=0.5, loss=0.1)
    assert manifest.best(manifest.all_in(tmp_path)).name == "step_00000001"
    saved(2, score=0.9, loss=0.4)
    saved(3, score=0.9, loss=0.3)
    saved(4, score=0.9, loss=0.3)
    for step, progress in ((5, dict(score=0.9, loss=0.5)), (6, dict(score=0.9)), (7, {})):
        saved(step, **progress)
    saved(8, score=float("nan"), loss=0.0)
    (tmp_path / "checkpoints" / "step_00000009").mkdir()  # damaged
    assert manifest.best(manifest.all_in(tmp_path)).name == "step_00000004"
    assert manifest.best([tmp_path / "checkpoints" / "step_00000007"]) is None
    assert manifest.best([]) is None


def test_a_run_and_its_checkpoints_agree_which_evaluation_is_the_best(tmp_path):
    """Whether a checkpoint is saved is decided as which one is kept."""
    run = folder_of(tmp_path)
    run.metrics = SimpleNamespace(log=lambda *_: None)
    improved = []
    for step, (score, loss) in enumerate(
        [(0.5, 1.0), (0.5, 1.1), (0.5, 0.9), (0.5, 0.9), (0.4, 0.1), (0.6, 2.0), (0.6, None)], 1
    ):
        run.log("val", step, score=score, loss=loss)
        improved.append(run._best.improved_at(step))
        assert not run._best.improved_at(step + 1)
    assert improved == [True, False, True, True, False, True, False]
    assert manifest.rank(0.5) < manifest.rank(0.5, 3.0) < manifest.rank(0.5, 2.0)
    assert manifest.rank(None) < manifest.rank(-1e9, 1e9) < manifest.rank(0.0)
    run.log("test", 9, loss=0.0)
    assert run._best.improved_at(6) is False and (
        run._best.record(6)["best"],
        run._best.record(6)["best_loss"],
    ) == (0.6, 2.0)


@pytest.mark.parametrize("losses", [True, False])
def test_the_best_survives_a_restart(losses, tmp_path):
    """And equal scores without losses: the later one is better."""
    run = folder_of(tmp_path)
    run.metrics = SimpleNamespace(log=lambda *_: None)
    run.log("val", 3, score=0.5, **({"loss": 0.3} if losses else {}))
    saved = json.loads(json.dumps(run._best.record(3)))
    assert saved["score"] == saved["best"] == 0.5 and saved["loss"] == saved["best_loss"]
    assert run._best.record(4) == saved | {"score": None, "loss": None}
    again = folder_of(tmp_path)
    again.metrics = run.metrics
    again._best.restore(saved, longer=False)
    again.log("val", 7, score=0.5, **({"loss": 0.4} if losses else {}))
    assert again._best.improved_at(7) == (not losses)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_a_warning(number, tmp_path, monkeypatch, capsys):
    def lockf(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    claimed(folder_of(tmp_path))
    assert "has no locks: nothing keeps two jobs from writing" in capsys.readouterr().err


def test_other_arguments_are_each_named(tmp_path):
    run = folder_of(tmp_path, model="a", epochs=1)
    claimed(run)
    run.start()
    with pytest.raises(UserError, match=r"--epochs 2 \(was 1\), --model b \(was a\)"):
        claimed(folder_of(tmp_path, model="b", epochs=2))
    claimed(folder_of(tmp_path, model="a", epochs=1, timeout=3))


def test_a_checkpoint_has_its_name_only_when_all_files_are_synced(tmp_path, monkeypatch):
    """After a power cut, only data that was synced is certain to exist."""
    writing, target, synced = tmp_path / ".writing", tmp_path / "step_00000003", []
    (writing / "shards").mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.bin", "shards/0.distcp"):
        (writing / name).write_bytes(b"weights")
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def rename(source, destination):
        everything = {str(path) for path in writing.rglob("*")} | {str(writing)}
        assert len(everything) == 6 and everything <= set(synced) and synced[-1] == str(writing)
        synced.clear()
        real_rename(source, destination)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    alone = SimpleNamespace(
        num_processes=1, process_index=0, is_main_process=True, is_local_main_process=True
    )
    assert checkpoint.finish(alone, writing, None, {"progress": {"step": 3}}, keep=2)
    assert synced == [str(tmp_path)]
    assert manifest.verify(target)["files"].keys() == {
        "model.safetensors",
        "optimizer.bin",
        "shards/0.distcp",
    }


def test_the_metrics_before_a_checkpoint_are_synced_with_it(tmp_path, monkeypatch):
    """A run that continues from a checkpoint does not write the lines before it again."""
    run, synced = folder_of(tmp_path, keep_checkpoints=2, wait_for_checkpoints=True), []
    claimed(run)
    run.start()
    run.metrics.write("train", 1, loss=0.5)
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    with run.checkpoint(1) as folder:
        assert synced == [str(tmp_path / "metrics.jsonl")]
        (Path(folder) / "model.safetensors").write_bytes(b"weights")
    assert manifest.verify(tmp_path / "checkpoints" / "step_00000001")["progress"]["step"] == 1


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path):
    scores = {10: 0.5, 20: 0.9, 30: None, 40: 0.7, 50: None}
    for step, score in scores.items():
        folder = tmp_path / f"step_{step:08d}"
        folder.mkdir()
        (folder / manifest.MANIFEST).write_text(
            json.dumps({"progress": {"step": step, "score": score}})
        )
    checkpoint._prune(tmp_path, 2, tmp_path / "step_00000050")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_00000020",
        "step_00000040",
        "step_00000050",
    ]


def test_a_moved_project_continues(tmp_path):
    assert moved("/no/such/place/cifar10", str(tmp_path / "cifar10"))
    assert not moved("/no/such/place/cifar10", str(tmp_path / "cifar100"))
    # Both exist, so the data was not moved.
    assert not moved(str(tmp_path), f"/elsewhere/{tmp_path.name}")
    assert not moved("uoft-cs/cifar10", str(tmp_path / "cifar10"))


def test_a_save_longer_than_the_grace_period_is_said_at_the_next_start(
    tmp_path, monkeypatch, capsys
):
    """Torchelastic kills its processes 30 s after SIGTERM, unless told otherwise."""
    for elastic, grace, says in ((False, None, ""), (True, "89", "45 s"), (True, "90", "")):
        monkeypatch.setattr(launcher, "is_elastic", lambda elastic=elastic: elastic)
        monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
        if grace:
            monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", grace)
        run = folder_of(tmp_path)
        line = {"split": "checkpoint", "step": 3, "seconds": 45.0, "written": True}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        run.metrics = Metrics(tmp_path, run._accelerator, None, 10, {}, 3)
        run._warn_of_short_grace()
        printed = capsys.readouterr().out
        assert says in printed and ("export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=135" in printed) == bool(
            says
        )


@pytest.mark.parametrize("flag", ["dry_run", "overfit_batch"])
def test_only_a_quick_check_empties_the_folder_that_a_quick_check_left(flag, tmp_path):
    run = folder_of(tmp_path, **{flag: True})
    claimed(run)
    run.start()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError, match=f"--{flag} False"):
        claimed(folder_of(tmp_path, **{flag: False}))
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "args.json").exists()
    assert claimed(folder_of(tmp_path, **{flag: True})) is None
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
