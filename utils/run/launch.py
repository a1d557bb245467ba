"""Checks a launch, sets up the devices, and says what runs where."""

import importlib.util
import math
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

from utils.report import tracking
from utils.run import cpu, gpu, launcher, memory, process
from utils.run.failures import UserError
from utils.scale import fsdp


def check(args=None, shards=False):
    """Checks that the requested processes can run here; call it before `Accelerator(...)`.

    Args:
        args (Namespace | None): the arguments of a training run, for which a notice is printed if
            bf16 would be faster, and which has deterministic algorithms unless `--nondeterministic`
            is given; None: this is no training run.
        shards (bool): whether the script runs with a sharded model; if not, an FSDP configuration
            is refused.

    Returns:
        bool: whether to run on the CPU, for `Accelerator(cpu=...)`. On a machine without a GPU
        every topology runs on the CPU, with the same number of processes over gloo, and an FSDP
        configuration shards the model there.

    Raises:
        UserError: fewer GPUs than processes on this machine, or a precision or kind of sharding
            that is not supported. (`print_banner` checks bf16.)
    """
    set_gloo_interface()
    memory.remember(args, shards)
    if importlib.util.find_spec("lomo_optim") is None:
        # Accelerate looks for this optional package twice in every optimizer step, which takes
        # 0.05 ms on an AMD EPYC (2026-11-26), and more if packages are on a slow disk. None in
        # sys.modules makes Python skip the search.
        sys.modules["lomo_optim"] = None
    # The launcher passes `use_cpu` on only if it starts a single process; for several, read it from
    # the YAML file.
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    wants_cpu = wants_cpu or _launch_config().get("use_cpu", False)
    gpus = 0 if wants_cpu else torch.cuda.device_count()
    if fsdp.requested():
        fsdp.check(_config_name(), shards, on_cpu=not gpus)
    if gpus:
        _set_up_gpus(gpus, deterministic=not getattr(args, "nondeterministic", False))
    else:
        _set_up_cpu(wants_cpu, training=args is not None)
    return not gpus


def accelerator_options(args):
    """The arguments of `Accelerator(...)` that every training script shares.

    - Loaders yield global batches: each is split over the processes (`split_batches`), so every
      topology sees the same batches in the same order, which depends only on the seed and the
      epoch (`use_seedable_sampler`, `data_seed`).
    - Gradients are accumulated over `--gradient_accumulation_steps` micro-batches, also across the
      end of an epoch.
    - Processes wait for each other at most `--timeout` seconds.
    """
    return dict(
        dataloader_config=DataLoaderConfiguration(
            split_batches=True,
            use_seedable_sampler=True,
            data_seed=args.seed,
            non_blocking=True,
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            getattr(args, "gradient_accumulation_steps", 1), sync_with_dataloader=False
        ),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))],
        log_with=tracking.trackers(getattr(args, "track", "none")) or None,
        project_dir=f"{args.output_dir}/tensorboard",
    )


