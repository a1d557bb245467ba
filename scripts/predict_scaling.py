"""How far will data parallel training scale? Predicts step time and efficiency for 8 to 4096 processes.

    python scripts/predict_scaling.py --parameters 11e6 --step_seconds 0.05 --topology runs/check_topology/topology.json
    python scripts/predict_scaling.py --parameters 1.5e9 --step_seconds 0.9 --latency 10e-6 --bandwidth 50e9
    python scripts/predict_scaling.py --parameters 7e9 --layers 32 --step_seconds 4 --processes 64 --per_machine 8 \\
        --latency 10e-6 --bandwidth 50e9 --inside_latency 5e-6 --inside_bandwidth 300e9
    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/predict_scaling.py --measure

`--step_seconds` is the time of a step on one process. `--topology` is the result of `check_topology.py`; instead of it, you can
give `--latency` in seconds and `--bandwidth` (bus bandwidth) in bytes per second. `--processes` adds a comparison of DDP,
FSDP and HSDP on that many processes; the links inside a machine are those of `--inside_topology`, or `--inside_latency` and
`--inside_bandwidth`, and `--step_seconds` is then the computation of each process for its part of the batch.

The model, for W processes and n bytes of gradients over links of latency a and bandwidth b:

- Ring all-reduce: 2 (W - 1) a + 2 n (W - 1) / (W b) (Patarasuk & Yuan, JPDC 2009). Tree all-reduce with two pipelined trees:
  n / b + 2 a log2(W) + sqrt(8 a log2(W) n / b), once for the reduction and once for the broadcast (Sanders, Speck & Traeff,
  Parallel Computing 2009). NCCL has both; the prediction takes the faster one.
- DDP sends gradients in buckets of 25 MiB (the first: 1 MiB), one after the other, during the backward pass (two thirds of
  the computation); a step waits only for communication that is not hidden by it (Li et al., arXiv:2006.15704).
- Weak scaling: the batch per process stays the same and the global batch grows. Strong scaling: the global batch stays the
  same, so each of W processes computes 1 / W of it and sends as much as before. These scripts use strong scaling.
- Bandwidth is NCCL's bus bandwidth: an all-gather or reduce-scatter of n bytes takes (W - 1) a + n (W - 1) / (W b), an
  all-reduce twice as much (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). Between machines it is that of all links of a
  machine together, as a ring over all processes measures it.
- Memory for weights, gradients and two Adam states in float32: 16 bytes per parameter, and with DDP 4 more for its buckets.
  FSDP divides the 16 bytes by W (stage 3 of Rajbhandari et al., arXiv:1910.02054) and holds two gathered layers and the
  gradient of one. Activations come on top.
- FSDP gathers each layer for the forward pass and again for the backward pass, and reduce-scatters its gradient: 1.5 times
  the bytes of DDP in float32 (same paper, section 7); here weights are gathered in --mixed_precision, and gradients reduced
  in float32. A layer is gathered while the one before is computed; the first gather of a pass and the last reduction are
  not hidden (Zhao et al., arXiv:2304.11277, section 3.3).
- HSDP shards over the processes of a machine and averages the gradient of each part over the R machines: the network carries
  2 n (R - 1) / R bytes per machine, and the rest stays inside (same paper, section 3.2.2).

`--measure` runs a network of --parameters on W real processes, and compares the predicted step time with the measured one.
For results see the README.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from utils import plots, topology
from utils.arguments import Parser, number
from utils.exits import UserError

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
ROOM = 0.7  # share of the memory for weights, gradients and optimizer states; the rest is for activations
BACKWARD = 2 / 3  # share of the computation: two matrix products for each one in the forward pass


class Link(NamedTuple):
    """What connects processes: latency in seconds, bus bandwidth in bytes per second."""

    latency: float
    bandwidth: float


# ------------------------------------------------------------------------------------------------------- the model


def all_reduce_seconds(processes, size, latency, bandwidth):
    """Seconds of an all-reduce of `size` bytes: the faster one of ring and tree."""
    if processes == 1:
        return 0.0
    ring = 2 * (processes - 1) * latency + 2 * (processes - 1) / processes * size / bandwidth
    depth, transfer = latency * math.log2(processes), size / bandwidth
    return min(ring, 2 * (transfer + 2 * depth + math.sqrt(8 * depth * transfer)))


def buckets(size):
    """The bytes of DDP's buckets, in the order in which they are sent."""
    first = min(FIRST_BUCKET, size)
    full, rest = divmod(size - first, BUCKET)
    return [first] + [BUCKET] * full + [rest] * (rest > 0)


