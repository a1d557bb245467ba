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
import sys
import threading
import time
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

# Finds `utils` and the training scripts next to this script (a copy) or above (the repository).
sys.path[1:1] = map(str, Path(__file__).resolve().parents[1:3])
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # before torch: a signal during the slow imports must not be lost

import psutil
import torch
import torch.distributed as dist

from utils.report.output import columns, writing_to
from utils.run import launch
from utils.run.arguments import SECONDS, Parser
from utils.run.domains import number
from utils.run.entry import run
from utils.run.failures import RunFailed, UserError

RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
REPEATED = 1.0  # seconds for which an all-reduce of each size is repeated


# --------------------------------------------------------------------------------------- a process


def describe_process(on_cpu):
    """Describes this process, as values that JSON can hold."""
    packages = {name: version(name) for name in ("torch", "accelerate")}
    description = {
        "rank": RANK,
        "host": socket.gethostname(),
        "local_rank": LOCAL_RANK,
        "device": platform.processor() or platform.machine(),
        "uuid": None,
        "memory_bytes": psutil.virtual_memory().total,
        "backend": "gloo" if on_cpu else "nccl",
        "versions": {"python": platform.python_version(), **packages},
    }
    if not on_cpu:
        properties = torch.cuda.get_device_properties(LOCAL_RANK)
        description["device"] = properties.name
        description["uuid"] = str(properties.uuid)
        description["memory_bytes"] = properties.total_memory
        description["versions"]["cuda"] = torch.version.cuda
        description["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return description


# ------------------------------------------------------------------------- all processes, problems


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
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RunFailed(
            f"rank {RANK} on {socket.gethostname()} cannot reach {host}:{port}: open that port on "
            f"the first machine, and check --main_process_ip ({str(error).splitlines()[0]})",
            rank_variable="LOCAL_RANK",
        ) from None
    # A restarted launch must not read what the attempt before it wrote.
    run, attempt = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RUN_ID", "RESTART_COUNT"))
    return dist.PrefixStore(f"check_topology/{run}/{attempt}", store)


def gather_descriptions(store, own, timeout):
    """Gathers the descriptions of all processes, ordered by rank.

    Uses the store, because a process group cannot be created while a process is missing.

    Raises:
        RunFailed: some processes did not start within `timeout` seconds. Raised by all that did.
    """
    store.set(f"process/{RANK}", json.dumps(own))
    deadline = time.monotonic() + timeout
    keys = [f"process/{rank}" for rank in range(WORLD)]
    while not store.check(keys):
        if store.check(["missing"]):  # another process reached the deadline first
            leave_store(store, 2)
            raise RunFailed(store.get("missing").decode())
        if time.monotonic() > deadline:
            present = [json.loads(store.get(key)) for key in keys if store.check([key])]
            message = describe_missing(present, timeout)
            store.set("missing", message)
            if RANK == min(entry["rank"] for entry in present) != 0:
                # Rank 0, which prints errors, is missing.
                print(f"error: {message}", file=sys.stderr, flush=True)
            leave_store(store, len(present))
            raise RunFailed(message)
        time.sleep(0.05)
    return [json.loads(store.get(key)) for key in keys]


def describe_missing(present, timeout):
    """The error message for processes that did not start; `present`: those that did."""
    ranks = [entry["rank"] for entry in present]
    missing = ", ".join(str(rank) for rank in range(WORLD) if rank not in ranks)
    ranks_by_host = {}
    for entry in present:
        ranks_by_host.setdefault(entry["host"], []).append(str(entry["rank"]))
    started = "; ".join(f"{host} has {', '.join(own)}" for host, own in ranks_by_host.items())
    return f"rank {missing} of {WORLD} did not start within {timeout} s (started: {started})"


def leave_store(store, present):
    """Makes rank 0, which may host the store, wait until the other processes have read it.

    Call it before exiting.

    Args:
        present (int): number of processes that have started.
    """
    if RANK:
        store.add("left", 1)
        return
    deadline = time.monotonic() + 5
    while store.add("left", 0) < present - 1 and time.monotonic() < deadline:
        time.sleep(0.05)


def gpu_problems(entries):
    """GPUs that several processes share, and machines without a GPU among others with GPUs."""
    problems, by_uuid = [], {}
    for entry in entries:
        if entry["uuid"]:
            by_uuid.setdefault(entry["uuid"], []).append(entry)
    for sharing in by_uuid.values():
        if len(sharing) > 1:
            ranks = " and ".join(f"rank {entry['rank']}" for entry in sharing)
            gpu = f"GPU {sharing[0]['local_rank']} of {sharing[0]['host']} ({sharing[0]['uuid']})"
            problems.append(
                f"{ranks} share {gpu}: use one process per GPU; check CUDA_VISIBLE_DEVICES and the "
                "GPUs that the scheduler assigned to each launcher"
            )
    by_backend = hosts_by(entries, "backend")
    if len(by_backend) > 1:
        without = ", ".join(by_backend["gloo"])
        problems.append(
            f"no usable GPU on {without}, although other machines have one: run nvidia-smi there"
        )
    return problems


def version_problems(entries):
    """Packages of which different versions are installed."""
    problems = []
    for name in sorted({name for entry in entries for name in entry["versions"]}):
        installed = [
            {"host": entry["host"], "version": entry["versions"][name]}
            for entry in entries
            if name in entry["versions"]  # machines without a GPU have no CUDA
        ]
        by_version = hosts_by(installed, "version")
        if len(by_version) > 1:
            listing = ", ".join(f"{key} on {', '.join(on)}" for key, on in by_version.items())
            problems.append(
                f"different versions of {name}: {listing}: install the same version on all machines"
            )
    return problems


def hosts_by(entries, name):
    """Groups the hosts of `entries`: value of the field `name` -> list of different hosts."""
    groups = {}
    for entry in entries:
        groups.setdefault(entry[name], {})[entry["host"]] = True
    return {value: list(hosts) for value, hosts in groups.items()}


def table(entries):
    """The table of processes, as text."""
    rows = [("rank", "host", "local", "device", "memory", "backend", "torch")]
    for entry in entries:
        device = f"{entry['device']} {entry['uuid'][:13]}" if entry["uuid"] else entry["device"]
        row = (
            str(entry["rank"]),
            entry["host"],
            str(entry["local_rank"]),
            device,
            f"{entry['memory_bytes'] / 2**30:.0f} GiB",
            entry["backend"],
            entry["versions"]["torch"],
        )
        rows.append(row)
    return columns(rows)


# -------------------------------------------------------------------------- speed of communication


def connect(backend, device, timeout, **options):
    """Connects all processes over `backend`, within `timeout` seconds.

    Raises:
        RunFailed: this process could not reach another one.
    """
    watchdog = start_watchdog(timeout, backend)
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


def start_watchdog(seconds, backend):
    """Starts a timer that ends this process after `seconds` unless canceled.

    It needs a thread: a process that cannot connect blocks in C++, where Python code of the main
    thread does not run.
    """

    def on_timeout():
        if RANK == 0:
            print(
                f"error: all processes reached rank 0, but not each other over {backend} within "
                f"{seconds} s: open all ports between machines, and check "
                f"{backend.upper()}_SOCKET_IFNAME (NCCL_DEBUG=INFO prints details)",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)

    # Rank 0 first, because the launcher stops the others when a process exits.
    timer = threading.Timer(seconds if RANK == 0 else 1.5 * seconds, on_timeout)
    timer.daemon = True
    timer.start()
    return timer


def measure_all_reduce(device, max_bytes):
    """Times the all-reduce of float32 messages of 1 KiB, 4 KiB, ... `max_bytes`.

    Returns:
        list[dict]: for each message `bytes`; `seconds`, the median of repeated calls, each the time
        of the slowest process; `algorithm_bandwidth` and `bus_bandwidth` in bytes per second.
    """
    rows = []
    size = 1024
    while size <= max_bytes:
        median = time_all_reduce(torch.ones(size // 4, device=device))
        rows.append(
            {
                "bytes": size,
                "seconds": median,
                "algorithm_bandwidth": size / median,
                "bus_bandwidth": size / median * 2 * (WORLD - 1) / WORLD,
            }
        )
        size *= 4
    return rows


def time_all_reduce(message):
    """The median time of an all-reduce of `message`, repeated for about `REPEATED` seconds."""
    times = []
    # The first two are a warm-up; the time of the third determines how many more follow.
    repeats = 5
    while len(times) < repeats:
        dist.barrier()
        start_time = time.perf_counter()
        dist.all_reduce(message)
        if message.is_cuda:
            torch.cuda.synchronize()
        slowest = torch.tensor([time.perf_counter() - start_time], device=message.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
        message.fill_(1)  # otherwise the sums would grow without bound
        if len(times) == 3:
            repeats = min(100, max(5, int(REPEATED / times[-1])))
    measured = sorted(times[2:])
    return measured[len(measured) // 2]


def bandwidth_table(rows):
    """The measured all-reduces, as text."""
    lines = [f"{'message':>10}  {'time':>11}  {'algorithm':>12}  {'bus':>12}"]
    for row in rows:
        size = f"{row['bytes'] // 2**10} KiB"
        if row["bytes"] >= 2**20:
            size = f"{row['bytes'] / 2**20:g} MiB"
        lines.append(
            f"{size:>10}  {row['seconds'] * 1e3:8.3f} ms  {row['algorithm_bandwidth'] / 1e9:7.2f} "
            f"GB/s  {row['bus_bandwidth'] / 1e9:7.2f} GB/s"
        )
    return "\n".join(lines)


def summarize(rows, entries):
    """Describes what the measured all-reduces mean for training."""
    latency = rows[0]["seconds"]
    best = max(rows, key=lambda row: row["algorithm_bandwidth"])
    machines = len({entry["host"] for entry in entries})
    times = []
    for millions in (10, 100, 1000):
        seconds = latency + 4e6 * millions / best["algorithm_bandwidth"]
        times.append(f"{seconds * 1e3:,.0f} ms for {millions:,} million")
    noun = "machine" if machines == 1 else "machines"
    return (
        f"{WORLD} processes on {machines} {noun} can communicate: "
        f"{latency * 1e6:,.0f} us for the smallest message, {best['bus_bandwidth'] / 1e9:.2f} GB/s "
        f"bus bandwidth at best.\nAveraging float32 gradients takes about {', '.join(times)} "
        "parameters. A backward pass that takes longer hides this time; if yours is shorter, use a "
        "larger --batch_size."
    )


# -------------------------------------------------------------------------------------------- main


def refuse(problems):
    """Prints a line for each problem, and raises UserError with the last one; not without any."""
    for problem in problems[:-1]:
        if RANK == 0:
            print(f"error: {problem}", file=sys.stderr, flush=True)
    if problems:
        raise UserError(problems[-1])


def main():
    args = parse_args()
    on_cpu = launch.set_up(shards=True)
    store = connect_store(args.timeout) if WORLD > 1 else None
    own = describe_process(on_cpu)
    if WORLD == 1:
        print(f"{table([own])}\none process: nothing to measure")
        return
    entries = gather_descriptions(store, own, args.timeout)
    if RANK == 0:
        print(table(entries), flush=True)
    if problems := gpu_problems(entries) + version_problems(entries):
        leave_store(store, WORLD)
        refuse(problems)

    device = torch.device("cpu") if on_cpu else torch.device("cuda", LOCAL_RANK)
    if not on_cpu:
        torch.cuda.set_device(device)
    options = dict(store=store, rank=RANK, world_size=WORLD, device_id=None if on_cpu else device)
    connect(own["backend"], device, args.timeout, **options)
    # The training scripts also use gloo, to agree when to stop and to wait for work on files.
    if not on_cpu:
        connect("gloo", torch.device("cpu"), args.timeout)
    rows = measure_all_reduce(device, args.max_bytes)
    if RANK == 0:
        backend = dist.get_backend()
        print(f"\nall-reduce over {backend}\n{bandwidth_table(rows)}\n\n{summarize(rows, entries)}")
        record = {"processes": entries, "all_reduce": rows}
        with writing_to(args.output_dir) as folder:
            (folder / "topology.json").write_text(json.dumps(record, indent=1))
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
