"""Unit tests of `utils`: augmentation, data, run folders, checks of a launch."""

import argparse
import errno
import fcntl
import gc
import json
import os
import platform
import resource
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import ROOT

from utils import checkpoint, exits, gpu_peaks, guard, topology
from utils.arguments import Parser, number
from utils.augment import augment, normalize, random_uint32
from utils.exits import UserError
from utils.image_data import BatchedImages, synthetic_images
from utils.run_folder import RunFolder, moved


@pytest.fixture(scope="module")
def data():
    return synthetic_images(0)


def test_augmentation_depends_on_the_sample_not_on_its_batch(data):
    images, ids = data.train.images[:64], torch.arange(64)
    whole, keep = augment(images, ids, epoch=3, seed=1, padding=2, cutout=8)
    order = torch.randperm(64)
    shuffled, shuffled_keep = augment(images[order], ids[order], epoch=3, seed=1, padding=2, cutout=8)
    assert torch.equal(whole[order], shuffled) and torch.equal(keep[order], shuffled_keep)
    other_epoch, _ = augment(images, ids, epoch=4, seed=1, padding=2, cutout=8)
    assert not torch.equal(whole, other_epoch)


def test_augmentation_is_a_crop_with_reflected_border_and_random_mirroring(data):
    images = data.train.images[:200]
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
    images, ids = data.train.images[:100], torch.arange(100)
    first, second = (augment(images, ids, epoch, seed=0, padding=0)[0] for epoch in (0, 1))
    assert torch.equal(first, second.flip(-1)) and 25 < sum(map(torch.equal, first, images)) < 75


def test_cutout_masks_a_square():
    images = torch.full((300, 3, 32, 32), 200, dtype=torch.uint8)
    shifted, keep = augment(images, torch.arange(300), epoch=0, seed=0, padding=0, cutout=8)
    blanked = (keep == 0).sum((1, 2, 3))
    assert blanked.max() == 64 and blanked.min() >= 16  # complete squares in the interior, partial ones at the border
    mean, std = torch.tensor([100.0] * 3), torch.tensor([50.0] * 3)
    normal = normalize(shifted, mean, std, keep)
    assert normal.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(normal, 2 * keep.expand(-1, 3, -1, -1))


def test_random_numbers_are_uniform_and_independent():
    draws = torch.stack([random_uint32(7, 1, torch.arange(100_000), stream) for stream in range(3)]).double() / 2**32
    assert draws.mean(1).sub(0.5).abs().max() < 0.005 and draws.var(1).sub(1 / 12).abs().max() < 0.002
    assert torch.corrcoef(draws).fill_diagonal_(0).abs().max() < 0.015
    assert torch.corrcoef(torch.stack([draws[0][1:], draws[0][:-1]]))[0, 1].abs() < 0.015


def test_batches_by_index(data):
    batch = BatchedImages(data.train).__getitems__([5, 3, 5])
    assert torch.equal(batch["images"], data.train.images[[5, 3, 5]]) and batch["ids"].tolist() == [5, 3, 5]


def test_synthetic_data_is_quick_repeatable_and_disjoint(data):
    again = synthetic_images(0)
    assert torch.equal(again.train.images, data.train.images) and torch.equal(again.test.labels, data.test.labels)
    assert not torch.equal(synthetic_images(1).train.images, data.train.images)
    train = {image.numpy().tobytes() for image in data.train.images}
    assert not any(image.numpy().tobytes() in train for image in data.test.images)


def test_a_linear_model_cannot_learn_the_synthetic_data(data):
    """Ridge regression on all pixels stays far below the 95 % of the default model."""
    x, y = data.train.images.flatten(1).double() / 255, torch.nn.functional.one_hot(data.train.labels).double()
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    weights = torch.linalg.solve(x.T @ x + 10 * torch.eye(x.shape[1]), x.T @ y)
    test = torch.cat([data.test.images.flatten(1).double() / 255, torch.ones(len(data.test.labels), 1)], 1)
    assert ((test @ weights).argmax(1) == data.test.labels).double().mean() < 0.7


