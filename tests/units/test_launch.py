"""What a launch sets up, what it refuses, and what it says; how many processes it can have."""

import contextlib
import os
import socket
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from harness.fakes import accelerator
from harness.launches import ROOT

from utils.run import devices, launch, launcher
from utils.run.failures import UserError
from utils.scale import elastic

NAMES = (
    "RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE MASTER_ADDR PET_NNODES ACCELERATE_USE_CPU "
    "ACCELERATE_USE_FSDP ACCELERATE_USE_PARALLELISM_CONFIG GLOO_SOCKET_IFNAME"
).split()


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """`launched(options, **environment)`: this process alone, started with these words."""
    monkeypatch.setattr(sys, "argv", ["scripts/train_a.py", "--lr", "1"])
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored if the code sets it
        monkeypatch.delenv(name)

    def launch_with(options="", **environment):
        words = ["torchrun", *options.split()]
        monkeypatch.setattr(launcher, "find", lambda: SimpleNamespace(cmdline=lambda: words, pid=7))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    launch_with()
    return launch_with


@pytest.fixture
def set_up(monkeypatch):
    """`set_up(gpus, ...)`: what `launch.set_up` returns on a machine with GPUs, and sets up."""
    calls = []
    for name in ("set_up_gpus", "set_up_cpu"):
        monkeypatch.setattr(
            devices, name, lambda *how, name=name, **more: calls.append((name, *how, more))
        )

    def run(gpus, *args, **more):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        calls.clear()
        on_cpu = launch.set_up(*args, **more)
        return on_cpu, *calls.pop()

    return run


def test_a_machine_with_and_without_gpus(set_up, launched):
    """Accelerate's launcher does not pass `use_cpu` on when it starts several processes."""
    launched("--config_file accelerate_configs/9gpu.yaml")
    for args in (None, *(SimpleNamespace(nondeterministic=given) for given in (False, True))):
        deterministic = not (args and args.nondeterministic)
        assert set_up(8, args) == (False, "set_up_gpus", "9gpu.yaml", 8, deterministic, {})
        assert set_up(0, args) == (True, "set_up_cpu", "9gpu.yaml", False, {})
    launched(f"--config_file {ROOT}/accelerate_configs/2cpu.yaml", LOCAL_WORLD_SIZE="2")
    assert set_up(8) == (True, "set_up_cpu", "2cpu.yaml", True, {})
    launched(ACCELERATE_USE_CPU="True")
    assert set_up(8) == (True, "set_up_cpu", "this launch", True, {})


@pytest.mark.parametrize("kind", ["FSDP", "PARALLELISM_CONFIG"])
def test_only_a_script_that_shards_is_sharded(kind, set_up, launched):
    launched("--config_file configs/fsdp.yaml", **{f"ACCELERATE_USE_{kind}": "TRUE"})
    assert set_up(2, shards=True)[0] is False
    with pytest.raises(UserError, match=r"^fsdp\.yaml shards the model, which train_a\.py"):
        set_up(2)


def test_what_every_accelerator_is_given():
    args = SimpleNamespace(seed=7, timeout=30)
    for given, steps in (({}, 1), ({"gradient_accumulation_steps": 4}, 4)):
        vars(args).update(given)
        options = launch.accelerator_options(args)
        loaders = options.pop("dataloader_config")
        assert loaders.split_batches and loaders.use_seedable_sampler and loaders.non_blocking
        assert loaders.data_seed == 7
        accumulation = options.pop("gradient_accumulation_plugin")
        assert accumulation.num_steps == steps and accumulation.sync_with_dataloader is False
        (handler,) = options.pop("kwargs_handlers")
        assert handler.timeout == timedelta(seconds=30) and options == {}


# ----------------------------------------------------------------------------------------- banner


