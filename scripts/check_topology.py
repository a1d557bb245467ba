"""Checks a cluster before a long job: which process runs where, can they communicate, and how fast?

    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/check_topology.py
    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/check_topology.py --max_bytes 4194304
    sbatch --nodes=2 --gpus-per-node=4 scripts/submit.sbatch scripts/check_topology.py --output_dir runs/check_topology

Prints a table of all processes, and stops with one line for each problem: a process that never starts or that the others
cannot reach, two processes on one GPU, versions or clocks that differ between machines, an output or data folder that
differs between machines. Then it measures the all-reduce of data parallel training for messages of 1 KiB to --max_bytes,
and prints how long averaging the gradients takes for models of several sizes. It writes `topology.json` and `allreduce.png`.

The bus bandwidth is bytes / seconds x 2 (n - 1) / n: what an ideal ring transfers over the link of each of n processes
(NVIDIA nccl-tests, doc/PERFORMANCE.md). This script cannot detect a launcher that never starts, because the other
launchers wait for it before they start the script. To limit that wait to 60 s, use --rdzv_conf join_timeout=60 with c10d, or
--rdzv_conf timeout=60 with a static rendezvous.
"""

import contextlib
import json
import os
import platform
import socket
import sys
import threading
import time
import uuid
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()

import psutil
import torch
import torch.distributed as dist

from utils import plots, report, topology
from utils.arguments import Parser, number
from utils.exits import RunFailed, UserError

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# -------------------------------------------------------------------------------------------------------- processes


def describe_process(on_cpu, folder, data):
    """Describes this process, as values that JSON can hold."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    description = {
        "rank": RANK,
        "host": socket.gethostname(),
        "local_rank": local_rank,
        "device": platform.processor() or platform.machine(),
        "uuid": None,
        "memory_bytes": psutil.virtual_memory().total,
        "backend": "gloo" if on_cpu else "nccl",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "accelerate")},
        "output_dir": read_marker(folder),
        "data": data_summary(data),
    }
    if not on_cpu:
        properties = torch.cuda.get_device_properties(local_rank)
        description |= {"device": properties.name, "uuid": str(properties.uuid), "memory_bytes": properties.total_memory}
        description["versions"] |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return description


def read_marker(folder):
    """Reads the random id that the first process writes to `folder`: processes that read equal ids share the folder."""
    marker = Path(folder) / ".check_topology"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            # Written under a unique name and then linked, which is atomic: no process reads an incomplete marker.
            own = marker.with_name(f"{marker.name}.{uuid.uuid4().hex}")
            own.write_text(uuid.uuid4().hex)
            os.link(own, marker)
        except FileExistsError:
            pass
        finally:
            own.unlink(missing_ok=True)
        return marker.read_text()
    except OSError as error:
        return f"cannot be written: {error.strerror}"


def remove_marker(folder):
    with contextlib.suppress(OSError):  # there is none in a folder that cannot be written
        (Path(folder) / ".check_topology").unlink()


def data_summary(path):
    """The number and total size of the files below `path`; None if it is not a local path (a Hub id, `synthetic`)."""
    path = Path(path)
    if not path.exists():
        return None
    files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
    return f"{len(files)} file(s), {sum(file.stat().st_size for file in files):,} bytes"


def gather_descriptions(store, own, timeout):
    """Gathers the descriptions of all processes, ordered by rank.

    Uses the store, because a process group cannot be created while a process is missing.

    Raises:
        RunFailed: raised by every process that has started, if others do not start within `timeout` seconds.
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
            ranks = {process["rank"] for process in present}
            missing = ", ".join(str(rank) for rank in range(WORLD) if rank not in ranks)
            hosts = "; ".join(
                f"{host} has {', '.join(str(process['rank']) for process in present if process['host'] == host)}"
                for host in dict.fromkeys(process["host"] for process in present)
            )
            message = f"rank {missing} of {WORLD} did not start within {timeout} s ({hosts})"
            store.set("missing", message)
            if RANK == min(ranks) != 0:  # rank 0, which prints errors, is missing
                print(f"error: {message}", file=sys.stderr, flush=True)
            leave_store(store, len(present))
            raise RunFailed(message)
        time.sleep(0.05)
    return [json.loads(store.get(key)) for key in keys]


