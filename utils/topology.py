"""Helpers for processes and devices: check a launch, print what runs where, run functions on some processes first."""

import contextlib
import ctypes
import importlib.util
import math
import os
import platform
import socket
import sys
import traceback
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
import yaml

from utils import exits, fsdp
from utils.exits import UserError

# How long processes wait for one that downloads, decodes, hashes or writes. If it dies instead, its launcher stops them.
PATIENCE = timedelta(hours=3)
_host_group = None


def check_launch(training=False, shards=False):
    """Checks that the requested processes can run here; call it before `Accelerator(...)`.

    Args:
        training (bool): whether this is a training run, which prints a notice if bf16 would be faster.
        shards (bool): whether the script runs with a sharded model; otherwise an FSDP configuration is refused.

    Returns:
        bool: whether to run on the CPU, for `Accelerator(cpu=...)`. On a machine without a GPU every topology runs on the CPU,
        with the same number of processes over gloo, and an FSDP configuration shards the model there.

    Raises:
        UserError: fewer GPUs than processes on this machine, or a precision or kind of sharding that is not supported.
    """
    set_gloo_interface()
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if importlib.util.find_spec("lomo_optim") is None:
        # Accelerate searches for this optional package twice in every optimizer step, which takes 0.1 ms or more. With None in
        # sys.modules, Python does not search.
        sys.modules["lomo_optim"] = None
    # The launcher passes `use_cpu` on only if it starts a single process; for several, read it from the YAML file.
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true" or _launch_config().get("use_cpu", False)
    gpus = 0 if wants_cpu else torch.cuda.device_count()
    if fsdp.requested():
        fsdp.check(_config_name(), shards, on_cpu=not gpus)
    if gpus:
        if gpus < local_processes:
            fits = max(size for size in (1, 2, 4, 8) if size <= gpus)
            raise UserError(
                f"{_config_name()} starts {local_processes} processes on this machine, which has {gpus} "
                f"GPU{'s' * (gpus > 1)}: use {fits}gpu.yaml",
                rank_variable="LOCAL_RANK",
            )
        # Deterministic algorithms make a resumed run identical bit for bit. An operation that has none prints a warning. They
        # also keep NCCL from reducing inside NVLink switches, where the order of summation varies.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # for speed
        return False
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_processes))
    keep_freed_memory()
    if not wants_cpu and "ACCELERATE_MIXED_PRECISION" in os.environ:
        if precision == "fp16" or (precision == "bf16" and not cpu_has_bf16()):
            os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        if exits.is_main():
            _notice(
                f"NO GPU FOUND: {_config_name()} runs on the CPU with {local_processes} process"
                f"{'es over gloo' if local_processes > 1 else ''}, {'the model sharded over them, ' * fsdp.requested()}"
                f"precision {os.environ['ACCELERATE_MIXED_PRECISION']}. "
                "This is fine for a test, but far too slow for training"
            )
    elif precision == "fp16":
        raise UserError("mixed_precision fp16 silently computes in float32 on a CPU: use bf16 or no")
    elif exits.is_main() and precision == "bf16" and not cpu_has_bf16():
        _notice("this CPU has no native bf16 and emulates it, which is far slower than float32: use --mixed_precision no")
    elif exits.is_main() and training and precision == "no" and cpu_has_bf16():
        _notice(
            "this CPU has native bf16, 1.5x to 4x faster for all but small models: accelerate launch --mixed_precision bf16 ..."
        )
    return True


def set_gloo_interface():
    """Sets GLOO_SOCKET_IFNAME on machines whose host name is the name of a loopback address, such as 127.0.1.1.

    Gloo offers the other machines the address of the host name (github.com/pytorch/gloo/issues/223); NCCL finds one itself.
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
        _notice("the host name of this machine is that of a loopback address: export GLOO_SOCKET_IFNAME (see `ip address`)")


def interface_to(host):
    """The network interface from which this machine reaches `host` over IPv4, or its only one; None: it has several."""
    addresses = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and psutil.net_if_stats()[name].isup and not entry.address.startswith("127.")
    }
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # chooses a route, and sends nothing
            own = probe.getsockname()[0]
        except OSError:
            own = None
    names = set(addresses.values())
    return addresses.get(own) or (names.pop() if len(names) == 1 else None)


def cpu_has_bf16():
    """Whether this CPU has native bf16 (AVX-512 BF16 or AMX)."""
    return any(
        check() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported") if (check := getattr(torch.cpu, name, None))
    )


def keep_freed_memory():
    """Makes malloc keep freed memory, so that a step on the CPU reuses that of the step before.

    By default glibc returns the memory of large tensors to the system at once. Each step then gets it back page by page, which
    takes 5 to 10 % of the time.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_max = -1, -4  # the numbers of mallopt's parameters in malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)


