"""Unit tests of `utils`: augmentation, data, run folders, checks of a launch."""

import argparse
import contextlib
import errno
import fcntl
import gc
import json
import os
import platform
import resource
import subprocess
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from harness.launches import ROOT
from safetensors.torch import save_file

from utils.data import loaders
from utils.data.arrays import synthetic_arrays
from utils.data.augment import augment, normalize, random_uint32
from utils.run import (
    checkpoint,
    collectives,
    cpu,
    ddp,
    failures,
    fsdp,
    guard,
    launch,
    launcher,
    manifest,
    metrics,
    process,
    record,
    weights,
)
from utils.run.arguments import Parser, number
from utils.run.claim import claim
from utils.run.failures import UserError
from utils.run.folder import RunFolder
from utils.run.metrics import Metrics
from utils.run.record import moved


@pytest.fixture(scope="module")
def data():
    return synthetic_arrays(0).splits


def test_augmentation_depends_on_the_sample_not_on_its_batch(data):
    images, ids = data["train"].images[:64], torch.arange(64)
    whole, keep = augment(images, ids, epoch=3, seed=1, padding=2, cutout=8)
    order = torch.randperm(64)
    shuffled, shuffled_keep = augment(
        images[order], ids[order], epoch=3, seed=1, padding=2, cutout=8
    )
    assert torch.equal(whole[order], shuffled) and torch.equal(keep[order], shuffled_keep)
    other_epoch, _ = augment(images, ids, epoch=4, seed=1, padding=2, cutout=8)
    assert not torch.equal(whole, other_epoch)


def test_augmentation_is_a_crop_with_reflected_border_and_random_mirroring(data):
    images = data["train"].images[:200]
    shifted, _ = augment(images, torch.arange(200), epoch=0, seed=0, padding=2)
    padded = torch.nn.functional.pad(images.float(), (2, 2, 2, 2), mode="reflect").to(torch.uint8)
    seen = set()
    for image, source in zip(shifted, padded, strict=True):
        places = [
            (y, x, mirrored)
            for y in range(5)
            for x in range(5)
            for mirrored in (False, True)
            if torch.equal(image.flip(-1) if mirrored else image, source[:, y : y + 32, x : x + 32])
        ]
        assert places
        seen.add(places[0])
    assert len(seen) > 40  # of 50 possible ones


def test_mirroring_alternates_between_epochs(data):
    images, ids = data["train"].images[:100], torch.arange(100)
    first, second = (augment(images, ids, epoch, seed=0, padding=0)[0] for epoch in (0, 1))
    assert torch.equal(first, second.flip(-1)) and 25 < sum(map(torch.equal, first, images)) < 75


def test_cutout_masks_a_square():
    images = torch.full((300, 3, 32, 32), 200, dtype=torch.uint8)
    shifted, keep = augment(images, torch.arange(300), epoch=0, seed=0, padding=0, cutout=8)
    blanked = (keep == 0).sum((1, 2, 3))
    # Complete squares in the interior, partial ones at the border.
    assert blanked.max() == 64 and blanked.min() >= 16
    mean, std = torch.tensor([100.0] * 3), torch.tensor([50.0] * 3)
    normal = normalize(shifted, mean, std, keep)
    assert normal.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(normal, 2 * keep.expand(-1, 3, -1, -1))


def test_random_numbers_are_uniform_and_independent():
    draws = (
        torch.stack(
            [random_uint32(7, 1, torch.arange(100_000), stream) for stream in range(3)]
        ).double()
        / 2**32
    )
    assert (
        draws.mean(1).sub(0.5).abs().max() < 0.005 and draws.var(1).sub(1 / 12).abs().max() < 0.002
    )
    assert torch.corrcoef(draws).fill_diagonal_(0).abs().max() < 0.015
    assert torch.corrcoef(torch.stack([draws[0][1:], draws[0][:-1]]))[0, 1].abs() < 0.015


def test_synthetic_data_is_quick_repeatable_and_disjoint(data):
    again = synthetic_arrays(0).splits
    assert torch.equal(again["train"].images, data["train"].images)
    assert torch.equal(again["test"].labels, data["test"].labels)
    assert not torch.equal(synthetic_arrays(1).splits["train"].images, data["train"].images)
    train = {image.numpy().tobytes() for image in data["train"].images}
    assert not any(image.numpy().tobytes() in train for image in data["test"].images)