def step_seconds(processes, compute, size, latency, bandwidth, overlap=True):
    """Seconds of one step: computation, and communication that is not hidden by it (`overlap`; otherwise all of it)."""
    if not overlap:
        return compute + sum(all_reduce_seconds(processes, bucket, latency, bandwidth) for bucket in buckets(size))
    computed, sent_at = 0, compute * (1 - BACKWARD)
    for bucket in buckets(size):
        computed += bucket
        ready_at = compute * (1 - BACKWARD) + compute * BACKWARD * computed / size
        sent_at = max(sent_at, ready_at) + all_reduce_seconds(processes, bucket, latency, bandwidth)
    return max(compute, sent_at)


def gather_seconds(processes, size, link):
    """Seconds of an all-gather or a reduce-scatter of `size` bytes in total, over a ring."""
    return (processes - 1) * link.latency + (processes - 1) / processes * size / link.bandwidth


def sharded_seconds(layers, compute, gather, reduce, average=0.0):
    """Seconds of one step with FSDP or HSDP.

    Args:
        layers (int): layers of equal size, each of which is gathered and reduced on its own.
        compute (float): seconds of computation of a step.
        gather, reduce (float): seconds to gather the weights of a layer, and to reduce-scatter its gradient, over one link.
        average (float): seconds to average its gradient over another link, at the same time.
    """
    forward, backward = compute * (1 - BACKWARD) / layers, compute * BACKWARD / layers
    seconds = gather + (layers - 1) * max(forward, gather) + forward
    return seconds + gather + (layers - 1) * max(backward, gather + reduce, average) + backward + reduce + average


