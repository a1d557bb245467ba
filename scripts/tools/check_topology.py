"""Checks a cluster before a long job: what runs where, can processes communicate, and how fast.

    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/tools/check_topology.py
    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/tools/check_topology.py \\
        --max_bytes 4194304
    sbatch --nodes=2 --gpus-per-node=4 scripts/submit.sbatch scripts/tools/check_topology.py \\
        --output_dir runs/check_topology

Prints a table of all processes, and stops with one line for each problem: a process that never
starts or that the others cannot reach, two processes on one GPU, versions that differ between
machines. (Each training script checks at its start that the machines share its folder and have the
same data.) Then it measures the all-reduce of data parallel training for messages of 1 KiB to
--max_bytes, and prints how long averaging the gradients takes for models of several sizes. It
writes `topology.json`.

The bus bandwidth is bytes / seconds x 2 (n - 1) / n: what an ideal ring transfers over the link of
each of n processes (NVIDIA nccl-tests, doc/PERFORMANCE.md).

This script cannot detect a launcher that never starts, because the other launchers wait for it
before they start the script. To limit that wait to 60 s, use --rdzv_conf join_timeout=60 with c10d,
or --rdzv_conf timeout=60 with a static rendezvous.
"""

import json
import os
import platform
import socket
import statistics
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

# Finds `utils` and the training scripts next to this script (a copy) or above (the repository).
sys.path[1:1] = map(str, Path(__file__).resolve().parents[1:3])
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # before torch: a signal during the slow imports must not be lost

import psutil
import torch
import torch.distributed as dist

from utils.run import launch
from utils.run.arguments import SECONDS, Parser, number
from utils.run.entry import run
from utils.run.failures import RunFailed, UserError
from utils.run.files import write_json
from utils.run.output import plural
from utils.run.record import versions

RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
REPEATED = 1.0  # seconds for which an all-reduce of each size is repeated


# ------------------------------------------------------------------------------------ what is there