@pytest.mark.parametrize(
    ("gpus", "processes", "fits"), [(2, 4, "use 2gpu.yaml"), (1, 8, "use 1gpu.yaml"), (3, 4, "use 2gpu.yaml"), (4, 4, None)]
)
def test_too_few_gpus_is_a_one_line_error(gpus, processes, fits, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(topology, "_config_path", lambda: "accelerate_configs/4gpu.yaml")
    if fits is None:
        assert topology.check_launch() is False
    else:
        with pytest.raises(
            UserError, match=f"4gpu.yaml starts {processes} processes on this machine, which has {gpus} GPU"
        ) as error:
            topology.check_launch()
        assert fits in str(error.value)


def test_a_cpu_configuration_leaves_the_gpus_alone(monkeypatch):
    """Accelerate's launcher does not pass `use_cpu` on when it starts several processes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(topology, "_config_path", lambda: str(ROOT / "accelerate_configs" / "2cpu.yaml"))
    assert topology.check_launch() is True


def test_fp16_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UserError, match="float32"):
        topology.check_launch()


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
        ({"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, True, 0, "set fsdp_offload_params: false"),
        ({"FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "true"}, True, 0, "use bf16 or no"),
        ({"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, True, 4, None),
        ({"FSDP_VERSION": "2", **HYBRID, "WORLD_SIZE": "4"}, True, 4, None),
        ({"FSDP_VERSION": "2", **HYBRID, "WORLD_SIZE": "8"}, True, 4, "does not fit 8 processes"),
        ({"FSDP_VERSION": "2", **HYBRID, "WORLD_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1"}, True, 2, "in 1 parts"),
    ],
)
def test_a_kind_of_sharding_that_is_not_supported_is_refused(environment, shards, gpus, says, monkeypatch):
    for name, value in {"ACCELERATE_USE_FSDP": "true", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(AcceleratorState, "__init__", AcceleratorState.__init__)  # restored afterwards
    if says is None:
        assert topology.check_launch(shards=shards) is False
    else:
        with pytest.raises(UserError, match=says):
            topology.check_launch(shards=shards)


def test_an_accelerate_that_cannot_be_made_to_shard_on_a_cpu_is_refused(monkeypatch):
    """Before `Accelerator(...)`, where the place of the decision has gone; after it, where it had no effect."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setattr(AcceleratorState, "__init__", lambda self, **plugins: None)
    with pytest.raises(UserError, match=r"accelerate \S+ cannot be made to shard"):
        topology.check_launch(shards=True)
    accelerator = SimpleNamespace(num_processes=1, is_fsdp2=False, device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"accelerate \S+ would not shard"):
        topology.print_banner(accelerator, 8)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_step_on_the_cpu_reuses_the_memory_of_the_step_before():
    topology.keep_freed_memory()
    faults = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(size * 10**6) for size in (9, 12, 15, 20, 9)]  # 260 MB, 63,000 pages
        del tensors
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert faults[-1] < 1000  # it takes a few steps to find a place for each


def test_a_batch_that_does_not_divide_names_sizes_that_do():
    accelerator = SimpleNamespace(num_processes=4)
    assert topology.split_batch(accelerator, 96, 3) == 8
    with pytest.raises(UserError, match="use 96 or 108"):
        topology.split_batch(accelerator, 100, 3)


@pytest.mark.parametrize(
    ("samples", "processes", "batch"),
    [(10_000, 1, 250), (10_000, 4, 1000), (10_000, 3, 717), (101, 4, 104), (251, 1, 126), (1, 8, 8)],
)
def test_an_evaluation_has_even_batches(samples, processes, batch):
    """Accelerate repeats samples to fill up the last batch: with four processes, 101 images become 104 instead of 1000."""
    assert topology.evaluation_batch(SimpleNamespace(num_processes=processes), samples, 250) == batch


def test_numbers_are_checked():
    parser = Parser()
    parser.add_argument("--n", type=number(int, 1))
    for bad in ("0", "-3", "1.5", "x", ""):
        with pytest.raises(UserError, match="--n"):
            parser.parse_args(["--n", bad])
    with pytest.raises(argparse.ArgumentTypeError):
        number(float, 0, above=True)("0")
    assert number(float, 0)("1e-3") == 0.001


def folder_of(path, **arguments):
    args = argparse.Namespace(output_dir=str(path), resume="auto", lr=0.1, log_every=1, batch_size=10, **arguments)
    main = dict(is_main_process=True, is_local_main_process=True, process_index=0, num_processes=1)
    return RunFolder(args, SimpleNamespace(**main, device=torch.device("cpu"), mixed_precision="no"))