def gather(accelerator, value):
    """Gathers a picklable value from every process: a list by rank, the same on all of them.

    Also serves to wait for the slowest process. It uses gloo on the CPU, because NCCL ends a run in which one process works on
    files for longer than `--timeout` while the others wait.
    """
    global _host_group
    if accelerator.num_processes == 1:
        return [value]
    if _host_group is None:
        _host_group = dist.new_group(backend="gloo", timeout=PATIENCE)
        keep_alive()
    values = [None] * accelerator.num_processes
    dist.all_gather_object(values, value, group=_host_group)
    return values


def keep_alive():
    """Turns on TCP keepalive for the connections of this process, those of gloo among them.

    The kernel then reports a machine that lost its power or network, which cannot say so itself, after 40 seconds of silence.
    Without it a process would wait for such a machine as long as the timeout of the group, `PATIENCE`.
    """
    for connection in psutil.Process().net_connections("tcp"):
        if not connection.raddr:
            continue
        address = (connection.fd, connection.family, connection.type)
        with contextlib.suppress(OSError), socket.fromfd(*address) as shared:  # an error: closed since it was listed
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
                if hasattr(socket, option):  # other systems have other names, and longer defaults
                    shared.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def run_on_main(accelerator, function):
    """Runs `function()` on the main process only and returns its (picklable) result on every process.

    An error is raised on every process.
    """
    outcome = _attempt(function) if accelerator.is_main_process else None
    return _result(gather(accelerator, outcome)[0])


def local_main_first(accelerator, function):
    """Runs `function()` on one process per node first, and then on the others, which can use what it cached.

    An error on any process is raised on every process.
    """
    outcome = [None, None]
    for turn in (True, False):
        if accelerator.is_local_main_process == turn:
            outcome = _attempt(function)
        _all_or_none(accelerator, outcome)
    return outcome[0]


def run_on_all(accelerator, function):
    """Runs `function()` on every process and returns its result there. An error on any of them is raised on every one."""
    return _all_or_none(accelerator, _attempt(function))


def split_batch(accelerator, batch_size, gradient_accumulation_steps):
    """Splits a global batch over processes and micro-batches.

    Returns:
        int: samples per process and micro-batch.

    Raises:
        UserError: `batch_size` does not divide evenly over every number of processes that this launch can have; the message
            suggests the nearest sizes that do.
    """
    possible = possible_processes(accelerator)
    parts = math.lcm(*possible) * gradient_accumulation_steps
    if batch_size % parts:
        below, above = batch_size // parts * parts, (batch_size // parts + 1) * parts
        raise UserError(
            f"--batch_size {batch_size} does not divide evenly over {either(possible)} process(es) x "
            f"{gradient_accumulation_steps} accumulation step(s): use {f'{below} or ' if below else ''}{above}"
        )
    return batch_size // (accelerator.num_processes * gradient_accumulation_steps)


def evaluation_batch(accelerator, samples, most):
    """The global batch size for an evaluation of `samples`, with at most `most` samples per process and batch.

    All batches get about the same size: Accelerate fills up the last one with repeated samples, which take time.
    """
    processes = accelerator.num_processes
    batches = math.ceil(samples / (most * processes))
    return math.ceil(samples / (batches * processes)) * processes


def possible_processes(accelerator):
    """The numbers of processes that this launch can have, in ascending order.

    Usually only the present one. With `torchrun --nnodes MIN:MAX` machines may leave and come back, and the run goes on with
    those that are there. Machines with different numbers of processes are not foreseen.
    """
    machines = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    fewest, _, most = (_launcher_option("--nnodes") or os.environ.get("PET_NNODES", "")).partition(":")
    if not most or accelerator.num_processes % machines:
        return [accelerator.num_processes]
    each = accelerator.num_processes // machines
    return [each * count for count in range(int(fewest), int(most) + 1)]


def print_banner(accelerator, batch_size, gradient_accumulation_steps=1):
    """Checks that the global batch divides evenly, and prints once what runs where.

    Returns:
        int: samples per process and micro-batch.

    Raises:
        UserError: `batch_size` does not divide evenly, or Accelerate did not connect the processes.
    """
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1)):
        raise UserError(
            f"{os.environ['WORLD_SIZE']} processes were launched but Accelerate connected only {accelerator.num_processes}: "
            f"check distributed_type in {_config_name()}"
        )
    fsdp.check_engaged(accelerator, _config_name())
    micro_batch = split_batch(accelerator, batch_size, gradient_accumulation_steps)
    exits.remember_micro_batch(micro_batch)
    script = os.path.basename(sys.argv[0]).removesuffix(".py")
    threads = torch.get_num_threads()
    device = f"CPU, {threads} thread{'s' * (threads > 1)}"
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    backend = f" over {dist.get_backend()}" if accelerator.num_processes > 1 else ""
    processes = f"{accelerator.num_processes} process{'es' * (accelerator.num_processes > 1)}"
    steps = f"{gradient_accumulation_steps} accumulation step{'s' * (gradient_accumulation_steps > 1)}"
    if accelerator.is_main_process:
        print(
            f"{script}: {processes}{backend}, each on {device}, precision {accelerator.mixed_precision}\n"
            f"global batch {batch_size} = {processes} x {micro_batch} samples x {steps}"
        )
        if len(possible := possible_processes(accelerator)) > 1:
            print(
                f"elastic: when machines leave or join, the run goes on from its last checkpoint: {either(possible)} processes"
            )
    return micro_batch