@pytest.mark.slow
def test_a_linear_model_cannot_learn_the_synthetic_data(data):
    """Ridge regression on all pixels stays far below the 95 % of the default model."""

    def pixels(split):
        pixels = split.images.flatten(1).double() / 255
        return torch.cat([pixels, torch.ones(len(split), 1)], 1)

    x = pixels(data["train"])
    y = torch.nn.functional.one_hot(data["train"].labels).double()
    weights = torch.linalg.solve(x.T @ x + 10 * torch.eye(x.shape[1]), x.T @ y)
    predictions = (pixels(data["test"]) @ weights).argmax(1)
    assert (predictions == data["test"].labels).double().mean() < 0.7


@pytest.mark.parametrize(
    ("gpus", "processes", "fits"),
    [(2, 4, "use 2gpu.yaml"), (1, 8, "use 1gpu.yaml"), (3, 4, "use 2gpu.yaml"), (4, 4, None)],
)
def test_too_few_gpus_is_a_one_line_error(gpus, processes, fits, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(launcher, "option", lambda name: "accelerate_configs/4gpu.yaml")
    if fits is None:
        assert launch.check() is False
    else:
        with pytest.raises(
            UserError,
            match=f"4gpu.yaml starts {processes} processes on this machine, which has {gpus} GPU",
        ) as error:
            launch.check()
        assert fits in str(error.value)


def test_a_cpu_configuration_leaves_the_gpus_alone(monkeypatch):
    """Accelerate's launcher does not pass `use_cpu` on when it starts several processes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(
        launcher, "option", lambda name: str(ROOT / "accelerate_configs" / "2cpu.yaml")
    )
    assert launch.check() is True


def test_fp16_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UserError, match="float32"):
        launch.check()


HYBRID = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}


@pytest.mark.parametrize(
    ("environment", "shards", "gpus", "says"),
    [
        ({"FSDP_VERSION": "2"}, False, 4, "does not support"),
        ({"FSDP_VERSION": "1"}, True, 4, "set fsdp_version: 2"),
        (
            {"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
            True,
            0,
            "set fsdp_offload_params: false",
        ),
        (
            {
                "FSDP_VERSION": "2",
                "ACCELERATE_MIXED_PRECISION": "fp16",
                "ACCELERATE_USE_CPU": "true",
            },
            True,
            0,
            "use bf16 or no",
        ),
        (
            {"FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "fp16"},
            True,
            4,
            "in fp16, which is not supported: set mixed_precision: bf16",
        ),
        ({"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, True, 4, None),
        ({"FSDP_VERSION": "2", **HYBRID, "WORLD_SIZE": "4"}, True, 4, None),
        ({"FSDP_VERSION": "2", **HYBRID, "WORLD_SIZE": "8"}, True, 4, "does not fit 8 processes"),
        (
            {
                "FSDP_VERSION": "2",
                **HYBRID,
                "WORLD_SIZE": "2",
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1",
            },
            True,
            2,
            "in 1 parts",
        ),
    ],
)
def test_a_kind_of_sharding_that_is_not_supported_is_refused(
    environment, shards, gpus, says, monkeypatch
):
    for name, value in {"ACCELERATE_USE_FSDP": "true", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    # Restored afterwards.
    monkeypatch.setattr(AcceleratorState, "__init__", AcceleratorState.__init__)
    if says is None:
        assert launch.check(shards=shards) is False
    else:
        with pytest.raises(UserError, match=says):
            launch.check(shards=shards)


def test_an_accelerate_that_cannot_be_made_to_shard_on_a_cpu_is_refused(monkeypatch):
    """Before `Accelerator(...)`, where the place of the decision has gone; after it, where it had
    no effect.
    """
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setattr(AcceleratorState, "__init__", lambda self, **plugins: None)
    with pytest.raises(UserError, match=r"accelerate \S+ cannot be made to shard"):
        launch.check(shards=True)
    accelerator = SimpleNamespace(num_processes=1, is_fsdp2=False, device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"accelerate \S+ would not shard"):
        launch.print_banner(accelerator, 8)


def test_processes_on_the_cpu_shard_over_the_cpu(monkeypatch):
    """Also on a machine that has another device, as a Mac has."""
    seen = []
    for owner, name, value in (
        (torch.distributed.fsdp, "fully_shard", lambda module, **options: seen.append(options)),
        (torch.distributed, "get_world_size", lambda: 4),
        (fsdp, "init_device_mesh", lambda *what: what),
        (AcceleratorState, "__init__", AcceleratorState.__init__),
    ):
        monkeypatch.setattr(owner, name, value)
    fsdp._shard_on_cpu()
    torch.distributed.fsdp.fully_shard(None, offload_policy=1)
    torch.distributed.fsdp.fully_shard(None, mesh="of HSDP")
    assert seen == [{"mesh": ("cpu", (4,)), "offload_policy": 1}, {"mesh": "of HSDP"}]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_step_on_the_cpu_reuses_the_memory_of_the_step_before():
    cpu.keep_freed_memory()
    faults = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(size * 10**6) for size in (9, 12, 15, 20, 9)]  # 260 MB, 63,000 pages
        del tensors
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert faults[-1] < 1000  # it takes a few steps to find a place for each


def test_a_batch_that_does_not_divide_names_sizes_that_do():
    accelerator = SimpleNamespace(num_processes=4)
    assert launch.split_batch(accelerator, 96, 3) == 8
    with pytest.raises(UserError, match="use 96 or 108"):
        launch.split_batch(accelerator, 100, 3)


@pytest.mark.parametrize(
    ("samples", "processes", "batch"),
    [
        (10_000, 1, 250),
        (10_000, 4, 1000),
        (10_000, 3, 717),
        (101, 4, 104),
        (251, 1, 126),
        (1, 8, 8),
    ],
)
def test_an_evaluation_has_even_batches(samples, processes, batch):
    """Accelerate repeats samples to fill up the last batch: with four processes, 101 images become
    104 instead of 1000.
    """
    assert (
        loaders.evaluation_batch_size(SimpleNamespace(num_processes=processes), samples, 250)
        == batch
    )


def test_numbers_are_checked():
    parser = Parser()
    parser.add_argument("--n", type=number(int, 1))
    for bad in ("0", "-3", "1.5", "x", ""):
        with pytest.raises(UserError, match="--n"):
            parser.parse_args(["--n", bad])
    with pytest.raises(argparse.ArgumentTypeError):
        number(float, 0, above=True)("0")
    assert number(float, 0)("1e-3") == 0.001
    assert number(float, 0, most=1)("1") == 1 and number(float, 0, below=1)("0.99") == 0.99
    for bounds in (dict(most=0.9), dict(below=1)):
        with pytest.raises(argparse.ArgumentTypeError, match="at least 0 and"):
            number(float, 0, **bounds)("1")


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


@pytest.mark.parametrize(
    ("device", "kind"), [("cuda", torch.nn.SyncBatchNorm), ("cpu", torch.nn.BatchNorm2d)]
)
def test_batch_norm_over_all_processes_keeps_the_parameters(device, kind, capsys):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
    model[1].weight.requires_grad_(False)
    before = list(model.parameters())
    two = SimpleNamespace(num_processes=2, is_main_process=True, device=torch.device(device))
    model = ddp.sync_batch_norm(two, model, 250, wanted=True)
    assert type(model[1]) is kind and not model[1].weight.requires_grad
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert ("needs GPUs" in capsys.readouterr().err) == (device == "cpu")


def test_ddp_broadcasts_the_statistics_of_batch_norm_only_for_evaluation():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))
        ddp.warm_up(model, lambda: model(torch.ones(4, 2)).sum())
        for training in (True, False, True):
            model.train(training)(torch.ones(4, 2))
            assert model.will_sync_module_buffers() == (not training)
        model.module.eval()  # the wrapper itself stays in training mode
        model(torch.ones(4, 2))
        assert model.training and model.will_sync_module_buffers()

        layers = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
        layers.register_buffer("may_be_read_in_training", torch.ones(2))
        model = torch.nn.parallel.DistributedDataParallel(layers)
        ddp.warm_up(model, lambda: model(torch.ones(4, 2)).sum())
        model(torch.ones(4, 2))
        assert model.will_sync_module_buffers()
    finally:
        torch.distributed.destroy_process_group()


def test_garbage_is_collected_again_after_the_imports(monkeypatch):
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(process, "_handles_signals", False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    process.handle_signals()
    seen = [gc.isenabled()]
    process.run(lambda: seen.append(gc.isenabled()))
    assert seen == [False, True]


@pytest.mark.parametrize("installed", [True, False])  # False: in a notebook
def test_training_starts_without_garbage(installed, monkeypatch):
    monkeypatch.setattr(process, "_phase", "starting")
    monkeypatch.setattr(process, "_handles_signals", installed)
    cycle = argparse.Namespace()
    cycle.itself, seen = cycle, weakref.ref(cycle)
    del cycle
    gc.unfreeze()
    process.training_starts()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert (frozen > 1000) == installed and (seen() is None or not installed)


def test_few_samples_for_batch_norm_are_said(capsys):
    one = SimpleNamespace(num_processes=1, is_main_process=True, device=torch.device("cpu"))
    for samples, layer in (
        (31, torch.nn.BatchNorm1d(2)),
        (32, torch.nn.BatchNorm1d(2)),
        (31, torch.nn.LayerNorm(2)),
    ):
        ddp.sync_batch_norm(one, layer, samples, wanted=False)
        said = "31 samples" in capsys.readouterr().err
        assert said == (samples == 31 and isinstance(layer, torch.nn.BatchNorm1d))


def test_one_sample_for_batch_norm_is_refused():
    """Not with frozen statistics, and not where batch norm sees the samples of all processes."""
    one = SimpleNamespace(num_processes=1, is_main_process=True, device=torch.device("cpu"))
    layer = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.BatchNorm2d(1))
    with pytest.raises(UserError, match="more than the one sample that each process"):
        ddp.sync_batch_norm(one, layer, 1, wanted=False)
    assert ddp.sync_batch_norm(one, layer, 2, wanted=False) is layer
    assert ddp.sync_batch_norm(one, torch.nn.LayerNorm(2), 1, wanted=False)
    two = SimpleNamespace(num_processes=2, is_main_process=True, device=torch.device("cuda"))
    synced = ddp.sync_batch_norm(two, layer, 1, wanted=True)
    assert isinstance(synced[1], torch.nn.SyncBatchNorm)
    frozen = torch.nn.Sequential(torch.nn.BatchNorm2d(1)).eval()
    assert ddp.sync_batch_norm(one, frozen, 1, wanted=False) is frozen


@pytest.mark.parametrize(
    ("resolved", "exported", "expected"),
    [
        ("127.0.1.1", None, "eth7"),
        ("192.0.2.5", None, None),
        (None, None, "eth7"),
        ("127.0.1.1", "ib0", "ib0"),
    ],
)
def test_gloo_does_not_listen_on_a_loopback_address(resolved, exported, expected, monkeypatch):
    """It listens on the address of the host name, and would tell other machines to connect to
    127.0.1.1.
    """

    def resolve(_):
        if resolved is None:
            raise OSError("no such host")
        return resolved

    monkeypatch.setattr(launch.socket, "gethostbyname", resolve)
    monkeypatch.setattr(launch, "interface_to", lambda host: "eth7")
    environment = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1"} | (
        {"GLOO_SOCKET_IFNAME": exported} if exported else {}
    )
    monkeypatch.setattr(launch.os, "environ", environment)
    launch.set_gloo_interface()
    assert environment.get("GLOO_SOCKET_IFNAME") == expected


class Event:
    """A fake CUDA event: `query` returns the given answers, one after the other."""

    def __init__(self, answers):
        self.answers = list(answers)

    def query(self):
        return self.answers.pop(0)


def test_the_guard_polls_a_gpu_for_a_loss_until_a_timeout(monkeypatch):
    monkeypatch.setattr(process, "_phase", "starting")
    events = [Event([False, False, True]), Event([False] * 10_000)]
    monkeypatch.setattr(guard, "_to_host", lambda values: (values, events[int(values[0])]))
    watched = guard.Guard(
        SimpleNamespace(num_processes=1, process_index=0, scaler=None), timeout=600
    )
    # Only reads the previous loss.
    assert not watched.should_stop(1, [torch.tensor(0.0)], []) and len(events[0].answers) == 3
    assert not watched.should_stop(2, [torch.tensor(1.0)], []) and not events[0].answers
    watched._device_timeout = 0.01
    with pytest.raises(TimeoutError, match="step 2"):
        watched.should_stop(3, [torch.tensor(1.0)], [])


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_peaks_are_of_exactly_that_gpu(name, peak):
    assert record.known_tflops(name) == peak


def test_an_nccl_error_says_what_happened_instead_of_where():
    text = "NCCL error in: /src/NCCLUtils.cpp:93, invalid usage\nLast error:\nDuplicate GPU detected : rank 0 and rank 1\n"
    error = torch.distributed.DistBackendError(text)
    assert failures.describe(error) == "rank 0: NCCL: Duplicate GPU detected : rank 0 and rank 1"
    # Raised elsewhere: its traceback is needed.
    assert failures.describe(RuntimeError(text)) is None


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (
            RuntimeError(
                "[/src/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:4"
            ),
            True,
        ),
        (
            RuntimeError(
                "[/src/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms for recv"
            ),
            True,
        ),
        (torch.distributed.DistNetworkError("The client socket has timed out after 60s"), True),
        (
            torch.distributed.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0"),
            True,
        ),
        (failures.LostContact("timed out waiting for the device to finish step 3"), True),
        (TimeoutError("timed out"), False),  # of an HTTP client, say
        (ConnectionResetError("Connection reset by peer"), False),  # a tracker's server
        (subprocess.TimeoutExpired(["git"], 10), False),
        (RuntimeError("the request timed out"), False),
        (RuntimeError("NCCL is not installed"), False),
    ],
    ids=str,
)
def test_lost_contact_is_decided_by_the_type_of_the_error(error, known, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    line = failures.describe(error)
    assert (line or "").startswith("rank 1 lost contact with another process, ") == known
    assert known or line is None  # its traceback is printed
    monkeypatch.delenv("RANK")
    assert failures.describe(error) is None  # a script on its own has no other process


def test_a_loader_worker_that_dies_while_sending_a_batch_is_named():
    source = "def load():\n    raise EOFError\n"
    namespace = {}
    exec(compile(source, "/site-packages/torch/utils/data/dataloader.py", "exec"), namespace)
    for load, known in ((namespace["load"], True), (lambda: next(iter(())), False)):
        with pytest.raises((EOFError, StopIteration)) as caught:
            load()
        line = failures.describe(caught.value)
        assert (
            line == "rank 0: a data loader worker died while sending a batch (EOFError)"
        ) == known


def test_the_warm_up_of_ddp_changes_nothing_and_runs_without_ddp_too():
    """It calls the loss twice, wherever it runs, so that a mistake in it shows on one process too."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls = []

    def compute_loss():
        calls.append(1)
        return model(torch.randn(4, 2)).square().sum()

    ddp.warm_up(model, compute_loss)
    assert len(calls) == 2 and all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(TypeError):  # a loss that is none
        ddp.warm_up(model, lambda: {"loss": 1}["loss"] + "")


class Counting(torch.nn.Module):
    """Counts its forward passes in a buffer, and makes another one in the first of them."""

    def __init__(self, persistent):
        super().__init__()
        self.layer, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.register_buffer("cache", torch.empty(0), persistent=False)
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, x):
        self.calls += 1
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.cache = torch.ones(len(x))  # longer than before
        return self.layer(x)


