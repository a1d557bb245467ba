"""Predicts step time and efficiency of data parallel training on 8 to 4096 processes.

    python scripts/tools/predict_scaling.py --parameters 11e6 --step_seconds 0.05 \\
        --topology runs/check_topology/topology.json
    python scripts/tools/predict_scaling.py --parameters 1.5e9 --step_seconds 0.9 \\
        --latency 10e-6 --bandwidth 50e9
    python scripts/tools/predict_scaling.py --parameters 7e9 --layers 32 --step_seconds 4 \\
        --processes 64 --per_machine 8 --latency 10e-6 --bandwidth 50e9 \\
        --inside_latency 5e-6 --inside_bandwidth 300e9

`--step_seconds` is the time of a step on one process. `--topology` is the result of
`check_topology.py`; instead of it, you can give `--latency` in seconds and `--bandwidth` (bus
bandwidth) in bytes per second. `--processes` adds a comparison of DDP, FSDP and HSDP on that many
processes. The links inside a machine are then those of `--inside_topology`, or `--inside_latency`
and `--inside_bandwidth`, and `--step_seconds` is the computation of each process for its part of
the batch.

The model, for W processes and n bytes of gradients over links of latency a and bandwidth b:

- A ring all-reduce takes 2 (W - 1) a + 2 n (W - 1) / (W b) (Patarasuk & Yuan, JPDC 2009). An
  all-reduce over two pipelined trees takes n / b + 2 a log2(W) + sqrt(8 a log2(W) n / b) for the
  reduction and the same for the broadcast (Sanders, Speck & Traeff, Parallel Computing 2009). NCCL
  has both; the prediction takes the faster one.
- DDP sends gradients in buckets of 25 MiB (the first: 1 MiB), one after the other, during the
  backward pass, which is two thirds of the computation. A step waits only for communication that
  computation does not hide (Li et al., arXiv:2006.15704).
- Weak scaling: the batch per process stays the same and the global batch grows. Strong scaling: the
  global batch stays the same, so each of W processes computes 1 / W of it and sends as much as
  before. The training scripts use strong scaling.
- Bandwidth is NCCL's bus bandwidth: an all-gather or reduce-scatter of n bytes takes
  (W - 1) a + n (W - 1) / (W b), an all-reduce twice as much (github.com/NVIDIA/nccl-tests,
  doc/PERFORMANCE.md). Between machines it is that of all links of a machine together, as a ring
  over all processes measures it.
- Memory for weights, gradients and two Adam states in float32 is 16 bytes per parameter. With DDP,
  4 more bytes are for the buckets. FSDP divides the 16 bytes by W (stage 3 of Rajbhandari et al.,
  arXiv:1910.02054), and holds two gathered layers and the gradient of one. Activations come on top.
- FSDP gathers each layer for the forward pass and again for the backward pass, and reduce-scatters
  its gradient: 1.5 times the bytes of DDP in float32 (section 7 of Rajbhandari et al.). Here
  weights are gathered in `--mixed_precision`, and gradients reduced in float32. A layer is gathered
  while the one before is computed. The first gather of a pass and the last reduction are not hidden
  (section 3.3 of Zhao et al., arXiv:2304.11277).
- HSDP shards over the processes of a machine and averages the gradient of each shard over the R
  machines: the network carries 2 n (R - 1) / R bytes per machine, and the rest stays inside
  (section 3.2.2 of Zhao et al.).
"""

import json
import math
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Finds `utils` and the training scripts next to this script (a copy) or above (the repository).
sys.path[1:1] = map(str, Path(__file__).resolve().parents[1:3])
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # before torch: a signal during the slow imports must not be lost


from utils.report import plots
from utils.report.output import writing_to
from utils.run import entry
from utils.run.arguments import Parser
from utils.run.domains import number
from utils.run.failures import UserError
from utils.run.output import notice

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
# Share of the memory for weights, gradients and optimizer states; the rest is for activations.
ROOM = 0.7
BACKWARD = 2 / 3  # share of the computation: two matrix products for each one in the forward pass