def compare(args, inside, between):
    """Predicts DDP, FSDP and, on several machines, HSDP on `args.processes` processes, `args.per_machine` on each machine.

    Args:
        inside, between (Link): the links inside a machine and between machines.

    Returns:
        list[dict]: for each kind `memory_bytes` and `sent_bytes` per process, `network_bytes` that a machine sends to others,
        `seconds` per step and `efficiency`.
    """
    processes, machines = args.processes, max(1, args.processes // args.per_machine)
    gradients, gathered = args.parameters * 4, args.parameters * (2 if args.mixed_precision == "bf16" else 4)
    weights, compute = args.parameters * 16, args.step_seconds
    ring = between if machines > 1 else inside  # a ring over all processes is as fast as its slowest link
    # Two layers are gathered at a time, and the gradient of one waits to be reduced.
    transient = (2 * gathered + gradients) / args.layers

    def row(kind, memory, sent, network, seconds):
        values = dict(memory_bytes=memory, sent_bytes=sent, network_bytes=network if machines > 1 else 0, seconds=seconds)
        return dict(kind=kind, **values, efficiency=compute / seconds)

    def layer(size, shards, link):
        return gather_seconds(shards, size / args.layers, link)

    others = (processes - 1) / processes
    sent = 2 * gradients * others
    rows = [row("DDP", weights + gradients, sent, sent, step_seconds(processes, compute, gradients, *ring))]
    sent = (2 * gathered + gradients) * others
    seconds = sharded_seconds(args.layers, compute, layer(gathered, processes, ring), layer(gradients, processes, ring))
    rows.append(row("FSDP", weights / processes + transient, sent, sent, seconds))
    if machines > 1:
        shards = args.per_machine
        network = 2 * gradients * (machines - 1) / machines
        sent = (2 * gathered + gradients) * (shards - 1) / shards + network / shards
        # All processes of a machine average their parts at once, and share its links.
        part = gradients / args.layers / shards
        average = all_reduce_seconds(machines, part, between.latency, between.bandwidth / shards)
        times = layer(gathered, shards, inside), layer(gradients, shards, inside), average
        seconds = sharded_seconds(args.layers, compute, *times)
        rows.append(row("HSDP", weights / shards + transient, sent, network, seconds))
    return rows


def print_comparison(args, rows):
    """Prints what `compare` returned, and which kind to use."""
    room = args.memory_gib * ROOM * 2**30
    print(
        f"\n{args.processes} processes, {min(args.processes, args.per_machine)} on each machine, same batch per process:\n\n"
        f"{'':>4}  {'memory':>11}  {'sent':>11}  {'network':>11}  {'step':>11}  {'efficiency':>10}"
    )
    for row in rows:
        sizes = "  ".join(f"{row[f'{name}_bytes'] / 2**30:7.2f} GiB" for name in ("memory", "sent", "network"))
        print(f"{row['kind']:>4}  {sizes}  {row['seconds'] * 1e3:8.2f} ms  {row['efficiency']:>10.1%}")
    print("memory without activations, and bytes sent: per process; network: sent by a machine to others; each per step\n")
    fitting = [row for row in rows if row["memory_bytes"] <= room]
    if not fitting:
        print(f"None of them leaves {1 - ROOM:.0%} of {args.memory_gib:g} GiB for activations: use more processes.")
        return
    best = min(fitting, key=lambda row: row["seconds"])
    config = {"DDP": "8gpu", "FSDP": "8gpu_fsdp", "HSDP": "2node_8gpu_fsdp"}[best["kind"]]
    print(
        f"{best['kind']} is the fastest that leaves {1 - ROOM:.0%} of {args.memory_gib:g} GiB for activations: adapt "
        f"accelerate_configs/{config}.yaml."
    )


def fit_link(rows, processes):
    """Estimates latency and bandwidth of the link from measured all-reduces.

    Assumes that the time of the smallest message is latency only, and takes the highest bus bandwidth as that of the link.
    """
    latency = min(row["seconds"] for row in rows) / min(2 * (processes - 1), 4 * math.log2(processes))
    return Link(latency, max(row["bus_bandwidth"] for row in rows))


def predict(args, latency, bandwidth):
    """Predicts seconds per step and efficiency for weak and strong scaling: a dict for each number of processes."""
    rows = []
    for processes in [2**i for i in range(3, 13)]:
        size = args.parameters * 4
        weak = step_seconds(processes, args.step_seconds, size, latency, bandwidth)
        strong = step_seconds(processes, args.step_seconds / processes, size, latency, bandwidth)
        rows.append(
            {
                "processes": processes,
                "weak_seconds": weak,
                "weak_efficiency": args.step_seconds / weak,
                "strong_seconds": strong,
                "strong_efficiency": args.step_seconds / processes / strong,
            }
        )
    return rows


def summarize(args, rows):
    """Describes up to how many processes DDP is efficient, and whether the model needs FSDP."""
    lines = []
    for kind, remedy in (
        ("weak", "Beyond that, use a larger batch per process, so that computation hides the all-reduce"),
        ("strong", "Beyond that, use a larger global batch, or the processes mostly wait for the all-reduce"),
    ):
        good = [row["processes"] for row in rows if row[f"{kind}_efficiency"] >= args.worthwhile]
        limit = f"up to {max(good):,} processes" if good else f"for fewer than {rows[0]['processes']} processes only"
        last = good and max(good) == rows[-1]["processes"]
        batch = "the same batch per process" if kind == "weak" else "the same global batch"
        lines.append(f"With {batch} DDP keeps {args.worthwhile:.0%} of its efficiency {limit}.{'' if last else f' {remedy}.'}")
    needs, sharded = args.parameters * 20 / 2**30, args.parameters * 16 / 2**30
    what = "With DDP, weights, gradients, their buckets and Adam states take"
    if needs > args.memory_gib * ROOM:
        fits = 2 ** max(1, math.ceil(math.log2(sharded / (args.memory_gib * ROOM))))
        lines.append(
            f"{what} {needs:,.0f} GiB, too much for {args.memory_gib:g} GiB with activations: "
            f"use FSDP with {fits} processes or more (accelerate_configs/4gpu_fsdp.yaml); --processes compares them."
        )
    else:
        lines.append(f"{what} {needs:,.1f} of {args.memory_gib:g} GiB: no need for FSDP.")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------- measurement


def measure(args):
    """Runs real steps on these processes and compares their time with the prediction."""
    accelerator = Accelerator(cpu=topology.check_launch())
    width = max(1, round((args.parameters / args.layers) ** 0.5))
    network = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(args.layers)))
    model = accelerator.prepare(network)
    data = torch.randn(args.batch, width, device=accelerator.device)

    def seconds_of(function, repeats=20):
        times = []
        for _ in range(repeats):
            accelerator.wait_for_everyone()
            start_time = time.perf_counter()
            function()
            if accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = torch.tensor(time.perf_counter() - start_time, device=accelerator.device)
            times.append(accelerator.gather(seconds[None]).max().item())
        return sorted(times[3:])[len(times[3:]) // 2]

    def compute():
        with accelerator.no_sync(model):
            accelerator.backward(model(data).square().mean())
        model.zero_grad()

    def step():
        accelerator.backward(model(data).square().mean())
        model.zero_grad()

    compute_time, step_time = seconds_of(compute), seconds_of(step)
    size, processes, result = sum(p.numel() for p in network.parameters()) * 4, accelerator.num_processes, {}
    if processes > 1:
        sizes = [2**i for i in range(10, 27, 4)]
        messages = {n: torch.ones(n // 4, device=accelerator.device) for n in sizes}
        times = {n: seconds_of(lambda message=message: dist.all_reduce(message), 10) for n, message in messages.items()}
        rows = [{"seconds": times[n], "bus_bandwidth": n / times[n] * 2 * (processes - 1) / processes} for n in sizes]
        result["latency"], result["bandwidth"] = fit_link(rows, processes)
        result["predicted_overlapped"] = step_seconds(processes, compute_time, size, **result)
        link = result["latency"], result["bandwidth"]
        result["predicted_in_turn"] = step_seconds(processes, compute_time, size, *link, overlap=False)
    result |= {"processes": processes, "gradient_bytes": size, "compute_seconds": compute_time, "measured_seconds": step_time}
    if accelerator.is_main_process:
        print(f"{processes} process(es), {size / 2**20:.1f} MiB of gradients: computation only {compute_time * 1e3:.1f} ms")
        if processes > 1:
            print(
                f"link: {result['latency'] * 1e6:.0f} us, {result['bandwidth'] / 1e9:.2f} GB/s\n"
                f"step predicted {result['predicted_overlapped'] * 1e3:.1f} ms (communication hidden) to "
                f"{result['predicted_in_turn'] * 1e3:.1f} ms (not hidden), measured {step_time * 1e3:.1f} ms"
            )
        write(args, f"measured_{processes}.json", result)
    accelerator.end_training()


# ------------------------------------------------------------------------------------------------------------ main


def main():
    args = parse_args()
    if args.measure:
        measure(args)
        return
    link, machines = read_link(args, "")
    if args.step_seconds is None or link is None:
        raise UserError("give --step_seconds, and --topology or both --latency and --bandwidth")
    if machines == 1 and (args.processes is None or args.processes > args.per_machine):
        print(
            "*** measured within one machine: links between machines are slower; measure with two machines ***",
            file=sys.stderr,
            flush=True,
        )
    if args.processes and args.processes > args.per_machine and args.processes % args.per_machine:
        raise UserError(f"--processes {args.processes} is not a multiple of --per_machine {args.per_machine}")
    latency, bandwidth = link
    rows = predict(args, latency, bandwidth)
    print(
        f"{args.parameters:,} parameters, {args.step_seconds:g} s per step on one process, "
        f"{latency * 1e6:.1f} us and {bandwidth / 1e9:.2f} GB/s between processes\n\n"
        f"{'':>9}  {'same batch per process':^24}  {'same global batch':^24}\n"
        f"{'processes':>9}  {'step':>11}  {'efficiency':>11}  {'step':>11}  {'efficiency':>11}"
    )
    for row in rows:
        print(
            f"{row['processes']:>9}  {row['weak_seconds'] * 1e3:8.2f} ms  {row['weak_efficiency']:>11.1%}  "
            f"{row['strong_seconds'] * 1e3:8.2f} ms  {row['strong_efficiency']:>11.1%}"
        )
    print(f"\n{summarize(args, rows)}")
    record = {"latency": latency, "bandwidth": bandwidth, "rows": rows}
    if args.processes:
        inside, _ = read_link(args, "inside_")
        record["comparison"] = compare(args, inside or link, link)
        print_comparison(args, record["comparison"])
    write(args, "scaling.json", record)
    plots.scaling(Path(args.output_dir) / "scaling.png", rows)


def read_link(args, prefix):
    """The link of `--topology`, or of `--latency` and `--bandwidth`; with the prefix `inside_`, that of the flags so called.

    Returns:
        tuple[Link | None, int | None]: the link, None if it is not given; the number of machines on which it was measured.
    """
    path, latency, bandwidth = (getattr(args, prefix + name) for name in ("topology", "latency", "bandwidth"))
    if not path:
        return (Link(latency, bandwidth) if latency and bandwidth else None), None
    try:
        measured = json.loads(Path(path).read_text())
        machines = len({process["host"] for process in measured["processes"]})
        return fit_link(measured["all_reduce"], len(measured["processes"])), machines
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"--{prefix}topology {path} is not a result of check_topology.py: {error}") from None


def write(args, name, record):
    try:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        (Path(args.output_dir) / name).write_text(json.dumps(record, indent=1))
    except OSError as error:
        raise UserError(f"cannot write to --output_dir {args.output_dir}: {error.strerror}") from None


def integer(text):
    """An argparse type: an integer that may be written as 1.5e9."""
    return int(number(float, 1)(text))


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=integer, default=4_000_000, help="of the model, such as 1.5e9")
    parser.add_argument("--step_seconds", type=number(float, 0, above=True), help="time of a step on one process")
    parser.add_argument("--topology", help="topology.json of check_topology.py")
    parser.add_argument("--latency", type=number(float, 0, above=True), help="seconds from one process to another")
    parser.add_argument("--bandwidth", type=number(float, 0, above=True), help="bus bandwidth, bytes per second")
    parser.add_argument("--memory_gib", type=number(float, 0, above=True), default=80, help="memory of one GPU")
    parser.add_argument("--worthwhile", type=number(float, 0, above=True), default=0.8, help="lowest acceptable efficiency")
    parser.add_argument("--output_dir", default="runs/predict_scaling")
    parser.add_argument(
        "--layers", type=number(int, 1), default=16, help="layers of equal size, also of the one that is measured"
    )
    group = parser.add_argument_group("comparing DDP, FSDP and HSDP")
    group.add_argument("--processes", type=number(int, 2), help="number of GPUs; default: no comparison")
    group.add_argument("--per_machine", type=number(int, 1), default=8, help="GPUs of a machine")
    group.add_argument("--mixed_precision", choices=["bf16", "no"], default="bf16", help="in which FSDP gathers weights")
    group.add_argument("--inside_topology", help="topology.json of check_topology.py on one machine; default: the same link")
    group.add_argument("--inside_latency", type=number(float, 0, above=True), help="seconds, inside a machine")
    group.add_argument("--inside_bandwidth", type=number(float, 0, above=True), help="bus bandwidth inside a machine")
    group = parser.add_argument_group("measuring, under accelerate launch")
    group.add_argument("--measure", action="store_true", help="run real steps on these processes, and compare")
    group.add_argument("--batch", type=number(int, 1), default=512, help="samples per process and step")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