def either(counts):
    """Formats numbers: [2] as "2", [2, 4, 6] as "2, 4 or 6"."""
    *others, last = map(str, counts)
    return f"{', '.join(others)} or {last}" if others else last


def seed_step(accelerator, seed, step, micro_batch):
    """Seeds PyTorch's generators for a forward pass, so that dropout draws the same numbers after a restart.

    The seed differs for each process, step and micro-batch. Unlike `set_seed`, this does not seed the generators of Python
    and NumPy, and takes a microsecond instead of half a millisecond.
    """
    seed = (seed + 1_000_003 * step + 7_919 * accelerator.process_index + 104_729 * micro_batch) % 2**32
    torch.default_generator.manual_seed(seed)
    if accelerator.device.type == "cuda":
        torch.cuda.manual_seed(seed)


def sync_batch_norm(accelerator, model, micro_batch, wanted):
    """Makes batch norm compute its statistics over all processes, if `wanted`; call it after the optimizer was built.

    `torch.nn.SyncBatchNorm` needs GPUs. Otherwise each process uses the statistics of its own `micro_batch` samples.

    Returns:
        nn.Module: the model, with the same parameters.
    """
    if not _batch_norms(model):
        return model
    if wanted and accelerator.device.type == "cuda" and accelerator.num_processes > 1:
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if accelerator.is_main_process and wanted and accelerator.num_processes > 1:
        _notice(f"--sync_batchnorm needs GPUs: here batch norm uses the {micro_batch} samples of each process")
    elif accelerator.is_main_process and micro_batch < 32:
        _notice(
            f"batch norm uses the statistics of the {micro_batch} samples that a process computes at a time: accuracy suffers "
            "from fewer than 32; use a larger --batch_size, --sync_batchnorm on several GPUs, or a model without batch norm"
        )
    return model


def _batch_norms(model):
    return [layer for layer in model.modules() if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)]


def describe(accelerator):
    """The topology as a dict, for args.json and checkpoints."""
    return {
        "processes": accelerator.num_processes,
        "machines": int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else platform.processor() or "cpu",
        "threads_per_process": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
    }


def set_up_ddp(accelerator, model, example):
    """Makes DDP sum gradients in the same order after a restart, and broadcast batch norm's statistics only for evaluation.

    DDP first assigns gradients to buckets in reverse parameter order, and after the first backward pass in the order in which
    they became ready. With three or more processes, other buckets mean another order of summation, and the last bits differ.
    Two backward passes bring every run, new or resumed, to the final buckets before its first real step. Buffers are restored,
    and weights do not change.

    By default DDP broadcasts the buffers of rank 0 before every forward pass. Batch norm reads its running statistics only in
    evaluation mode, so they are broadcast only then, unless the model has other buffers.

    Args:
        model: as `prepare` returned it.
        example: an input of `model`.
    """
    norms = _batch_norms(model)
    only_norms = set(model.buffers()) == {buffer for norm in norms for buffer in norm.buffers()}
    if isinstance(model, torch.nn.parallel.DistributedDataParallel) and only_norms:

        def broadcast_for_evaluation(ddp, _):
            ddp.broadcast_buffers = not all(norm.training for norm in norms)

        model.register_forward_pre_hook(broadcast_for_evaluation)
    if accelerator.num_processes < 3:
        return
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    for _ in range(2):
        with torch.compiler.set_stance("force_eager"):  # otherwise kernels would also be compiled for the shape of `example`
            accelerator.backward(model(example).float().sum())
        model.zero_grad()
    for name, value in model.named_buffers():
        value.copy_(buffers[name])


def _attempt(function):
    try:
        return [function(), None]
    except UserError as error:
        return [None, error]
    except Exception as error:
        traceback.print_exc()  # here, because the traceback cannot be sent to the other processes
        return [None, RuntimeError(f"{type(error).__name__}: {error}")]


def _all_or_none(accelerator, outcome):
    return _result([outcome[0], next(filter(None, gather(accelerator, outcome[1])), None)])


def _result(outcome):
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _notice(text):
    print(f"*** {text} ***", file=sys.stderr, flush=True)


def _config_path():
    """The path of the launcher's --config_file, or None."""
    return _launcher_option("--config_file")


def _launcher_option(name):
    """The value of an option on the launcher's command line, or None."""
    try:
        command = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return None
    for option, value in zip(command, [*command[1:], ""], strict=True):
        if option.partition("=")[0] == name:
            return option.partition("=")[2] or value
    return None


def _config_name():
    return os.path.basename(_config_path() or "this launch")


def _launch_config():
    """The fields of the launcher's --config_file."""
    try:
        with open(_config_path() or os.devnull) as file:
            return yaml.safe_load(file) or {}
    except OSError:
        return {}