def test_the_banner(capsys, launched, monkeypatch):
    def banner(mine):
        launch.print_banner(mine)
        return capsys.readouterr().out

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one = "train_a: 1 process, each on CPU, 1 thread, precision bf16\n"
    assert banner(accelerator(mixed_precision="bf16")) == one
    launched(WORLD_SIZE="2")
    monkeypatch.setattr(launch.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    several = "train_a: 2 processes over gloo, each on CPU, 4 threads, precision no\n"
    assert banner(accelerator(2)) == several
    assert banner(accelerator(2, rank=1)) == ""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    on_gpu = "train_a: 2 processes over gloo, each on NVIDIA H100, precision no\n"
    assert banner(accelerator(2, device="cuda")) == on_gpu


@pytest.mark.parametrize(
    ("options", "processes", "batch", "steps", "part", "says"),
    [
        ("", 1, 32, 1, 32, "global batch 32 = 1 process x 32 samples x 1 accumulation step\n"),
        ("", 2, 48, 2, 12, "global batch 48 = 2 processes x 12 samples x 2 accumulation steps\n"),
        ("", 2, 50, 2, None, r"over 2 process\(es\) x 2 accumulation step\(s\): use 48 or 52$"),
        (
            *("--nnodes 1:2", 2, 24, 2, 6),
            "global batch 24 = 2 processes x 6 samples x 2 accumulation steps\n",
        ),
        ("--nnodes 1:3", 2, 32, 2, None, r"over 2, 4 or 6 process.* x 2 .*: use 24 or 48$"),
        ("--nnodes 1:3", 2, 8, 2, None, r": use 24$"),
    ],
)
def test_a_global_batch_is_divided_by_every_number_of_processes(
    options, processes, batch, steps, part, says, launched, capsys
):
    launched(options, GROUP_WORLD_SIZE="1")
    for rank in (0, 1):
        here = accelerator(processes, rank)
        if part is None:
            with pytest.raises(UserError, match=says):
                elastic.divide_batch(here, batch, steps)
        else:
            assert elastic.divide_batch(here, batch, steps) == part
            assert capsys.readouterr().out == ("" if rank else says)


def test_a_launch_is_checked_on_every_process(launched, monkeypatch):
    asked = []
    launched("--config_file configs/2gpu.yaml")
    monkeypatch.setattr(devices, "check_bf16", asked.append)
    for device, precision in (("cuda", "bf16"), ("cuda", "fp16"), ("cpu", "bf16")):
        launch.print_banner(accelerator(1, 1, device, mixed_precision=precision))
    assert asked == ["2gpu.yaml"]  # whose GPUs may lack it
    launched("--config_file configs/4gpu.yaml", WORLD_SIZE="4")
    says = "^4 processes were launched but Accelerate connected only 1: check .* in 4gpu.yaml$"
    with pytest.raises(UserError, match=says):
        launch.print_banner(accelerator(1, 1))


# ---------------------------------------------------------------------------------------- network


ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5", "down0": "10.2.0.5"}
TWO, LOOPBACK = {"GROUP_WORLD_SIZE": "2"}, "127.0.1.1"


@pytest.mark.parametrize(
    ("variables", "resolved", "names", "own", "expected"),
    [
        ({}, LOOPBACK, ADDRESSES, "10.1.0.5", ""),
        ({"GROUP_WORLD_SIZE": "1"}, LOOPBACK, ADDRESSES, "10.1.0.5", ""),
        (TWO, "192.0.2.5", ADDRESSES, "10.1.0.5", ""),
        (TWO | {"GLOO_SOCKET_IFNAME": "eth9"}, LOOPBACK, ADDRESSES, "10.1.0.5", "eth9"),
        (TWO, LOOPBACK, ADDRESSES, "10.1.0.5", "ib0"),
        (TWO, None, ADDRESSES, "10.1.0.5", "ib0"),
        (TWO, LOOPBACK, ADDRESSES, "10.2.0.5", None),
        (TWO, LOOPBACK, ["lo", "eth0", "down0"], None, "eth0"),
        (TWO, LOOPBACK, ["lo"], "127.0.0.1", None),
    ],
)
def test_gloo_tells_no_other_machine_to_connect_to_a_loopback_address(
    variables, resolved, names, own, expected, launched, monkeypatch, capsys
):
    """But to the interface that reaches the first machine, or the only one; None: a person must."""

    def resolve(name):
        if resolved is None:
            raise OSError("no such host")
        return {socket.gethostname(): resolved}[name]

    def connect(address):
        assert address == ("head", 9)
        if own is None:
            raise OSError("Network is unreachable")

    def entries(name):
        v6 = SimpleNamespace(family=socket.AF_INET6, address=f"fe80::{name}")
        return [v6, SimpleNamespace(family=socket.AF_INET, address=ADDRESSES[name])]

    probe = SimpleNamespace(connect=connect, getsockname=lambda: (own, 40_000))
    probes = {(socket.AF_INET, socket.SOCK_DGRAM): contextlib.nullcontext(probe)}
    up = {name: SimpleNamespace(isup=name != "down0") for name in names}
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(socket, "socket", lambda *kind: probes[kind])
    monkeypatch.setattr(launch.psutil, "net_if_addrs", lambda: {n: entries(n) for n in names})
    monkeypatch.setattr(launch.psutil, "net_if_stats", lambda: up)
    launched(MASTER_ADDR="head", **variables)
    launch.set_gloo_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME", "") == (expected or "")
    says = "the host name of this machine is that of a loopback address: export GLOO"
    assert (says in capsys.readouterr().err) == (expected is None)
