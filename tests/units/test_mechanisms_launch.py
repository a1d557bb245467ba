"""To be merged into the tests of its modules."""

import argparse
import contextlib
import errno
import gc
import os
import platform
import resource
import subprocess
import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from harness.launches import ROOT

from utils.run import (
    collectives,
    cpu,
    ddp,
    failures,
    fsdp,
    guard,
    launch,
    launcher,
    process,
)
from utils.run.failures import UserError


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
