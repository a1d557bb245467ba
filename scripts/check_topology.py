"""Who runs where, can they talk, how fast: look at the ground before a long job starts on it.

    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/check_topology.py
    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/check_topology.py --max_bytes 4194304
    sbatch --nodes=2 --gpus-per-node=4 scripts/submit.sbatch scripts/check_topology.py --output_dir runs/check_topology

Prints a table of all processes; stops with a line for each of: a process that never arrives or that the others cannot
reach, two processes on one GPU, versions or clocks that differ between machines, an output or data folder that is not
the same everywhere. Then measures the all-reduce that data parallel training does in every step, for messages of 1 KiB
to --max_bytes, and says in words what that means for a model of a given size. `topology.json` and `allreduce.png` hold
what it found.

The bus bandwidth is bytes / seconds x 2 (n - 1) / n: what an ideal ring moves through each process' link, whatever
their number n (NVIDIA nccl-tests, doc/PERFORMANCE.md). A launcher that never starts is not this script's to notice: the
other launchers wait for it (--rdzv_conf join_timeout=60 with c10d, timeout=60 with a static rendezvous).
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

# `utils` lies beside this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()

import psutil
import torch
import torch.distributed as dist

from utils import plots, topology
from utils.arguments import Parser, number
from utils.exits import RunFailed, UserError

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# ----------------------------------------------------------------------------------------------------- who is there


def facts(on_cpu, folder, data):
    """What this process knows of itself, as plain values."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    found = {
        "rank": RANK,
        "host": socket.gethostname(),
        "local_rank": local_rank,
        "device": platform.processor() or platform.machine(),
        "uuid": None,
        "memory_bytes": psutil.virtual_memory().total,
        "backend": "gloo" if on_cpu else "nccl",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "accelerate")},
        "output_dir": folder_mark(folder),
        "data": data_summary(data),
    }
    if not on_cpu:
        properties = torch.cuda.get_device_properties(local_rank)
        found |= {"device": properties.name, "uuid": str(properties.uuid), "memory_bytes": properties.total_memory}
        found["versions"] |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def folder_mark(folder):
    """The random word in `folder` that the first process there left: the same one for all who see the same folder."""
    mark = Path(folder) / ".check_topology"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            # Linked into place whole: nobody reads half a word.
            own = mark.with_name(f"{mark.name}.{uuid.uuid4().hex}")
            own.write_text(uuid.uuid4().hex)
            os.link(own, mark)
        except FileExistsError:
            pass
        finally:
            own.unlink(missing_ok=True)
        return mark.read_text()
    except OSError as error:
        return f"cannot be written: {error.strerror}"


def remove_mark(folder):
    with contextlib.suppress(OSError):  # a folder that cannot be written has none
        (Path(folder) / ".check_topology").unlink()


def data_summary(path):
    """How many files of how many bytes lie below `path`; None if it is no path here (a Hub id, `synthetic`)."""
    path = Path(path)
    if not path.exists():
        return None
    files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
    return f"{len(files)} file(s), {sum(file.stat().st_size for file in files):,} bytes"


def roll_call(store, mine, timeout):
    """Everyone's facts, in the order of ranks.

    Through the store rather than a process group: a group is only made once everybody has come.

    Raises:
        RunFailed: on every process that is there, if others have not come within `timeout` seconds.
    """
    store.set(f"facts/{RANK}", json.dumps(mine))
    deadline = time.monotonic() + timeout
    keys = [f"facts/{rank}" for rank in range(WORLD)]
    while not store.check(keys):
        if store.check(["missing"]):  # another process has waited for longer
            part(store, 2)
            raise RunFailed(store.get("missing").decode())
        if time.monotonic() > deadline:
            there = [json.loads(store.get(key)) for key in keys if store.check([key])]
            ranks = {one["rank"] for one in there}
            missing = ", ".join(str(rank) for rank in range(WORLD) if rank not in ranks)
            hosts = "; ".join(
                f"{host} has {', '.join(str(one['rank']) for one in there if one['host'] == host)}"
                for host in dict.fromkeys(one["host"] for one in there)
            )
            told = f"rank {missing} of {WORLD} did not come within {timeout} s ({hosts})"
            store.set("missing", told)
            if RANK == min(ranks) != 0:  # it is rank 0 that is missing, which would print this
                print(f"error: {told}", file=sys.stderr, flush=True)
            part(store, len(there))
            raise RunFailed(told)
        time.sleep(0.05)
    return [json.loads(store.get(key)) for key in keys]


def part(store, present):
    """Lets rank 0, which may hold the store, go last of the `present` processes: they have read all they need."""
    if RANK:
        store.add("gone", 1)
        return
    deadline = time.monotonic() + 5
    while store.add("gone", 0) < present - 1 and time.monotonic() < deadline:
        time.sleep(0.05)