def describe_process(on_cpu):
    """Describes this process, as values that JSON can hold."""
    description = {
        "rank": RANK,
        "host": socket.gethostname(),
        "local_rank": LOCAL_RANK,
        "device": platform.processor() or platform.machine(),
        "uuid": None,
        "memory_bytes": psutil.virtual_memory().total,
        "backend": "gloo" if on_cpu else "nccl",
        "versions": versions(),
    }
    if not on_cpu:
        properties = torch.cuda.get_device_properties(LOCAL_RANK)
        description["device"] = properties.name
        description["uuid"] = str(properties.uuid)
        description["memory_bytes"] = properties.total_memory
        description["versions"]["cuda"] = torch.version.cuda
        description["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return description


def connect_store(timeout):
    """Connects to the store of the launch, which needs no process group.

    Raises:
        RunFailed: the store cannot be reached from this machine.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # The launcher's agent may already host the store.
    is_server = RANK == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options = dict(wait_for_workers=False, multi_tenant=True)
    try:
        store = dist.TCPStore(host, port, None, is_server, timedelta(seconds=timeout), **options)
    except dist.DistError as error:
        raise RunFailed(
            f"rank {RANK} on {socket.gethostname()} cannot reach {host}:{port}: open that port on "
            f"the first machine, and check --main_process_ip ({str(error).splitlines()[0]})",
            rank_variable="LOCAL_RANK",
        ) from None
    # A restarted launch must not read what the attempt before it wrote.
    run, attempt = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RUN_ID", "RESTART_COUNT"))
    return dist.PrefixStore(f"check_topology/{run}/{attempt}", store)


def gather_descriptions(store, description, timeout):
    """Gathers the descriptions of all processes, ordered by rank.

    Uses the store, because a process group cannot be created while a process is missing.

    Raises:
        RunFailed: some processes did not start within `timeout` seconds. The first that did
            prints it.
    """
    deadline = time.monotonic() + timeout
    keys = [f"process/{rank}" for rank in range(WORLD)]
    try:
        store.set(keys[RANK], json.dumps(description))
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        present = [json.loads(store.get(key)) for key in keys if store.check([key])]
    except dist.DistError:  # another process reached the deadline first, and took the store along
        raise RunFailed("another process gave up first, and took the store along") from None
    if len(present) == WORLD:
        return present
    ranks = [entry["rank"] for entry in present]
    missing = ", ".join(str(rank) for rank in range(WORLD) if rank not in ranks)
    by_host = grouped((entry["host"], str(entry["rank"])) for entry in present)
    started = "; ".join(f"{host} has {', '.join(members)}" for host, members in by_host.items())
    raise RunFailed(
        f"rank {missing} of {WORLD} did not start within {timeout} s (started: {started})",
        rank_variable=None if ranks[0] == RANK else "RANK",
    )


def grouped(pairs):
    """Groups pairs: the first of a pair -> list of the different seconds."""
    groups = {}
    for key, value in pairs:
        groups.setdefault(key, {})[value] = True
    return {key: list(values) for key, values in groups.items()}


def problems_of(entries):
    """A line for each problem: shared GPUs, machines without one, and versions that differ."""
    problems = []
    gpus = ((entry["uuid"], entry["host"]) for entry in entries)
    ranks = (f"rank {entry['rank']}" for entry in entries)
    for (uuid, host), sharing in grouped(zip(gpus, ranks, strict=True)).items():
        if uuid and len(sharing) > 1:
            problems.append(
                f"{' and '.join(sharing)} share one GPU of {host} ({uuid}): use one process per "
                "GPU; check CUDA_VISIBLE_DEVICES and the GPUs that the scheduler assigned to each "
                "launcher"
            )
    by_backend = grouped((entry["backend"], entry["host"]) for entry in entries)
    if len(by_backend) > 1:
        problems.append(
            f"no usable GPU on {', '.join(by_backend['gloo'])}, although other machines have one: "
            "run nvidia-smi there"
        )
    for name in sorted({name for entry in entries for name in entry["versions"]}):
        having = [entry for entry in entries if name in entry["versions"]]  # CPUs have no CUDA
        by_version = grouped((entry["versions"][name], entry["host"]) for entry in having)
        if len(by_version) > 1:
            listing = ", ".join(f"{key} on {', '.join(on)}" for key, on in by_version.items())
            problems.append(
                f"different versions of {name}: {listing}: install the same version on all machines"
            )
    return problems


def table(entries):
    """The table of processes, as text."""
    line = "{:<4}  {:<20}  {:<5}  {:<45}  {:<8}  {:<7}  {}".format
    lines = [line("rank", "host", "local", "device", "memory", "backend", "torch")]
    for entry in entries:
        device = f"{entry['device']} {entry['uuid'][:13]}" if entry["uuid"] else entry["device"]
        memory, torch_version = entry["memory_bytes"] / 2**30, entry["versions"]["torch"]
        where = (entry["rank"], entry["host"], entry["local_rank"], device)
        lines.append(line(*where, f"{memory:.0f} GiB", entry["backend"], torch_version))
    return "\n".join(lines)


# -------------------------------------------------------------------------- speed of communication


def connect(backend, device, timeout, **options):
    """Connects all processes over `backend`, within `timeout` seconds.

    Raises:
        RunFailed: this process could not reach another one.
    """

    def give_up():
        if RANK == 0:
            print(
                f"error: all processes reached rank 0, but not each other over {backend} within "
                f"{timeout} s: open all ports between machines, and check "
                f"{backend.upper()}_SOCKET_IFNAME (NCCL_DEBUG=INFO prints details)",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)

    # A process that cannot connect blocks in C++, where Python code of the main thread does not
    # run. Rank 0 first, because the launcher stops the others when a process exits.
    watchdog = threading.Timer(timeout if RANK == 0 else 1.5 * timeout, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        patience = timedelta(seconds=2 * timeout)  # longer than that of the watchdog
        create = dist.new_group if dist.is_initialized() else dist.init_process_group
        group = create(backend=backend, timeout=patience, **options)
        dist.all_reduce(torch.ones(1, device=device), group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except (RuntimeError, dist.DistError) as error:
        variable, host = f"{backend.upper()}_SOCKET_IFNAME", socket.gethostname()
        interface = launch.interface_to(os.environ["MASTER_ADDR"]) or "(see `ip address`)"
        raise RunFailed(
            f"rank {RANK} on {host} cannot reach the others over {backend}: open all ports "
            f"between machines, and try export {variable}={interface} on {host} "
            f"({str(error).splitlines()[0]})",
            rank_variable="LOCAL_RANK",
        ) from None
    watchdog.cancel()


def measure_all_reduce(device, max_bytes):
    """Times the all-reduce of float32 messages of 1 KiB, 4 KiB, ... `max_bytes`.

    Returns:
        list[dict]: for each message `bytes`; `seconds`, the median of the calls that take about
        `REPEATED` seconds, each the time of the slowest process; `bus_bandwidth` in bytes per
        second.
    """
    rows, size = [], 1024
    while size <= max_bytes:
        message, times, repeats = torch.ones(size // 4, device=device), [], 5
        while len(times) < repeats:
            dist.barrier()
            start_time = time.perf_counter()
            dist.all_reduce(message)
            if message.is_cuda:
                torch.cuda.synchronize()
            slowest = torch.tensor([time.perf_counter() - start_time], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(slowest.item())
            message.fill_(1)  # otherwise the sums would grow without bound
            if len(times) == 3:  # after two that are a warm-up
                repeats = min(100, max(5, int(REPEATED / times[-1])))
        median = statistics.median_high(times[2:])
        bandwidth = size / median * 2 * (WORLD - 1) / WORLD
        rows.append({"bytes": size, "seconds": median, "bus_bandwidth": bandwidth})
        size *= 4
    return rows


def summarize(rows, entries):
    """The measured all-reduces as a table, and what they mean for training."""
    line = "{:<9}  {:<14}  {}".format
    lines = [line("message", "time", "bus bandwidth")]
    for row in rows:
        size, milliseconds = row["bytes"] / 2**10, row["seconds"] * 1e3
        size = f"{size:.0f} KiB" if size < 1024 else f"{size / 1024:g} MiB"
        bandwidth = f"{row['bus_bandwidth'] / 1e9:.2f} GB/s"
        lines.append(line(size, f"{milliseconds:.3f} ms", bandwidth))
    latency, best = rows[0]["seconds"], max(row["bus_bandwidth"] for row in rows)
    times = []
    for millions in (10, 100, 1000):
        seconds = latency + 4e6 * millions / best * 2 * (WORLD - 1) / WORLD
        times.append(f"{seconds * 1e3:,.0f} ms for {millions:,} million")
    measured = "\n".join(lines)
    machines = plural(len({entry["host"] for entry in entries}), "machine")
    return (
        f"all-reduce over {dist.get_backend()}\n{measured}\n\n"
        f"{WORLD} processes on {machines} can communicate: "
        f"{latency * 1e6:,.0f} us for the smallest message, {best / 1e9:.2f} GB/s "
        f"bus bandwidth at best.\nAveraging float32 gradients takes about {', '.join(times)} "
        "parameters. A backward pass that takes longer hides this time; if yours is shorter, use a "
        "larger --batch_size."
    )


# -------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    on_cpu = launch.set_up(shards=True)
    store = connect_store(args.timeout) if WORLD > 1 else None
    description = describe_process(on_cpu)
    if WORLD == 1:
        print(f"{table([description])}\none process: nothing to measure")
        return
    entries = gather_descriptions(store, description, args.timeout)
    if RANK == 0:
        print(table(entries), flush=True)
    if problems := problems_of(entries):
        raise UserError("\nerror: ".join(problems))

    device = torch.device("cpu") if on_cpu else torch.device("cuda", LOCAL_RANK)
    if not on_cpu:
        torch.cuda.set_device(device)
    options = dict(store=store, rank=RANK, world_size=WORLD, device_id=None if on_cpu else device)
    connect(description["backend"], device, args.timeout, **options)
    # The training scripts also use gloo, to agree when to stop and to wait for work on files.
    if not on_cpu:
        connect("gloo", torch.device("cpu"), args.timeout)
    rows = measure_all_reduce(device, args.max_bytes)
    if RANK == 0:
        print(f"\n{summarize(rows, entries)}")
        record = {"processes": entries, "all_reduce": rows}
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "topology.json", record)
    dist.destroy_process_group()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--output_dir",
        default="runs/check_topology",
        help="folder for topology.json",
    )
    parser.add_argument(
        "--timeout",
        type=SECONDS,
        default=60,
        help="seconds to wait for the other processes",
    )
    parser.add_argument(
        "--max_bytes",
        type=number(int, 1024, most=2**34),  # 16 GiB: gradients of 4 billion parameters
        default=2**26,
        help="size of the largest message",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
