"""What `utils.run.launch` decides about a launch, and what it says."""

import contextlib
import os
import re
import socket
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from harness.fakes import accelerator
from harness.launches import ROOT

from utils.run import cpu, launch, launcher, memory
from utils.run.failures import UserError
from utils.scale import fsdp

NAMES = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE PET_NNODES MASTER_ADDR "
    "ACCELERATE_MIXED_PRECISION ACCELERATE_USE_CPU ACCELERATE_USE_FSDP FSDP_VERSION "
    "GLOO_SOCKET_IFNAME CUBLAS_WORKSPACE_CONFIG"
).split()


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """`launched(options, **environment)`: this process alone, started with these words."""
    monkeypatch.setattr(sys, "argv", ["scripts/train_a.py", "--lr", "1"])
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored if the code sets it
        monkeypatch.delenv(name)

    def launch_with(options="", **environment):
        monkeypatch.setattr(launcher, "command", lambda: ["torchrun", *options.split()])
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    launch_with()
    return launch_with


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpus, bf16)`: what this machine has. What is set up there is in `.calls`."""

    def has(gpus=0, bf16=True):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(cpu, "has_bf16", lambda: bf16)
        has.calls.clear()

    has.calls = []
    for owner, name in (
        (torch, "set_num_threads"),
        (torch, "use_deterministic_algorithms"),
        (cpu, "keep_freed_memory"),
        (fsdp, "check"),
    ):
        monkeypatch.setattr(
            owner, name, lambda *how, name=name, **more: has.calls.append((name, *how, more))
        )
    monkeypatch.setattr(cpu, "threads_per_process", lambda: 3)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.amp.GradScaler, "step", torch.amp.GradScaler.step)
    has()
    return has


ON_CPU = [("set_num_threads", 3, {}), ("keep_freed_memory", {})]
TRAINING = SimpleNamespace(nondeterministic=False)


# ------------------------------------------------------------------------------------------ check


def test_gpus_compute_the_same_bits_after_a_restart(machine, launched, monkeypatch):
    # CUDA is not used yet: train_model_parallel.py changes afterwards which GPUs it sees.
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    launched(ACCELERATE_MIXED_PRECISION="bf16", LOCAL_WORLD_SIZE="2")
    step = torch.amp.GradScaler.step
    machine(gpus=2)
    for args in (None, TRAINING):
        machine.calls.clear()
        assert launch.check(args) is False
        assert machine.calls == [("use_deterministic_algorithms", True, {"warn_only": True})]
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    launched(CUBLAS_WORKSPACE_CONFIG=":16:8")
    launch.check()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # a person's choice
    assert torch.amp.GradScaler.step is step
    launched(ACCELERATE_MIXED_PRECISION="fp16")
    launch.check()
    assert torch.amp.GradScaler.step is not step  # `gpu.skip_whole_steps`


def test_the_fastest_algorithms_if_they_are_asked_for(machine):
    machine(gpus=1)
    assert launch.check(SimpleNamespace(nondeterministic=True)) is False
    assert torch.backends.cudnn.benchmark is True
    assert torch.backends.cudnn.deterministic is False and machine.calls == []
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("gpus", "processes", "fits"),
    [(4, 8, 4), (7, 8, 4), (8, 9, 8), (1, 2, 1), (12, 16, 8), (2, 4, 2), (3, 4, 2)],
)
def test_too_few_gpus_name_the_largest_configuration_that_fits(
    gpus, processes, fits, machine, launched
):
    machine(gpus)
    launched("--config_file accelerate_configs/9gpu.yaml", LOCAL_WORLD_SIZE=str(processes))
    with pytest.raises(UserError) as error:
        launch.check()
    assert str(error.value) == (
        f"9gpu.yaml starts {processes} processes on this machine, which has {gpus} "
        f"GPU{'s' if gpus > 1 else ''}: use {fits}gpu.yaml"
    )
    assert error.value.rank_variable == "LOCAL_RANK"


@pytest.mark.parametrize("how", ["environment", "configuration"])
def test_a_launch_that_asks_for_the_cpu_gets_it(how, machine, launched):
    """Accelerate's launcher does not pass `use_cpu` on when it starts several processes."""
    machine(gpus=8)
    if how == "environment":
        launched(ACCELERATE_USE_CPU="True")
    else:
        launched(f"--config_file {ROOT}/accelerate_configs/2cpu.yaml", LOCAL_WORLD_SIZE="2")
    assert launch.check() is True and machine.calls == ON_CPU


EMULATED = "this CPU has no native bf16 and emulates it"
FASTER = "this CPU has native bf16, 1.5x to 4x faster"
NO_GPU = "NO GPU FOUND: 4gpu.yaml runs on the CPU with 1 process, precision {}. This is fine"


@pytest.mark.parametrize(
    ("wanted", "asked", "native", "training", "gets", "says"),
    [
        (False, "bf16", True, True, "bf16", NO_GPU.format("bf16")),
        (False, "bf16", False, True, "no", NO_GPU.format("no")),
        (False, "fp16", True, True, "no", NO_GPU.format("no")),
        (False, "fp16", False, False, "no", NO_GPU.format("no")),
        (False, "no", True, True, "no", NO_GPU.format("no")),
        (False, None, True, True, None, FASTER),  # a script on its own
        (True, "bf16", False, False, "bf16", EMULATED),
        (True, "bf16", True, True, "bf16", None),
        (True, "no", True, True, "no", FASTER),
        (True, None, True, True, None, FASTER),
        (True, "no", True, False, "no", None),
        (True, "no", False, True, "no", None),
    ],
)
def test_the_precision_on_a_cpu(
    wanted, asked, native, training, gets, says, machine, launched, capsys
):
    machine(0, native)
    launched("--config_file configs/4gpu.yaml", ACCELERATE_USE_CPU=str(wanted))
    args = TRAINING if training else None
    for rank in ("0", "1"):
        launched("--config_file configs/4gpu.yaml", RANK=rank)
        if asked:
            launched("--config_file configs/4gpu.yaml", ACCELERATE_MIXED_PRECISION=asked)
        machine.calls.clear()
        assert launch.check(args) is True and machine.calls == ON_CPU
        assert os.environ.get("ACCELERATE_MIXED_PRECISION") == gets
        said = capsys.readouterr().err
        assert said.startswith(f"*** {says}") if says and rank == "0" else said == ""


def test_fp16_on_a_cpu_is_refused(machine, launched):
    launched(ACCELERATE_USE_CPU="true", ACCELERATE_MIXED_PRECISION="fp16")
    with pytest.raises(UserError, match="fp16 silently computes in float32 on a CPU"):
        launch.check()


def test_sharding_is_checked_where_it_is_asked_for(machine, launched, capsys):
    machine(gpus=2)
    launch.check(shards=True)
    assert machine.calls[0][0] != "check"
    launched("--config_file configs/fsdp.yaml", ACCELERATE_USE_FSDP="TRUE", LOCAL_WORLD_SIZE="2")
    for gpus, supported in ((2, True), (0, False)):
        machine(gpus)
        launched("--config_file configs/fsdp.yaml", ACCELERATE_MIXED_PRECISION="bf16")
        launch.check(shards=supported)
        assert machine.calls[0] == ("check", "fsdp.yaml", supported, {"on_cpu": not gpus})
    said = capsys.readouterr().err
    assert "2 processes over gloo, the model sharded over them, precision bf16" in said


@pytest.mark.parametrize("installed", [True, False])
def test_a_package_that_is_not_installed_is_not_searched_again(installed, machine, monkeypatch):
    spec = {"lomo_optim": object() if installed else None}
    monkeypatch.setattr(launch.importlib.util, "find_spec", spec.__getitem__)
    monkeypatch.setitem(sys.modules, "lomo_optim", "")
    del sys.modules["lomo_optim"]
    launch.check()
    assert sys.modules.get("lomo_optim", "searched") == ("searched" if installed else None)


def test_what_lowers_memory_is_remembered(machine, capsys):
    launch.check(SimpleNamespace(lora_rank=0), shards=True)
    launch.print_banner(accelerator(), 48)
    said = memory.message(0, "why")
    assert "48 samples" in said and "--lora_rank" in said and "FSDP" in said


def test_what_every_accelerator_is_given(monkeypatch):
    monkeypatch.setattr(launch.tracking, "trackers", {"none": [], "wandb": ["wandb"]}.__getitem__)
    args = SimpleNamespace(seed=7, timeout=30, output_dir="runs/a")
    options = launch.accelerator_options(args)
    loaders = options.pop("dataloader_config")
    assert loaders.split_batches and loaders.use_seedable_sampler and loaders.non_blocking
    assert loaders.data_seed == 7
    accumulation = options.pop("gradient_accumulation_plugin")
    assert accumulation.num_steps == 1 and accumulation.sync_with_dataloader is False
    (handler,) = options.pop("kwargs_handlers")
    assert handler.timeout == timedelta(seconds=30)
    assert options == {"log_with": None, "project_dir": "runs/a/tensorboard"}
    args.gradient_accumulation_steps, args.track = 4, "wandb"
    options = launch.accelerator_options(args)
    assert options["gradient_accumulation_plugin"].num_steps == 4
    assert options["log_with"] == ["wandb"]


# ----------------------------------------------------------------------------------------- banner


def test_the_banner(capsys, launched, monkeypatch):
    def banner(mine, *batch):
        return launch.print_banner(mine, *batch), capsys.readouterr().out

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert banner(accelerator(mixed_precision="bf16"), 32) == (
        32,
        "train_a: 1 process, each on CPU, 1 thread, precision bf16\n"
        "global batch 32 = 1 process x 32 samples x 1 accumulation step\n",
    )
    launched("--nnodes 1:3", WORLD_SIZE="2", GROUP_WORLD_SIZE="1")
    monkeypatch.setattr(launch.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    elastic = (
        "elastic training: when machines leave or join, the run continues from its last "
        "checkpoint with 2, 4 or 6 processes\n"
    )
    batch = "global batch 48 = 2 processes x 12 samples x 2 accumulation steps\n"
    assert banner(accelerator(2), 48, 2) == (
        12,
        "train_a: 2 processes over gloo, each on CPU, 4 threads, precision no\n" + batch + elastic,
    )
    launched("--nnodes 1:2")
    assert banner(accelerator(2), 48, 2)[1].endswith("checkpoint with 2 or 4 processes\n")
    launched("--nnodes 1:3")
    assert banner(accelerator(2, rank=1), 48, 2) == (12, "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    start = "train_a: 2 processes over gloo, each on NVIDIA H100, precision no\n" + batch
    for deterministic in (True, False):
        monkeypatch.setattr(
            torch, "are_deterministic_algorithms_enabled", lambda on=deterministic: on
        )
        _, said = banner(accelerator(2, device="cuda"), 48, 2)
        assert said.startswith(start) and said.endswith(elastic)
        fastest = "the fastest algorithms (--nondeterministic): the same samples in every step"
        assert (fastest in said) is not deterministic


@pytest.mark.parametrize(
    ("device", "precision", "refused"),
    [
        ("cuda", "bf16", True),
        ("cuda", "fp16", False),
        ("cuda", "no", False),
        ("cpu", "bf16", False),
    ],
)
def test_gpus_that_only_emulate_bf16_are_refused(device, precision, refused, launched, monkeypatch):
    asked = []
    launched("--config_file configs/2gpu.yaml", LOCAL_WORLD_SIZE="2")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda d: asked.append(d) or (8 - d, 0)
    )
    mine = accelerator(device=device, mixed_precision=precision, is_main_process=False)
    with pytest.raises(UserError, match=r"^2gpu.yaml") if refused else contextlib.nullcontext():
        assert launch.print_banner(mine, 8) == 8
    assert asked == ([0, 1] if refused else [])


def test_a_launch_that_was_not_connected_names_its_configuration(launched):
    launched("--config_file configs/4gpu.yaml", WORLD_SIZE="4")
    with pytest.raises(UserError) as error:
        launch.print_banner(accelerator(1), 32)
    assert str(error.value) == (
        "4 processes were launched but Accelerate connected only 1: check distributed_type in "
        "4gpu.yaml"
    )
    launched(WORLD_SIZE="1", ACCELERATE_USE_FSDP="true")
    with pytest.raises(UserError, match=r"^this launch asks for a sharded model, but accelerate"):
        launch.print_banner(accelerator(1), 32)


@pytest.mark.parametrize(
    ("options", "environment", "processes", "possible", "words"),
    [
        ("", {}, 3, [3], "3"),
        ("", {"PET_NNODES": "1:4"}, 3, [3, 6, 9, 12], "3, 6, 9 or 12"),
        ("", {"PET_NNODES": "1:4", "GROUP_WORLD_SIZE": "2"}, 4, [2, 4, 6, 8], "2, 4, 6 or 8"),
        ("", {"PET_NNODES": "1:4", "GROUP_WORLD_SIZE": "2"}, 3, [3], "3"),  # machines differ
        ("--nnodes 2:3", {"PET_NNODES": "1", "GROUP_WORLD_SIZE": "2"}, 4, [4, 6], "4 or 6"),
        ("--nnodes 2", {"GROUP_WORLD_SIZE": "2"}, 4, [4], "4"),
    ],
)
def test_the_processes_that_a_launch_can_have(
    options, environment, processes, possible, words, launched
):
    launched(options, **environment)
    assert launch.possible_processes(accelerator(processes)) == possible
    assert launch.either(possible) == words


def test_a_batch_must_fit_every_number_of_processes(launched):
    assert launch.split_batch(accelerator(4), 96, 3) == 8
    with pytest.raises(UserError, match=r"use 96 or 108$"):
        launch.split_batch(accelerator(4), 100, 3)
    launched("--nnodes 1:3")
    share = launch.split_batch(accelerator(2), 24, 2)
    assert share == 6 and type(share) is int
    with pytest.raises(UserError, match=r"over 2, 4 or 6 process.*: use 24 or 48$"):
        launch.split_batch(accelerator(2), 32, 2)
    with pytest.raises(UserError, match=r"step\(s\): use 24$"):
        launch.split_batch(accelerator(2), 8, 2)


# ---------------------------------------------------------------------------------------- network


@pytest.mark.parametrize(
    ("machines", "resolved", "exported", "reached_by", "expected"),
    [
        (None, "127.0.1.1", None, "eth7", None),
        ("1", "127.0.1.1", None, "eth7", None),
        ("2", "127.0.1.1", None, "eth7", "eth7"),
        ("2", "192.0.2.5", None, "eth7", None),
        ("2", None, None, "eth7", "eth7"),
        ("2", "127.0.1.1", "ib0", "eth7", "ib0"),
        ("2", "127.0.1.1", None, None, None),
    ],
)
def test_gloo_does_not_listen_on_a_loopback_address(
    machines, resolved, exported, reached_by, expected, launched, monkeypatch, capsys
):
    """It listens on the address of the host name, and would tell other machines to connect to
    127.0.1.1.
    """

    def resolve(name):
        if resolved is None:
            raise OSError("no such host")
        return {"me": resolved}[name]

    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(launch, "interface_to", {"10.77.0.1": reached_by}.__getitem__)
    given = {"GROUP_WORLD_SIZE": machines, "GLOO_SOCKET_IFNAME": exported}
    launched(MASTER_ADDR="10.77.0.1", **{name: value for name, value in given.items() if value})
    launch.set_gloo_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
    said = capsys.readouterr().err
    loopback = r"\*\*\* the host name of this machine is that of a loopback address: export GLOO"
    assert re.match(loopback, said) if reached_by is None else said == ""


NETWORK = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5", "down0": "10.2.0.5"}


@pytest.mark.parametrize(
    ("names", "own", "found"),
    [
        (NETWORK, "10.1.0.5", "ib0"),
        (NETWORK, "10.2.0.5", None),
        (NETWORK, None, None),
        (["lo", "eth0", "down0"], None, "eth0"),
        (["lo", "eth0"], "127.0.0.1", "eth0"),
        (["lo"], "127.0.0.1", None),
    ],
)
def test_the_interface_to_a_host(names, own, found, monkeypatch):
    class Probe(contextlib.nullcontext):
        def __init__(self, *kind):
            assert kind == (socket.AF_INET, socket.SOCK_DGRAM)
            super().__init__(self)

        def connect(self, address):
            assert address == ("head", 9)
            if own is None:
                raise OSError("Network is unreachable")

        def getsockname(self):
            return own, 40_000

    def entries(name):
        v6 = SimpleNamespace(family=socket.AF_INET6, address=f"fe80::{name}")
        return [v6, SimpleNamespace(family=socket.AF_INET, address=NETWORK[name])]

    up = {name: SimpleNamespace(isup=name != "down0") for name in names}
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(launch.psutil, "net_if_addrs", lambda: {n: entries(n) for n in names})
    monkeypatch.setattr(launch.psutil, "net_if_stats", lambda: up)
    assert launch.interface_to("head") == found