def clock_skews(store, timeout):
    """How far each process' clock is ahead of rank 0's, in seconds, and how sure that is; on rank 0 only.

    Rank 0 asks and notes when it asked and when the answer came: the answer was given in between (as NTP does,
    RFC 5905). The quickest of 5 answers counts.
    """
    skews = {}
    for rank in range(1, WORLD):
        best = None
        for attempt in range(5):
            key = f"clock/{rank}/{attempt}"
            if RANK == 0:
                asked = time.time()
                store.set(f"{key}/asked", "")
                store.wait([f"{key}/told"], timedelta(seconds=timeout))
                answered = time.time()
                told = float(store.get(f"{key}/told"))
                trip = answered - asked
                if best is None or trip < best[1]:
                    best = told - (asked + answered) / 2, trip
            elif rank == RANK:
                store.wait([f"{key}/asked"], timedelta(seconds=timeout * WORLD))
                store.set(f"{key}/told", repr(time.time()))
        if RANK == 0:
            skews[rank] = best[0], best[1] / 2
    return skews


def problems(everyone, skews, args):
    """What is wrong with this ground, a line each."""
    found = []
    by_uuid = {}
    for one in everyone:
        if one["uuid"]:
            by_uuid.setdefault(one["uuid"], []).append(one)
    for shared in by_uuid.values():
        if len(shared) > 1:
            who = " and ".join(f"rank {one['rank']}" for one in shared)
            found.append(
                f"{who} both on GPU {shared[0]['local_rank']} of {shared[0]['host']} ({shared[0]['uuid']}): "
                "one process per GPU; look at CUDA_VISIBLE_DEVICES and at what the scheduler gave each launcher"
            )
    without = dict.fromkeys(one["host"] for one in everyone if one["backend"] == "gloo")
    if without and any(one["backend"] == "nccl" for one in everyone):
        found.append(f"no usable GPU on {', '.join(without)}, but on other machines: look at nvidia-smi there")
    for name in sorted({name for one in everyone for name in one["versions"]}):
        by_version = {}
        for one in everyone:
            if name in one["versions"]:
                by_version.setdefault(one["versions"][name], []).append(one["host"])
        if len(by_version) > 1:
            told = ", ".join(f"{what} on {', '.join(dict.fromkeys(hosts))}" for what, hosts in by_version.items())
            found.append(f"different versions of {name}: {told}: install the same everywhere")
    for rank, (skew, doubt) in skews.items():
        if abs(skew) - doubt > args.max_clock_skew:
            host = everyone[rank]["host"]
            found.append(f"the clock of {host} (rank {rank}) is {skew:+.1f} s off rank 0's: set both by NTP")
    unwritable = [one for one in everyone if one["output_dir"].startswith("cannot")]
    if unwritable:
        found.append(f"--output_dir {args.output_dir} on {unwritable[0]['host']} {unwritable[0]['output_dir']}")
    elif len({one["output_dir"] for one in everyone}) > 1:
        odd = dict.fromkeys(one["host"] for one in everyone if one["output_dir"] != everyone[0]["output_dir"])
        found.append(
            f"--output_dir {args.output_dir} is another folder on {', '.join(odd)} than on {everyone[0]['host']}: "
            "checkpoints need one that all machines share"
        )
    if len({one["data"] for one in everyone}) > 1:
        told = ", ".join(f"{one['data'] or 'nothing'} on {one['host']}" for one in {o["host"]: o for o in everyone}.values())
        found.append(f"--dataset {args.dataset} differs: {told}")
    return found