class Link(NamedTuple):
    """What connects processes: latency in seconds, bus bandwidth in bytes per second."""

    latency: float
    bandwidth: float


# ---------------------------------------------------------------------------------- time of a step


@cache  # almost all buckets of a model are alike
def all_reduce_seconds(processes, size, latency, bandwidth):
    """Seconds of an all-reduce of `size` bytes: the faster one of ring and tree."""
    if processes == 1:
        return 0.0
    ring = 2 * (processes - 1) * latency + 2 * (processes - 1) / processes * size / bandwidth
    depth, transfer = latency * math.log2(processes), size / bandwidth
    tree = 2 * (transfer + 2 * depth + math.sqrt(8 * depth * transfer))
    return min(ring, tree)


def gather_seconds(processes, size, link):
    """Seconds of an all-gather or a reduce-scatter of `size` bytes in total, over a ring."""
    return (processes - 1) * link.latency + (processes - 1) / processes * size / link.bandwidth


def buckets(size):
    """The bytes of DDP's buckets, in the order in which they are sent."""
    first = min(FIRST_BUCKET, size)
    full, rest = divmod(size - first, BUCKET)
    return [first] + [BUCKET] * full + [rest] * (rest > 0)


def step_seconds(processes, compute, size, latency, bandwidth):
    """Seconds of one step with DDP.

    Args:
        compute (float): seconds of computation of a step.
        size (int): bytes of gradients.
    """
    forward = compute * (1 - BACKWARD)
    computed, sent_at = 0, forward
    for bucket in buckets(size):
        computed += bucket
        ready_at = forward + compute * BACKWARD * computed / size
        sent_at = max(sent_at, ready_at) + all_reduce_seconds(processes, bucket, latency, bandwidth)
    return max(compute, sent_at)


def sharded_seconds(layers, compute, gather, reduce, average=0.0):
    """Seconds of one step with FSDP or HSDP.

    Args:
        layers (int): layers of equal size, each of which is gathered and reduced on its own.
        compute (float): seconds of computation of a step.
        gather, reduce (float): seconds to gather the weights of a layer, and to reduce-scatter its
            gradient, over one link.
        average (float): seconds to average its gradient over another link, at the same time.
    """
    forward = compute * (1 - BACKWARD) / layers
    backward = compute * BACKWARD / layers
    forward_pass = gather + (layers - 1) * max(forward, gather) + forward
    overlapped = (layers - 1) * max(backward, gather + reduce, average)
    backward_pass = gather + overlapped + backward + reduce + average
    return forward_pass + backward_pass


# -------------------------------------------------------------------------------------- prediction


def fit_link(rows, processes):
    """Estimates latency and bandwidth of the link from measured all-reduces.

    Assumes that the time of the smallest message is latency only, and takes the highest bus
    bandwidth as that of the link.
    """
    hops = min(2 * (processes - 1), 4 * math.log2(processes))  # of a ring, of a tree
    latency = min(row["seconds"] for row in rows) / hops
    return Link(latency, max(row["bus_bandwidth"] for row in rows))


def predict(args, link):
    """Predicts step time and efficiency of DDP: a dict for each number of processes."""
    rows = []
    gradients = args.parameters * 4
    for processes in [2**i for i in range(3, 13)]:
        share = args.step_seconds / processes
        weak = step_seconds(processes, args.step_seconds, gradients, *link)
        strong = step_seconds(processes, share, gradients, *link)
        rows.append(
            {
                "processes": processes,
                "weak_seconds": weak,
                "weak_efficiency": args.step_seconds / weak,
                "strong_seconds": strong,
                "strong_efficiency": share / strong,
            }
        )
    return rows