def leave_store(store, present):
    """Makes rank 0, which may host the store, wait until the other `present` processes have read it; call it before exiting."""
    if RANK:
        store.add("left", 1)
        return
    deadline = time.monotonic() + 5
    while store.add("left", 0) < present - 1 and time.monotonic() < deadline:
        time.sleep(0.05)


def clock_skews(store, timeout):
    """Measures how far the clock of each process is ahead of rank 0's clock.

    As in NTP (RFC 5905), rank 0 takes the time when it asks and when the answer arrives; the other process answered at some
    moment in between. The fastest of 5 answers counts.

    Returns:
        dict: rank -> (seconds ahead, uncertainty in seconds); empty on all ranks but 0.
    """
    skews = {}
    for rank in range(1, WORLD):
        best = None
        for attempt in range(5):
            key = f"clock/{rank}/{attempt}"
            if RANK == 0:
                asked = time.time()
                store.set(f"{key}/asked", "")
                store.wait([f"{key}/time"], timedelta(seconds=timeout))
                answered = time.time()
                clock = float(store.get(f"{key}/time"))
                round_trip = answered - asked
                if best is None or round_trip < best[1]:
                    best = clock - (asked + answered) / 2, round_trip
            elif rank == RANK:
                store.wait([f"{key}/asked"], timedelta(seconds=timeout * WORLD))
                store.set(f"{key}/time", repr(time.time()))
        if RANK == 0:
            skews[rank] = best[0], best[1] / 2
    return skews


def find_problems(processes, skews, args):
    """Finds the problems of the launch: a list with one line for each."""
    problems = []
    by_uuid = {}
    for process in processes:
        if process["uuid"]:
            by_uuid.setdefault(process["uuid"], []).append(process)
    for shared in by_uuid.values():
        if len(shared) > 1:
            ranks = " and ".join(f"rank {process['rank']}" for process in shared)
            problems.append(
                f"{ranks} both on GPU {shared[0]['local_rank']} of {shared[0]['host']} ({shared[0]['uuid']}): "
                "use one process per GPU; check CUDA_VISIBLE_DEVICES and the GPUs that the scheduler assigned to each launcher"
            )
    without_gpu = dict.fromkeys(process["host"] for process in processes if process["backend"] == "gloo")
    if without_gpu and any(process["backend"] == "nccl" for process in processes):
        problems.append(f"no usable GPU on {', '.join(without_gpu)}, but on other machines: check nvidia-smi there")
    for name in sorted({name for process in processes for name in process["versions"]}):
        by_version = {}
        for process in processes:
            if name in process["versions"]:
                by_version.setdefault(process["versions"][name], []).append(process["host"])
        if len(by_version) > 1:
            listing = ", ".join(f"{version_} on {', '.join(dict.fromkeys(hosts))}" for version_, hosts in by_version.items())
            problems.append(f"different versions of {name}: {listing}: install the same version on all machines")
    for rank, (skew, uncertainty) in skews.items():
        if abs(skew) - uncertainty > args.max_clock_skew:
            host = processes[rank]["host"]
            problems.append(f"the clock of {host} (rank {rank}) is {skew:+.1f} s off rank 0's: synchronize both with NTP")
    unwritable = [process for process in processes if process["output_dir"].startswith("cannot")]
    if unwritable:
        problems.append(f"--output_dir {args.output_dir} on {unwritable[0]['host']} {unwritable[0]['output_dir']}")
    elif len({process["output_dir"] for process in processes}) > 1:
        others = dict.fromkeys(process["host"] for process in processes if process["output_dir"] != processes[0]["output_dir"])
        problems.append(
            f"--output_dir {args.output_dir} is another folder on {', '.join(others)} than on {processes[0]['host']}: "
            "checkpoints need a folder that all machines share"
        )
    if len({process["data"] for process in processes}) > 1:
        data_by_host = {process["host"]: process["data"] or "nothing" for process in processes}
        listing = ", ".join(f"{data} on {host}" for host, data in data_by_host.items())
        problems.append(f"--dataset {args.dataset} differs: {listing}")
    return problems