def table(everyone, skews):
    """The processes as lines of text."""
    rows = [("rank", "host", "local", "device", "memory", "backend", "torch", "clock")]
    for one in everyone:
        skew = skews.get(one["rank"], (0.0, 0.0))
        rows.append(
            (
                str(one["rank"]),
                one["host"],
                str(one["local_rank"]),
                one["device"] + (f" {one['uuid'][:13]}" if one["uuid"] else ""),
                f"{one['memory_bytes'] / 2**30:.0f} GiB",
                one["backend"],
                one["versions"]["torch"],
                f"{skew[0] * 1e3:+.1f} ms",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


# --------------------------------------------------------------------------------------------------------- how fast


def alarm_clock(seconds):
    """Ends this process after that time unless cancelled: who cannot connect waits where no Python gets a turn."""

    def ring():
        if RANK == 0:
            print(
                f"error: all processes reached rank 0, but in {seconds} s not each other: open all ports between the machines, "
                "and see which network NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name (NCCL_DEBUG=INFO tells more)",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)

    # Rank 0 first: the launcher ends the others when one leaves.
    timer = threading.Timer(seconds if RANK == 0 else 1.5 * seconds, ring)
    timer.daemon = True
    timer.start()
    return timer


def measure_all_reduce(device, max_bytes, seconds):
    """Times the all-reduce of float32 messages of 1 KiB, 4 KiB, ... `max_bytes`.

    Returns:
        list of dict: bytes, seconds (the median of repeated calls, the slowest process counting),
        algorithm_bandwidth and bus_bandwidth in bytes per second.
    """
    sizes = []
    size = 1024
    while size <= max_bytes:
        sizes.append(size)
        size *= 4
    found = []
    for size in sizes:
        message = torch.ones(size // 4, device=device)
        times = []
        repeats = 5  # the first two warm up, the third says how many more there is time for
        while len(times) < repeats:
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(message)
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken = torch.tensor([time.perf_counter() - began], device=device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times.append(taken.item())
            message.fill_(1)
            if len(times) == 3:
                repeats = min(100, max(5, int(seconds / times[-1])))
        median = sorted(times[2:])[len(times[2:]) // 2]
        found.append(
            {
                "bytes": size,
                "seconds": median,
                "algorithm_bandwidth": size / median,
                "bus_bandwidth": size / median * 2 * (WORLD - 1) / WORLD,
            }
        )
    return found


def bandwidth_table(rows):
    lines = [f"{'message':>10}  {'time':>11}  {'algorithm':>12}  {'bus':>12}"]
    for row in rows:
        size = f"{row['bytes'] / 2**20:g} MiB" if row["bytes"] >= 2**20 else f"{row['bytes'] // 2**10} KiB"
        lines.append(
            f"{size:>10}  {row['seconds'] * 1e3:8.3f} ms  {row['algorithm_bandwidth'] / 1e9:7.2f} GB/s  "
            f"{row['bus_bandwidth'] / 1e9:7.2f} GB/s"
        )
    return "\n".join(lines)


def verdict(rows, everyone):
    """What the measured all-reduce means for training, in words."""
    latency, best = rows[0]["seconds"], max(rows, key=lambda row: row["algorithm_bandwidth"])
    machines = len({one["host"] for one in everyone})
    gradients = {million: latency + million * 4e6 / best["algorithm_bandwidth"] for million in (10, 100, 1000)}
    told = ", ".join(f"{seconds * 1e3:,.0f} ms for {million:,} million" for million, seconds in gradients.items())
    return (
        f"{WORLD} processes on {machines} machine{'s' * (machines > 1)} can talk to each other: "
        f"{latency * 1e6:,.0f} us for the smallest message, {best['bus_bandwidth'] / 1e9:.2f} GB/s of bus bandwidth at best.\n"
        f"Averaging float32 gradients takes about {told} parameters. A backward pass that takes longer hides it; a "
        f"shorter one waits, and wants a larger --batch_size."
    )


# ------------------------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    on_cpu = topology.check_launch()
    timeout = timedelta(seconds=args.timeout)
    if WORLD == 1:
        mine = facts(on_cpu, args.output_dir, args.dataset)
        remove_mark(args.output_dir)
        print(table([mine], {}))
        if found := problems([mine], {}, args):
            raise UserError("\nerror: ".join(found))
        print("one process: there is nobody to talk to")
        return
    # The launcher's agent may hold the store already.
    own = RANK == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(*address, None, own, timeout, wait_for_workers=False, multi_tenant=True)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RunFailed(
            f"rank {RANK} on {socket.gethostname()} cannot reach {address[0]}:{address[1]}: open that port on the first "
            f"machine, and check --main_process_ip ({str(error).splitlines()[0]})",
            speaker="LOCAL_RANK",
        ) from None
    # A restarted launch must not read what the last attempt said.
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    store = dist.PrefixStore(f"check_topology/{attempt}", store)
    everyone = roll_call(store, facts(on_cpu, args.output_dir, args.dataset), args.timeout)
    skews = clock_skews(store, args.timeout)
    remove_mark(args.output_dir)  # all have read it: the facts are complete
    if RANK == 0:
        print(table(everyone, skews), flush=True)
        store.set("problems", json.dumps(problems(everyone, skews, args)))
    if found := json.loads(store.get("problems")):
        part(store, WORLD)
        raise UserError("\nerror: ".join(found))

    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if not on_cpu:
        torch.cuda.set_device(device)
    group = dict(store=store, rank=RANK, world_size=WORLD, timeout=2 * timeout, device_id=None if on_cpu else device)
    alarm = alarm_clock(args.timeout)
    dist.init_process_group(everyone[0]["backend"], **group)
    dist.barrier()
    alarm.cancel()
    rows = measure_all_reduce(device, args.max_bytes, args.seconds_per_size)
    if RANK == 0:
        print(f"\nall-reduce over {dist.get_backend()}\n{bandwidth_table(rows)}\n\n{verdict(rows, everyone)}")
        record = {"processes": everyone, "all_reduce": rows}
        (Path(args.output_dir) / "topology.json").write_text(json.dumps(record, indent=1))
        plots.bandwidth(Path(args.output_dir) / "allreduce.png", rows, WORLD, dist.get_backend())
    dist.destroy_process_group()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", default="runs/check_topology", help="a folder where the training would write")
    parser.add_argument("--dataset", default="synthetic", help="what the training would read: looked at if it is a path")
    parser.add_argument("--timeout", type=number(int, 1), default=60, help="seconds to wait for the other processes")
    parser.add_argument("--max_clock_skew", type=number(float, 0), default=1.0, help="seconds")
    parser.add_argument("--max_bytes", type=number(int, 1024), default=2**26, help="of the largest message")
    parser.add_argument("--seconds_per_size", type=number(float, 0), default=1.0, help="how long to repeat each message")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