@pytest.mark.parametrize("persistent", [True, False])
def test_the_warm_up_names_what_a_restart_or_ddp_would_not_take(persistent, capsys):
    model = Counting(persistent)
    ddp.warm_up(model, lambda: model(torch.ones(3, 2)).sum())
    said = capsys.readouterr().err
    assert model.calls == 0 and model.mask.tolist() == [1, 1]
    assert said.count("no gradient reaches unused.weight (2 without): several processes") == 1
    assert said.count("buffer calls changes in the forward pass") == (not persistent)
    model.unused.requires_grad_(False)
    ddp.warm_up(model, lambda: model(torch.ones(3, 2)).sum())
    assert "no gradient" not in capsys.readouterr().err


def test_the_shards_of_a_model_may_have_no_gradient(monkeypatch, capsys):
    monkeypatch.setattr(ddp, "FSDPModule", Counting)
    model = Counting(True)
    ddp.warm_up(model, lambda: model(torch.ones(3, 2)).sum())
    assert capsys.readouterr().err == ""


def test_ddp_refuses_an_unused_parameter_in_one_line(capsys):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        for how in (dict(find_unused_parameters=True), dict(static_graph=True), {}):
            model = torch.nn.parallel.DistributedDataParallel(Counting(True), **how)
            outcome = contextlib.nullcontext()
            if not how:
                outcome = pytest.raises(
                    UserError, match=r"reaches module.unused.weight .*find_unused"
                )
            with outcome:
                ddp.warm_up(model, lambda: model(torch.ones(3, 2)).sum())  # noqa: B023
    finally:
        torch.distributed.destroy_process_group()
    assert "no gradient" not in capsys.readouterr().err


