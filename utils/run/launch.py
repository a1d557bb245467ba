"""Checks a launch, says what runs where, and connects the machines."""

import os
import socket
import sys
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
import yaml
from accelerate import DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

from utils.run import devices, launcher
from utils.run.failures import UserError
from utils.run.output import notice, plural


def set_up(args=None, shards=False):
    """Sets up the network and the devices of this process; call it before `Accelerator(...)`.

    Args:
        args (Arguments | None): of the script, which may have `--nondeterministic`.
        shards (bool): whether the script sets up a sharded model; if not, an FSDP configuration is
            refused.

    Returns:
        bool: whether to run on the CPU, for `Accelerator(cpu=...)`. On a machine without a GPU
        every topology runs on the CPU, with the same number of processes over gloo.

    Raises:
        UserError: fewer GPUs than processes on this machine, or a precision or kind of sharding
            that is not supported. (`print_banner` checks bf16.)
    """
    set_gloo_interface()
    sharding = [f"ACCELERATE_USE_{kind}" for kind in ("FSDP", "PARALLELISM_CONFIG")]
    if "true" in [os.environ.get(name, "").lower() for name in sharding] and not shards:
        raise UserError(
            f"{config_name()} shards the model, which {os.path.basename(sys.argv[0])} does not "
            "support: use a configuration without fsdp and parallelism_config"
        )
    # The launcher passes `use_cpu` on only if it starts a single process; for several, read it from
    # the YAML file.
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    wants_cpu = wants_cpu or _launch_config().get("use_cpu", False)
    gpus = 0 if wants_cpu else torch.cuda.device_count()
    if gpus:
        deterministic = not getattr(args, "nondeterministic", False)
        devices.set_up_gpus(config_name(), gpus, deterministic)
        return False
    devices.set_up_cpu(config_name(), wants_cpu)
    return True


def accelerator_options(args):
    """The arguments (dict) of `Accelerator(...)` that every training script shares.

    Loaders yield global batches: each is split over the processes (`split_batches`), so every
    topology sees the same batches in the same order, which depends only on the seed and the epoch
    (`use_seedable_sampler`, `data_seed`). Gradients accumulate across the end of an epoch, too.
    """
    order = dict(split_batches=True, use_seedable_sampler=True, data_seed=args.seed)
    micro_batches = getattr(args, "gradient_accumulation_steps", 1)
    accumulation = GradientAccumulationPlugin(micro_batches, sync_with_dataloader=False)
    return dict(
        dataloader_config=DataLoaderConfiguration(**order, non_blocking=True),
        gradient_accumulation_plugin=accumulation,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))],
    )


def print_banner(accelerator):
    """Prints what runs where; raises UserError if a GPU lacks bf16 or processes do not connect."""
    on_gpu = accelerator.device.type == "cuda"
    if on_gpu and accelerator.mixed_precision == "bf16":
        # Not in `set_up`, after which a script may still choose its GPUs: this initializes CUDA.
        devices.check_bf16(config_name())
    launched, processes = int(os.environ.get("WORLD_SIZE", 1)), accelerator.num_processes
    if processes != launched:
        raise UserError(
            f"{launched} processes were launched but Accelerate connected only {processes}: check "
            f"distributed_type in {config_name()}"
        )
    if accelerator.is_main_process:
        threads = torch.get_num_threads()
        device = torch.cuda.get_device_name() if on_gpu else f"CPU, {plural(threads, 'thread')}"
        backend = f" over {dist.get_backend()}" if processes > 1 else ""
        several = plural(processes, "process")
        script = os.path.basename(sys.argv[0]).removesuffix(".py")
        where = f"{several}{backend}, each on {device}"
        print(f"{script}: {where}, precision {accelerator.mixed_precision}")


def divide_batch(accelerator, batch_size, gradient_accumulation_steps=1):
    """Divides the global batch over the processes, and prints once how.

    Returns the samples per process and micro-batch; raises UserError if it does not divide evenly.
    """
    processes = accelerator.num_processes
    parts = processes * gradient_accumulation_steps
    accumulation = f"{gradient_accumulation_steps} accumulation step(s)"
    check_division(batch_size, parts, f"{processes} process(es) x {accumulation}")
    if accelerator.is_main_process:
        print(
            f"global batch {batch_size} = {plural(processes, 'process')} x {batch_size // parts} "
            f"samples x {plural(gradient_accumulation_steps, 'accumulation step')}"
        )
    return batch_size // parts


def check_division(batch_size, parts, of_what):
    """Raises UserError, which names the nearest sizes, if `parts` (int) do not divide a batch."""
    if batch_size % parts:
        below, above = batch_size // parts * parts, (batch_size // parts + 1) * parts
        sizes = f"{below} or {above}" if below else above
        raise UserError(
            f"--batch_size {batch_size} does not divide evenly over {of_what}: use {sizes}"
        )


# ---------------------------------------------------------------------------- network, the launcher


def set_gloo_interface():
    """Sets GLOO_SOCKET_IFNAME if the host name resolves to a loopback address, such as 127.0.1.1.

    Gloo tells the other machines to connect to the address that the host name resolves to
    (github.com/pytorch/gloo/issues/223). NCCL selects an interface itself.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return
    except OSError:  # the name does not resolve: gloo would use a loopback address
        pass
    interface = interface_to(os.environ["MASTER_ADDR"])
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    else:
        notice(
            "the host name of this machine is that of a loopback address: export "
            "GLOO_SOCKET_IFNAME (see `ip address`)"
        )


def interface_to(host):
    """The interface from which this machine reaches `host` over IPv4, or its only one, or None."""
    addresses = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
        and psutil.net_if_stats()[name].isup
        and not entry.address.startswith("127.")
    }
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # chooses a route, and sends nothing
            address = probe.getsockname()[0]
        except OSError:
            address = None
    names = set(addresses.values())
    return addresses.get(address) or (names.pop() if len(names) == 1 else None)


def config_name():
    """The name of the launcher's --config_file, for messages."""
    return os.path.basename(launcher.option("--config_file") or "this launch")


def _launch_config():
    """The fields of the launcher's --config_file."""
    try:
        with open(launcher.option("--config_file") or os.devnull) as file:
            return yaml.safe_load(file) or {}
    except OSError:
        return {}