def compare(args, inside, between):
    """Predicts DDP, FSDP and, on several machines, HSDP.

    They run on `args.processes` processes, `args.per_machine` on each machine.

    Args:
        inside, between (Link): the links inside a machine and between machines.

    Returns:
        list[dict]: for each kind `memory_bytes` and `sent_bytes` per process, `network_bytes` that
        a machine sends to others, `seconds` per step and `efficiency`.
    """
    processes, layers, compute = args.processes, args.layers, args.step_seconds
    machines = max(1, processes // args.per_machine)
    gradients, states = args.parameters * 4, args.parameters * 16
    gathered = args.parameters * (2 if args.mixed_precision == "bf16" else 4)
    # A ring over all processes is as fast as its slowest link.
    ring = between if machines > 1 else inside

    def row(kind, memory, sent, network, seconds):
        return dict(
            kind=kind,
            memory_bytes=memory,
            sent_bytes=sent,
            network_bytes=network if machines > 1 else 0,
            seconds=seconds,
            efficiency=compute / seconds,
        )

    def layer_seconds(size, shards, link):
        return gather_seconds(shards, size / layers, link)

    others = (processes - 1) / processes
    sent = 2 * gradients * others
    seconds = step_seconds(processes, compute, gradients, *ring)
    rows = [row("DDP", states + gradients, sent, sent, seconds)]

    sent = (2 * gathered + gradients) * others
    gather = layer_seconds(gathered, processes, ring)
    reduce = layer_seconds(gradients, processes, ring)
    seconds = sharded_seconds(layers, compute, gather, reduce)
    rows.append(row("FSDP", sharded_bytes(args, processes), sent, sent, seconds))

    if machines > 1:
        shards = args.per_machine
        network = 2 * gradients * (machines - 1) / machines
        sent = (2 * gathered + gradients) * (shards - 1) / shards + network / shards
        gather = layer_seconds(gathered, shards, inside)
        reduce = layer_seconds(gradients, shards, inside)
        # All processes of a machine average their shards at once, and share its links.
        shared = Link(between.latency, between.bandwidth / shards)
        average = all_reduce_seconds(machines, gradients / layers / shards, *shared)
        seconds = sharded_seconds(layers, compute, gather, reduce, average)
        rows.append(row("HSDP", sharded_bytes(args, shards), sent, network, seconds))
    return rows


def sharded_bytes(args, shards):
    """The memory of a process for one of so many shards, in bytes, without activations.

    Two layers are gathered at a time, and the gradient of one waits to be reduced.
    """
    gathered = args.parameters * (2 if args.mixed_precision == "bf16" else 4)
    return args.parameters * 16 / shards + (2 * gathered + args.parameters * 4) / args.layers


# ------------------------------------------------------------------------------------ tables, plot


def print_prediction(args, link, rows):
    """Prints what `predict` returned."""
    print(
        f"{args.parameters:,} parameters, {args.step_seconds:g} s per step on one process, "
        f"{link.latency * 1e6:.1f} us and {link.bandwidth / 1e9:.2f} GB/s between processes\n\n"
        f"{'':>9}  {'same batch per process':^24}  {'same global batch':^24}\n"
        f"{'processes':>9}  {'step':>11}  {'efficiency':>11}  {'step':>11}  {'efficiency':>11}"
    )
    for row in rows:
        print(
            f"{row['processes']:>9}  {row['weak_seconds'] * 1e3:8.2f} ms  "
            f"{row['weak_efficiency']:>11.1%}  {row['strong_seconds'] * 1e3:8.2f} ms  "
            f"{row['strong_efficiency']:>11.1%}"
        )


def summarize(args, rows):
    """Describes up to how many processes DDP is efficient, and whether the model needs FSDP."""
    scalings = {
        "weak": (
            "the same batch per process",
            "use a larger batch per process, so that computation hides the all-reduce",
        ),
        "strong": (
            "the same global batch",
            "use a larger global batch, or the processes mostly wait for the all-reduce",
        ),
    }
    lines = []
    for kind, (batch, remedy) in scalings.items():
        good = [row["processes"] for row in rows if row[f"{kind}_efficiency"] >= args.worthwhile]
        limit = f"for fewer than {rows[0]['processes']} processes only"
        if good:
            limit = f"up to {max(good):,} processes"
        line = f"With {batch} DDP keeps {args.worthwhile:.0%} of its efficiency {limit}."
        if not good or max(good) < rows[-1]["processes"]:
            line += f" Beyond that, {remedy}."
        lines.append(line)
    replicated, room = args.parameters * 20 / 2**30, args.memory_gib * ROOM
    what = "With DDP, weights, gradients, their buckets and Adam states take"
    if replicated <= room:
        lines.append(f"{what} {replicated:,.1f} of {args.memory_gib:g} GiB: no need for FSDP.")
    else:
        counts = (2**power for power in range(1, 21))
        fewest = next((n for n in counts if sharded_bytes(args, n) <= room * 2**30), None)
        advice = (
            f"use FSDP with {fewest} processes or more (accelerate_configs/4gpu_fsdp.yaml); "
            "--processes compares DDP, FSDP and HSDP."
        )
        if fewest is None:
            advice = f"FSDP does not help, as each of {args.layers} --layers is too large."
        lines.append(
            f"{what} {replicated:,.0f} GiB, too much for {args.memory_gib:g} GiB with activations: "
            f"{advice}"
        )
    return "\n".join(lines)


def print_comparison(args, rows):
    """Prints what `compare` returned, and which kind to use."""
    print(
        f"\n{args.processes} processes, {min(args.processes, args.per_machine)} on each machine, "
        f"same batch per process:\n\n{'':>4}  {'memory':>11}  {'sent':>11}  {'network':>11}  "
        f"{'step':>11}  {'efficiency':>10}"
    )
    for row in rows:
        sizes = [row[f"{name}_bytes"] / 2**30 for name in ("memory", "sent", "network")]
        columns = "  ".join(f"{size:7.2f} GiB" for size in sizes)
        step = f"{row['seconds'] * 1e3:8.2f} ms"
        print(f"{row['kind']:>4}  {columns}  {step}  {row['efficiency']:>10.1%}")
    print(
        "memory (without activations) and bytes sent are per process; network: bytes that a "
        "machine sends to others; all per step\n"
    )
    left = f"leaves {1 - ROOM:.0%} of {args.memory_gib:g} GiB for activations"
    fitting = [row for row in rows if row["memory_bytes"] <= args.memory_gib * ROOM * 2**30]
    if not fitting:
        print(f"None of these {left}: use more processes.")
        return
    best = min(fitting, key=lambda row: row["seconds"])["kind"]
    config = {"DDP": "8gpu", "FSDP": "8gpu_fsdp", "HSDP": "2node_8gpu_fsdp"}[best]
    print(f"{best} is the fastest that {left}: adapt accelerate_configs/{config}.yaml.")


def draw(path, rows):
    """Draws what `predict` returned: step time and efficiency over the number of processes."""
    figure, axes = plots.subplots(1, 2, figsize=(10, 3.6))
    processes = [row["processes"] for row in rows]
    for kind, label in (("weak", "same batch per process"), ("strong", "same global batch")):
        milliseconds = [row[f"{kind}_seconds"] * 1e3 for row in rows]
        percent = [row[f"{kind}_efficiency"] * 100 for row in rows]
        axes[0].plot(processes, milliseconds, "o-", label=label)
        axes[1].plot(processes, percent, "o-", label=label)
    axes[0].set(ylabel="milliseconds per step", yscale="log")
    axes[1].set(ylabel="efficiency, percent", ylim=(0, 105))
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(processes, processes, rotation=45)
        axis.set_xlabel("processes")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("Data parallel training, predicted", fontsize=11)
    plots.save(figure, path)


# -------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    link, machines = read_link(args, "")
    inside, _ = read_link(args, "inside_")
    if args.step_seconds is None or link is None:
        raise UserError("give --step_seconds, and --topology or both --latency and --bandwidth")
    if machines == 1 and (args.processes is None or args.processes > args.per_machine):
        notice(
            "measured within one machine: links between machines are slower; measure with two "
            "machines"
        )
    if args.processes and args.processes > args.per_machine and args.processes % args.per_machine:
        raise UserError(
            f"--processes {args.processes} is not a multiple of --per_machine {args.per_machine}"
        )
    rows = predict(args, link)
    print_prediction(args, link, rows)
    print(f"\n{summarize(args, rows)}")
    record = {"latency": link.latency, "bandwidth": link.bandwidth, "rows": rows}
    if args.processes:
        record["comparison"] = compare(args, inside or link, link)
        print_comparison(args, record["comparison"])
    write(args, "scaling.json", record)
    draw(Path(args.output_dir) / "scaling.png", rows)


def read_link(args, prefix):
    """The link of `--topology`, or of `--latency` and `--bandwidth`.

    Args:
        prefix (str): of the names of these flags: "inside_" for the links inside a machine.

    Returns:
        tuple[Link | None, int | None]: the link, None if it is not given; the number of machines on
        which it was measured.
    """
    names = ("topology", "latency", "bandwidth")
    path, latency, bandwidth = (getattr(args, prefix + name) for name in names)
    given = [name for name in names if getattr(args, prefix + name)]
    if given not in ([], ["topology"], ["latency", "bandwidth"]):
        raise UserError(
            f"give --{prefix}topology, or both --{prefix}latency and --{prefix}bandwidth"
        )
    if not path:
        return (Link(latency, bandwidth) if latency and bandwidth else None), None
    try:
        measured = json.loads(Path(path).read_text())
        machines = len({entry["host"] for entry in measured["processes"]})
        return fit_link(measured["all_reduce"], len(measured["processes"])), machines
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(
            f"--{prefix}topology {path} is not a result of check_topology.py: {error}"
        ) from None


def write(args, name, record):
    """Writes `record` as JSON to the file `name` in `--output_dir`."""
    with writing_to(args.output_dir) as folder:
        (folder / name).write_text(json.dumps(record, indent=1))


class Integer(number):
    """An argparse type: an integer that may be written as 1.5e9."""

    def __init__(self, low, most):
        super().__init__(float, low, most=most)

    def __contains__(self, value):
        return super().__contains__(value) and value == int(value)

    def __call__(self, text):
        return int(super().__call__(text))

    def __str__(self):
        return f"an integer, {super().__str__()}"


def parse_args():
    seconds = number(float, 0, above=True, most=10**6)
    bandwidth = number(float, 0, above=True, most=10**15)  # a million times that of Ethernet
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--parameters",
        type=Integer(1, 10**12),  # about the largest published models
        default=4_000_000,
        help="size of the model, such as 1.5e9",
    )
    parser.add_argument("--step_seconds", type=seconds, help="time of a step on one process")
    parser.add_argument("--topology", help="topology.json of check_topology.py")
    parser.add_argument("--latency", type=seconds, help="seconds from one process to another")
    parser.add_argument("--bandwidth", type=bandwidth, help="bus bandwidth, bytes per second")
    gib = number(float, 0, above=True, most=10**6)
    parser.add_argument("--memory_gib", type=gib, default=80, help="memory of a GPU")
    parser.add_argument(
        "--worthwhile",
        type=number(float, 0, above=True, most=1),
        default=0.8,
        help="lowest acceptable efficiency, as a fraction",
    )
    parser.add_argument("--output_dir", default="runs/predict_scaling", help="folder for results")
    parser.add_argument(
        "--layers",
        type=number(int, 1, most=10_000),
        default=16,
        help="layers of equal size",
    )
    group = parser.add_argument_group("comparing DDP, FSDP and HSDP")
    group.add_argument(
        "--processes",
        type=number(int, 2, most=10**6),
        help="number of processes, one per GPU; default: no comparison",
    )
    group.add_argument(
        "--per_machine", type=number(int, 1, most=10_000), default=8, help="GPUs of each machine"
    )
    group.add_argument(
        "--mixed_precision",
        choices=["bf16", "no"],
        default="bf16",
        help="precision in which FSDP gathers weights",
    )
    group.add_argument(
        "--inside_topology",
        help="topology.json of check_topology.py on one machine; default: the same link as between "
        "machines",
    )
    group.add_argument(
        "--inside_latency", type=seconds, help="latency inside a machine, in seconds"
    )
    group.add_argument(
        "--inside_bandwidth",
        type=bandwidth,
        help="bus bandwidth inside a machine, bytes per second",
    )
    return parser.parse_args()


if __name__ == "__main__":
    entry.run(main)