def table(processes, skews):
    """The table of processes, as text."""
    rows = [("rank", "host", "local", "device", "memory", "backend", "torch", "clock")]
    for process in processes:
        skew = skews.get(process["rank"], (0.0, 0.0))
        rows.append(
            (
                str(process["rank"]),
                process["host"],
                str(process["local_rank"]),
                process["device"] + (f" {process['uuid'][:13]}" if process["uuid"] else ""),
                f"{process['memory_bytes'] / 2**30:.0f} GiB",
                process["backend"],
                process["versions"]["torch"],
                f"{skew[0] * 1e3:+.1f} ms",
            )
        )
    return report.columns(rows)


# ------------------------------------------------------------------------------------------------------------ speed


def connect(backend, device, timeout, **group):
    """Connects all processes over `backend`, within `timeout` seconds.

    Raises:
        RunFailed: this process could not reach another one.
    """
    watchdog = start_watchdog(timeout, backend)
    try:
        patience = timedelta(seconds=2 * timeout)
        create = dist.new_group if dist.is_initialized() else dist.init_process_group
        group = create(backend=backend, timeout=patience, **group)
        dist.all_reduce(torch.ones(1, device=device), group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except (RuntimeError, dist.DistError) as error:
        variable, host = f"{backend.upper()}_SOCKET_IFNAME", socket.gethostname()
        interface = topology.interface_to(os.environ["MASTER_ADDR"]) or "(see `ip address`)"
        raise RunFailed(
            f"rank {RANK} on {host} cannot reach the others over {backend}: open all ports between machines, and try "
            f"export {variable}={interface} on {host} ({str(error).splitlines()[0]})",
            rank_variable="LOCAL_RANK",
        ) from None
    watchdog.cancel()


def start_watchdog(seconds, backend):
    """Ends this process after `seconds` unless canceled.

    It needs a thread: a process that cannot connect blocks in C++, where Python code of the main thread does not run.
    """

    def on_timeout():
        if RANK == 0:
            print(
                f"error: all processes reached rank 0, but not each other over {backend} within {seconds} s: open all ports "
                f"between machines, and check {backend.upper()}_SOCKET_IFNAME (NCCL_DEBUG=INFO prints details)",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)

    # Rank 0 first, because the launcher stops the others when a process exits.
    timer = threading.Timer(seconds if RANK == 0 else 1.5 * seconds, on_timeout)
    timer.daemon = True
    timer.start()
    return timer


def measure_all_reduce(device, max_bytes, seconds):
    """Times the all-reduce of float32 messages of 1 KiB, 4 KiB, ... `max_bytes`.

    Returns:
        list of dict: bytes, seconds (the median of repeated calls, each the time of the slowest process),
        algorithm_bandwidth and bus_bandwidth in bytes per second.
    """
    sizes = []
    size = 1024
    while size <= max_bytes:
        sizes.append(size)
        size *= 4
    rows = []
    for size in sizes:
        message = torch.ones(size // 4, device=device)
        times = []
        repeats = 5  # the first two are a warm-up; the time of the third determines how many more follow
        while len(times) < repeats:
            dist.barrier()
            start_time = time.perf_counter()
            dist.all_reduce(message)
            if device.type == "cuda":
                torch.cuda.synchronize()
            slowest = torch.tensor([time.perf_counter() - start_time], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(slowest.item())
            message.fill_(1)
            if len(times) == 3:
                repeats = min(100, max(5, int(seconds / times[-1])))
        median = sorted(times[2:])[len(times[2:]) // 2]
        rows.append(
            {
                "bytes": size,
                "seconds": median,
                "algorithm_bandwidth": size / median,
                "bus_bandwidth": size / median * 2 * (WORLD - 1) / WORLD,
            }
        )
    return rows


def bandwidth_table(rows):
    lines = [f"{'message':>10}  {'time':>11}  {'algorithm':>12}  {'bus':>12}"]
    for row in rows:
        size = f"{row['bytes'] / 2**20:g} MiB" if row["bytes"] >= 2**20 else f"{row['bytes'] // 2**10} KiB"
        lines.append(
            f"{size:>10}  {row['seconds'] * 1e3:8.3f} ms  {row['algorithm_bandwidth'] / 1e9:7.2f} GB/s  "
            f"{row['bus_bandwidth'] / 1e9:7.2f} GB/s"
        )
    return "\n".join(lines)


def summarize(rows, processes):
    """Describes what the measured all-reduce means for training."""
    latency, best = rows[0]["seconds"], max(rows, key=lambda row: row["algorithm_bandwidth"])
    machines = len({process["host"] for process in processes})
    gradients = {million: latency + million * 4e6 / best["algorithm_bandwidth"] for million in (10, 100, 1000)}
    times = ", ".join(f"{seconds * 1e3:,.0f} ms for {million:,} million" for million, seconds in gradients.items())
    return (
        f"{WORLD} processes on {machines} machine{'s' * (machines > 1)} can communicate: "
        f"{latency * 1e6:,.0f} us for the smallest message, {best['bus_bandwidth'] / 1e9:.2f} GB/s bus bandwidth at best.\n"
        f"Averaging float32 gradients takes about {times} parameters. If the backward pass is longer, it hides "
        f"this time; if it is shorter, use a larger --batch_size."
    )


# ------------------------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    on_cpu = topology.check_launch(shards=True)
    timeout = timedelta(seconds=args.timeout)
    if WORLD == 1:
        own = describe_process(on_cpu, args.output_dir, args.dataset)
        remove_marker(args.output_dir)
        print(table([own], {}))
        if problems := find_problems([own], {}, args):
            raise UserError("\nerror: ".join(problems))
        print("one process: nothing to measure")
        return
    # The launcher's agent may already host the store.
    is_host = RANK == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(*address, None, is_host, timeout, wait_for_workers=False, multi_tenant=True)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RunFailed(
            f"rank {RANK} on {socket.gethostname()} cannot reach {address[0]}:{address[1]}: open that port on the first "
            f"machine, and check --main_process_ip ({str(error).splitlines()[0]})",
            rank_variable="LOCAL_RANK",
        ) from None
    # A restarted launch must not read what the previous attempt wrote.
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    store = dist.PrefixStore(f"check_topology/{attempt}", store)
    processes = gather_descriptions(store, describe_process(on_cpu, args.output_dir, args.dataset), args.timeout)
    skews = clock_skews(store, args.timeout)
    remove_marker(args.output_dir)  # every process has read it
    if RANK == 0:
        print(table(processes, skews), flush=True)
        store.set("problems", json.dumps(find_problems(processes, skews, args)))
    if problems := json.loads(store.get("problems")):
        leave_store(store, WORLD)
        raise UserError("\nerror: ".join(problems))

    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if not on_cpu:
        torch.cuda.set_device(device)
    group = dict(store=store, rank=RANK, world_size=WORLD, device_id=None if on_cpu else device)
    connect(processes[0]["backend"], device, args.timeout, **group)
    if not on_cpu:  # the training scripts also use gloo, to agree when to stop and to wait for work on files
        connect("gloo", torch.device("cpu"), args.timeout)
    rows = measure_all_reduce(device, args.max_bytes, args.seconds_per_size)
    if RANK == 0:
        print(f"\nall-reduce over {dist.get_backend()}\n{bandwidth_table(rows)}\n\n{summarize(rows, processes)}")
        record = {"processes": processes, "all_reduce": rows}
        (Path(args.output_dir) / "topology.json").write_text(json.dumps(record, indent=1))
        plots.bandwidth(Path(args.output_dir) / "allreduce.png", rows, WORLD, dist.get_backend())
    dist.destroy_process_group()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", default="runs/check_topology", help="folder in which the training will write")
    parser.add_argument("--dataset", default="synthetic", help="data of the training; compared if it is a path")
    parser.add_argument("--timeout", type=number(int, 1), default=60, help="seconds to wait for the other processes")
    parser.add_argument("--max_clock_skew", type=number(float, 0), default=1.0, help="largest allowed difference in seconds")
    parser.add_argument("--max_bytes", type=number(int, 1024), default=2**26, help="size of the largest message")
    parser.add_argument("--seconds_per_size", type=number(float, 0), default=1.0, help="how long to repeat each message")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