def test_the_warm_up_of_two_models_leaves_no_gradient_in_either(monkeypatch):
    """The loss of the generator of a GAN has gradients for the discriminator, too."""
    watched = []
    monkeypatch.setattr(ddp.pace, "watch", watched.append)
    models = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(2)]
    before = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]
    ddp.warm_up(tuple(models), lambda: models[1](models[0](torch.randn(4, 2))).sum())
    for model, values in zip(models, before, strict=True):
        assert all(weight.grad is None for weight in model.parameters())
        assert all(torch.equal(value, values[k]) for k, value in model.state_dict().items())
    assert watched == models[:1]  # only the time of its passes is measured


def test_a_known_failure_is_one_line_also_where_all_processes_hear_of_it(capsys):
    """What one process meets while the others wait: its line is sent to them, not its traceback."""
    alone = SimpleNamespace(num_processes=1, is_main_process=True)

    def fill_the_disk():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in (collectives.run_on_main, collectives.run_on_all):
        with pytest.raises(failures.RunFailed, match="rank 0: the disk is full: free some space"):
            call(alone, fill_the_disk)
        assert "Traceback" not in capsys.readouterr().err
        with pytest.raises(RuntimeError, match="ZeroDivisionError: "):
            call(alone, lambda: 1 // 0)
        assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_is_told_by_its_error_number():
    class SafetensorError(Exception):
        pass

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    in_safetensors = SafetensorError("I/O error: No space left on device (os error 28)")
    for error in (full, in_safetensors):
        assert "the disk is full: free some space" in failures.describe(error)
    for error in (RuntimeError("(os error 28)"), OSError(errno.EACCES, "No space left on device")):
        assert failures.describe(error) is None


def test_a_slow_step_shows_its_seconds():
    assert metrics.speed(1_234.5, 0.1) == "1,234 samples/s"
    assert metrics.speed(2.5, 0.4) == "2.5 samples/s"
    assert metrics.speed(0.04, 50.0) == "50.0 s/step"
    figures = dict(step=1, epoch=0.5, loss=1.0, lr=0.1, samples_per_second=0.04, step_seconds=50.0)
    figures |= dict(data_share=0.0, memory_bytes=0, seconds_left=0)
    assert "  50.0 s/step  " in metrics.train_line(figures, 2)


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


def test_a_run_without_final_weights_has_those_of_its_newest_checkpoint(tmp_path):
    for step in (3, 12):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        manifest_of = {"progress": {"step": step, "config": {"width": step}}, "arguments": {}}
        (folder / manifest.MANIFEST).write_text(json.dumps(manifest_of))
        save_file({"module.bias": torch.full((2,), float(step))}, folder / "model.safetensors")
    saved = weights.read(tmp_path)
    assert saved.state["bias"].tolist() == [12, 12] and saved.config == {"width": 12}
    assert saved.run == tmp_path


def test_only_paths_of_data_may_move():
    earlier, now = {"track": "/gone/a"}, {"track": "/elsewhere/a"}
    assert record.differences(earlier, now, ()) == ["--track /elsewhere/a (was /gone/a)"]
    assert not record.differences({"dataset": "/gone/a"}, {"dataset": "/elsewhere/a"}, ())
    assert not record.differences(earlier, now, {"track"})