def test_metrics_are_cut_back_to_the_checkpoint_and_never_repeated(tmp_path):
    run = folder_of(tmp_path)
    assert run.claim() is None
    run.start()
    for step in (1, 2, 3):
        run.write("train", step, loss=1.0 / step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "st')  # killed while writing
    again = folder_of(tmp_path)
    again._lock = run._lock  # the same process: locking again would succeed, and closing the file would release the first lock
    again.progress = {"step": 2}
    again.start()
    again.write("train", 2, loss=9.0)
    again.write("train", 3, loss=0.3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, 0.3)]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_a_warning(number, tmp_path, monkeypatch, capsys):
    def lockf(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    folder_of(tmp_path).claim()
    assert "has no locks: nothing keeps two jobs from writing" in capsys.readouterr().err


def test_other_arguments_are_each_named(tmp_path):
    run = folder_of(tmp_path, model="a", epochs=1)
    run.claim()
    run.start()
    with pytest.raises(UserError, match=r"--epochs 2 \(was 1\), --model b \(was a\)"):
        folder_of(tmp_path, model="b", epochs=2).claim()
    folder_of(tmp_path, model="a", epochs=1, timeout=3).claim()


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
    alone = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, is_local_main_process=True)
    assert checkpoint.finish(alone, writing, None, {"progress": {"step": 3}}, keep=2)
    assert synced == [str(tmp_path)]
    assert checkpoint.verify(target)["files"].keys() == {"model.safetensors", "optimizer.bin", "shards/0.distcp"}


def test_the_metrics_before_a_checkpoint_are_synced_with_it(tmp_path, monkeypatch):
    """A run that continues from a checkpoint does not write the lines before it again."""
    run, synced = folder_of(tmp_path, keep_checkpoints=2), []
    run.claim()
    run.start()
    run.write("train", 1, loss=0.5)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    with run.checkpoint(1) as folder:
        assert synced == [str(tmp_path / "metrics.jsonl")]
        (Path(folder) / "model.safetensors").write_bytes(b"weights")
    assert checkpoint.verify(tmp_path / "checkpoints" / "step_00000001")["progress"]["step"] == 1


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path):
    scores = {10: 0.5, 20: 0.9, 30: None, 40: 0.7, 50: None}
    for step, score in scores.items():
        folder = tmp_path / f"step_{step:08d}"
        folder.mkdir()
        (folder / checkpoint.MANIFEST).write_text(json.dumps({"progress": {"step": step, "score": score}}))
    checkpoint._prune(tmp_path, 2, tmp_path / "step_00000050")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000020", "step_00000040", "step_00000050"]


def test_a_moved_project_continues(tmp_path):
    assert moved("/no/such/place/cifar10", str(tmp_path / "cifar10"))
    assert not moved("/no/such/place/cifar10", str(tmp_path / "cifar100"))
    assert not moved(str(tmp_path), f"/elsewhere/{tmp_path.name}")  # both exist, so the data was not moved
    assert not moved("uoft-cs/cifar10", str(tmp_path / "cifar10"))


def test_a_save_longer_than_the_grace_period_is_said_at_the_next_start(tmp_path, monkeypatch, capsys):
    """Torchelastic kills its processes 30 s after SIGTERM, unless told otherwise."""
    for launcher, grace, says in ((None, None, ""), ("job", None, "45 s"), ("job", "60", "")):
        for name, value in (("TORCHELASTIC_RUN_ID", launcher), ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", grace)):
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        run = folder_of(tmp_path)
        line = {"split": "checkpoint", "step": 3, "seconds": 45.0, "written": True}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        run._open_metrics(3)
        run._warn_of_short_grace()
        printed = capsys.readouterr().out
        assert says in printed and ("export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90" in printed) == bool(says)


@pytest.mark.parametrize(("device", "kind"), [("cuda", torch.nn.SyncBatchNorm), ("cpu", torch.nn.BatchNorm2d)])
def test_batch_norm_over_all_processes_keeps_the_parameters(device, kind, capsys):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
    model[1].weight.requires_grad_(False)
    before = list(model.parameters())
    two = SimpleNamespace(num_processes=2, is_main_process=True, device=torch.device(device))
    model = topology.sync_batch_norm(two, model, 250, wanted=True)
    assert type(model[1]) is kind and not model[1].weight.requires_grad
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert ("needs GPUs" in capsys.readouterr().err) == (device == "cpu")


def test_ddp_broadcasts_the_statistics_of_batch_norm_only_for_evaluation():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))
        topology.set_up_ddp(SimpleNamespace(num_processes=2), model, torch.ones(4, 2))
        for training in (True, False, True):
            model.train(training)(torch.ones(4, 2))
            assert model.will_sync_module_buffers() == (not training)
        model.module.eval()  # the wrapper itself stays in training mode
        model(torch.ones(4, 2))
        assert model.training and model.will_sync_module_buffers()

        layers = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
        layers.register_buffer("may_be_read_in_training", torch.ones(2))
        model = torch.nn.parallel.DistributedDataParallel(layers)
        topology.set_up_ddp(SimpleNamespace(num_processes=2), model, torch.ones(4, 2))
        model(torch.ones(4, 2))
        assert model.will_sync_module_buffers()
    finally:
        torch.distributed.destroy_process_group()