def print_banner(accelerator, batch_size, gradient_accumulation_steps=1):
    """Checks precision and division of the global batch, and prints once what runs where.

    Returns:
        int: samples per process and micro-batch.

    Raises:
        UserError: a GPU lacks bf16, `batch_size` does not divide evenly, or Accelerate did not
            connect the processes.
    """
    if accelerator.device.type == "cuda" and accelerator.mixed_precision == "bf16":
        # Not in `check`, after which a script may still choose its GPUs: this initializes CUDA.
        gpu.check_bf16(_config_name(), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != launched:
        raise UserError(
            f"{launched} processes were launched but Accelerate connected only "
            f"{accelerator.num_processes}: check distributed_type in {_config_name()}"
        )
    fsdp.check_engaged(accelerator, _config_name())
    micro_batch_size = split_batch(accelerator, batch_size, gradient_accumulation_steps)
    memory.remember_micro_batch_size(micro_batch_size)
    if not accelerator.is_main_process:
        return micro_batch_size
    script = os.path.basename(sys.argv[0]).removesuffix(".py")
    threads = torch.get_num_threads()
    device = f"CPU, {threads} thread{'s' * (threads > 1)}"
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    backend = f" over {dist.get_backend()}" if accelerator.num_processes > 1 else ""
    processes = f"{accelerator.num_processes} process{'es' * (accelerator.num_processes > 1)}"
    accumulation = gradient_accumulation_steps
    steps = f"{accumulation} accumulation step{'s' * (accumulation > 1)}"
    precision = accelerator.mixed_precision
    print(f"{script}: {processes}{backend}, each on {device}, precision {precision}")
    print(f"global batch {batch_size} = {processes} x {micro_batch_size} samples x {steps}")
    if accelerator.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        print(
            "the fastest algorithms (--nondeterministic): the same samples in every step, but "
            "other last bits in every run"
        )
    possible = possible_processes(accelerator)
    if len(possible) > 1:
        print(
            "elastic training: when machines leave or join, the run continues from its last "
            f"checkpoint with {either(possible)} processes"
        )
    return micro_batch_size


def split_batch(accelerator, batch_size, gradient_accumulation_steps):
    """Splits a global batch over processes and micro-batches.

    Returns:
        int: samples per process and micro-batch.

    Raises:
        UserError: `batch_size` does not divide evenly over every number of processes that this
            launch can have; the message suggests the nearest sizes that do.
    """
    possible = possible_processes(accelerator)
    parts = math.lcm(*possible) * gradient_accumulation_steps
    if batch_size % parts:
        below, above = batch_size // parts * parts, (batch_size // parts + 1) * parts
        raise UserError(
            f"--batch_size {batch_size} does not divide evenly over {either(possible)} process(es) "
            f"x {gradient_accumulation_steps} accumulation step(s): use "
            f"{f'{below} or ' if below else ''}{above}"
        )
    return batch_size // (accelerator.num_processes * gradient_accumulation_steps)


def possible_processes(accelerator):
    """The numbers of processes that this launch can have, in ascending order.

    Usually only the present one. With `torchrun --nnodes MIN:MAX` machines may leave and come back,
    and the run continues with those that are there. Machines with different numbers of processes
    are not supported.
    """
    machines = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    nodes = launcher.option("--nnodes") or os.environ.get("PET_NNODES", "")
    fewest, _, most = nodes.partition(":")
    if not most or accelerator.num_processes % machines:
        return [accelerator.num_processes]
    each = accelerator.num_processes // machines
    return [each * count for count in range(int(fewest), int(most) + 1)]


def either(counts):
    """Formats numbers: [2] as "2", [2, 4, 6] as "2, 4 or 6"."""
    *others, last = map(str, counts)
    return f"{', '.join(others)} or {last}" if others else last


def notice(text):
    """Prints a line that stands out."""
    print(f"*** {text} ***", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------- GPUs and CPUs


def _set_up_gpus(gpus, deterministic=True):
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if gpus < processes:
        fits = max(size for size in (1, 2, 4, 8) if size <= gpus)
        raise UserError(
            f"{_config_name()} starts {processes} processes on this machine, which has {gpus} "
            f"GPU{'s' * (gpus > 1)}: use {fits}gpu.yaml",
            rank_variable="LOCAL_RANK",
        )
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        gpu.skip_whole_steps()
    if not deterministic:
        torch.backends.cudnn.benchmark = True  # times its algorithms, and takes the fastest
        return
    # Deterministic algorithms make a resumed run identical bit for bit. An operation that has none
    # prints a warning. They also keep NCCL from reducing inside NVLink switches, where the order of
    # summation varies.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # for speed


def _set_up_cpu(wants_cpu, training):
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    torch.set_num_threads(cpu.threads_per_process())
    cpu.keep_freed_memory()
    if not wants_cpu and "ACCELERATE_MIXED_PRECISION" in os.environ:
        if precision == "fp16" or (precision == "bf16" and not cpu.has_bf16()):
            precision = os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        if process.is_main():
            notice(
                f"NO GPU FOUND: {_config_name()} runs on the CPU with {processes} process"
                f"{'es over gloo' if processes > 1 else ''}, "
                f"{'the model sharded over them, ' * fsdp.requested()}precision {precision}. "
                "This is fine for a test, but far too slow for training"
            )
    elif precision == "fp16":
        raise UserError(
            "mixed_precision fp16 silently computes in float32 on a CPU: use bf16 or no"
        )
    elif process.is_main() and precision == "bf16" and not cpu.has_bf16():
        notice(
            "this CPU has no native bf16 and emulates it, which is far slower than float32: use "
            "--mixed_precision no"
        )
    elif process.is_main() and training and precision == "no" and cpu.has_bf16():
        notice(
            "this CPU has native bf16, 1.5x to 4x faster for all but small models: accelerate "
            "launch --mixed_precision bf16 ..."
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
    """The network interface from which this machine reaches `host` over IPv4, or its only one.

    Returns:
        str | None: None: there are several.
    """
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
            own = probe.getsockname()[0]
        except OSError:
            own = None
    names = set(addresses.values())
    return addresses.get(own) or (names.pop() if len(names) == 1 else None)


def _config_name():
    return os.path.basename(launcher.option("--config_file") or "this launch")


def _launch_config():
    """The fields of the launcher's --config_file."""
    try:
        with open(launcher.option("--config_file") or os.devnull) as file:
            return yaml.safe_load(file) or {}
    except OSError:
        return {}