def test_garbage_is_collected_again_after_the_imports(monkeypatch):
    monkeypatch.setattr(exits.signal, "signal", lambda *_: None)
    monkeypatch.setattr(exits, "_installed", False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    exits.install()
    seen = [gc.isenabled()]
    exits.run(lambda: seen.append(gc.isenabled()))
    assert seen == [False, True]


@pytest.mark.parametrize("installed", [True, False])  # False: in a notebook
def test_training_starts_without_garbage(installed, monkeypatch):
    monkeypatch.setattr(exits, "_in_training", False)
    monkeypatch.setattr(exits, "_installed", installed)
    cycle = argparse.Namespace()
    cycle.itself, seen = cycle, weakref.ref(cycle)
    del cycle
    gc.unfreeze()
    exits.training_starts()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert (frozen > 1000) == installed and (seen() is None or not installed)


def test_few_samples_for_batch_norm_are_said(capsys):
    one = SimpleNamespace(num_processes=1, is_main_process=True, device=torch.device("cpu"))
    for samples, layer in ((31, torch.nn.BatchNorm1d(2)), (32, torch.nn.BatchNorm1d(2)), (31, torch.nn.LayerNorm(2))):
        topology.sync_batch_norm(one, layer, samples, wanted=False)
        said = "31 samples" in capsys.readouterr().err
        assert said == (samples == 31 and isinstance(layer, torch.nn.BatchNorm1d))


@pytest.mark.parametrize(
    ("resolved", "exported", "expected"),
    [("127.0.1.1", None, "eth7"), ("192.0.2.5", None, None), (None, None, "eth7"), ("127.0.1.1", "ib0", "ib0")],
)
def test_gloo_does_not_listen_on_a_loopback_address(resolved, exported, expected, monkeypatch):
    """It listens on the address of the host name, and would tell other machines to connect to 127.0.1.1."""

    def resolve(_):
        if resolved is None:
            raise OSError("no such host")
        return resolved

    monkeypatch.setattr(topology.socket, "gethostbyname", resolve)
    monkeypatch.setattr(topology, "interface_to", lambda host: "eth7")
    environment = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1"} | ({"GLOO_SOCKET_IFNAME": exported} if exported else {})
    monkeypatch.setattr(topology.os, "environ", environment)
    topology.set_gloo_interface()
    assert environment.get("GLOO_SOCKET_IFNAME") == expected


class Event:
    """A fake CUDA event: `query` returns the given answers, one after the other."""

    def __init__(self, answers):
        self.answers = list(answers)

    def query(self):
        return self.answers.pop(0)


def test_the_guard_polls_a_gpu_for_a_loss_until_a_timeout(monkeypatch):
    monkeypatch.setattr(exits, "_in_training", False)
    events = [Event([False, False, True]), Event([False] * 10_000)]
    monkeypatch.setattr(guard, "_to_host", lambda values: (values, events[int(values[0])]))
    watched = guard.Guard(SimpleNamespace(num_processes=1, scaler=None), timeout=600)
    assert not watched.should_stop(1, [torch.tensor(0.0)], []) and len(events[0].answers) == 3  # only reads the previous loss
    assert not watched.should_stop(2, [torch.tensor(1.0)], []) and not events[0].answers
    watched._patience = 0.01
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
    assert gpu_peaks.known_tflops(name) == peak


def test_an_nccl_error_says_what_happened_instead_of_where():
    text = "NCCL error in: /src/NCCLUtils.cpp:93, invalid usage\nLast error:\nDuplicate GPU detected : rank 0 and rank 1\n"
    assert exits._known_failure(RuntimeError(text)) == "error: rank 0: NCCL: Duplicate GPU detected : rank 0 and rank 1"


def test_a_loader_worker_that_dies_while_sending_a_batch_is_named():
    source = "def load():\n    raise EOFError\n"
    namespace = {}
    exec(compile(source, "/site-packages/torch/utils/data/dataloader.py", "exec"), namespace)
    for load, known in ((namespace["load"], True), (lambda: next(iter(())), False)):
        with pytest.raises((EOFError, StopIteration)) as caught:
            load()
        line = exits._known_failure(caught.value)
        assert (line == "error: rank 0: a data loader worker died while sending a batch (EOFError)") == known
