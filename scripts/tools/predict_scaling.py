"""Predicts step time and efficiency of data parallel training on 8 to 4096 processes.

    python scripts/tools/predict_scaling.py --parameters 11e6 --step_seconds 0.05 \\
        --topology runs/check_topology/topology.json
    python scripts/tools/predict_scaling.py --parameters 1.5e9 --step_seconds 0.9 \\
        --latency 10e-6 --bandwidth 50e9

`--step_seconds` is the time of a step on one process. `--topology` is the result of
`check_topology.py`; instead of it, you can give `--latency` in seconds and `--bandwidth` (bus
bandwidth) in bytes per second.

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
- Bandwidth is NCCL's bus bandwidth: an all-reduce of n bytes takes 2 n (W - 1) / (W b)
  (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). Between machines it is that of all links of a
  machine together, as a ring over all processes measures it.
- Memory for weights, gradients and two Adam states in float32 is 16 bytes per parameter. With DDP,
  4 more bytes are for the buckets. Activations come on top. FSDP divides the 16 bytes by W (stage 3
  of Rajbhandari et al., arXiv:1910.02054).
"""

import json
import math
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Finds `utils` and the training scripts next to this script (a copy) or above (the repository).
sys.path[1:1] = map(str, Path(__file__).resolve().parents[1:3])
from utils.run import entry
from utils.run.arguments import Parser, number
from utils.run.failures import UserError
from utils.run.files import write_json
from utils.run.output import notice

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
BACKWARD = 2 / 3  # share of the computation: two matrix products for each one in the forward pass
# Share of the memory for weights, gradients and optimizer states; the rest is for activations.
ROOM = 0.7
WORTHWHILE = 0.8  # lowest efficiency at which more processes are recommended
DDP_BYTES = 20  # per parameter: 16 for weights, gradients and two Adam states, 4 for buckets


class Link(NamedTuple):
    """What connects processes: latency in seconds, bus bandwidth in bytes per second."""

    latency: float
    bandwidth: float


@cache  # almost all buckets of a model are alike
def all_reduce_seconds(processes, size, link):
    """Seconds of an all-reduce of `size` bytes: the faster one of ring and tree."""
    transfer = size / link.bandwidth
    ring = 2 * (processes - 1) * (link.latency + transfer / processes)
    depth = link.latency * math.log2(processes)
    tree = 2 * (transfer + 2 * depth + math.sqrt(8 * depth * transfer))
    return min(ring, tree)


def step_seconds(processes, compute, size, link):
    """Seconds of one step with DDP.

    Args:
        compute (float): seconds of computation of a step.
        size (float): bytes of gradients.
    """
    forward = compute * (1 - BACKWARD)
    computed, sent_at = 0, forward
    while computed < size:
        bucket = min(BUCKET if computed else FIRST_BUCKET, size - computed)
        computed += bucket
        ready_at = forward + compute * BACKWARD * computed / size
        sent_at = max(sent_at, ready_at) + all_reduce_seconds(processes, bucket, link)
    return max(compute, sent_at)


def predict(args, link):
    """Predicts step time and efficiency of DDP: a dict for each number of processes."""
    rows = []
    for processes in [2**i for i in range(3, 13)]:
        row = {"processes": processes}
        for kind, compute in (("weak", 1.0), ("strong", 1 / processes)):
            compute *= args.step_seconds
            seconds = step_seconds(processes, compute, args.parameters * 4, link)
            row |= {f"{kind}_seconds": seconds, f"{kind}_efficiency": compute / seconds}
        rows.append(row)
    return rows


def table(rows):
    """What `predict` returned, as text."""
    line = "{:<9}  {:<15}  {:<10}  {:<17}  {}".format
    header = ("processes", "same batch each", "efficiency", "same global batch", "efficiency")
    lines = [line(*header)]
    for row in rows:
        figures = [str(row["processes"])]
        for kind in ("weak", "strong"):
            figures.append(f"{row[f'{kind}_seconds'] * 1e3:.2f} ms")
            figures.append(f"{row[f'{kind}_efficiency']:.1%}")
        lines.append(line(*figures))
    return "\n".join(lines)


def summarize(args, rows):
    """Describes up to how many processes DDP is efficient, and whether the model needs FSDP."""
    lines = []
    for kind, larger in (("weak", "batch per process"), ("strong", "global batch")):
        good = [row["processes"] for row in rows if row[f"{kind}_efficiency"] >= WORTHWHILE]
        limit = f"for fewer than {rows[0]['processes']} processes only"
        if good:
            limit = f"up to {max(good):,} processes"
        line = f"With the same {larger} DDP keeps {WORTHWHILE:.0%} of its efficiency {limit}."
        if not good or max(good) < rows[-1]["processes"]:
            line += f" Beyond that, use a larger {larger}: its computation hides the all-reduce."
        lines.append(line)
    replicated = args.parameters * DDP_BYTES / 2**30
    what = "With DDP, weights, gradients, their buckets and Adam states take"
    if replicated <= args.memory_gib * ROOM:
        lines.append(f"{what} {replicated:,.1f} of {args.memory_gib:g} GiB: no need for FSDP.")
    else:
        lines.append(
            f"{what} {replicated:,.0f} GiB, too much for {args.memory_gib:g} GiB with activations: "
            "use FSDP (accelerate_configs/4gpu_fsdp.yaml)."
        )
    return "\n".join(lines)


def main():
    args = parse_args()
    link, machines = read_link(args)
    if machines == 1:
        notice(
            "measured within one machine: links between machines are slower; measure with two "
            "machines"
        )
    rows = predict(args, link)
    print(
        f"{args.parameters:,.0f} parameters, {args.step_seconds:g} s per step on one process, "
        f"{link.latency * 1e6:.1f} us and {link.bandwidth / 1e9:.2f} GB/s between processes\n\n"
        f"{table(rows)}\n\n{summarize(args, rows)}"
    )
    record = {"latency": link.latency, "bandwidth": link.bandwidth, "rows": rows}
    record["ddp_bytes"] = args.parameters * DDP_BYTES
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "scaling.json", record)


def read_link(args):
    """The link of `--topology`, or of `--latency` and `--bandwidth`.

    Returns:
        tuple[Link, int | None]: the link; the number of machines on which it was measured.
    """
    options = [name for name in ("topology", "latency", "bandwidth") if getattr(args, name)]
    if args.step_seconds is None or options not in (["topology"], ["latency", "bandwidth"]):
        raise UserError("give --step_seconds, and --topology or both --latency and --bandwidth")
    if not args.topology:
        return Link(args.latency, args.bandwidth), None
    try:
        measured = json.loads(Path(args.topology).read_text())
        machines = len({entry["host"] for entry in measured["processes"]})
        return fit_link(measured["all_reduce"], len(measured["processes"])), machines
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(
            f"--topology {args.topology} is not a result of check_topology.py: {error}"
        ) from None


def fit_link(rows, processes):
    """Estimates latency and bandwidth of the link from measured all-reduces.

    Assumes that the time of the smallest message is latency only, and takes the highest bus
    bandwidth as that of the link.
    """
    hops = min(2 * (processes - 1), 4 * math.log2(processes))  # of a ring, of a tree
    latency = min(row["seconds"] for row in rows) / hops
    return Link(latency, max(row["bus_bandwidth"] for row in rows))


def parse_args():
    seconds = number(float, 0, above=True, most=10**6)
    bandwidth = number(float, 0, above=True, most=10**15)  # a million times that of Ethernet
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--parameters",
        type=number(float, 1, most=10**12),  # about the largest published models
        default=4_000_000,
        help="size of the model, such as 1.5e9",
    )
    parser.add_argument("--step_seconds", type=seconds, help="time of a step on one process")
    parser.add_argument("--topology", help="topology.json of check_topology.py")
    parser.add_argument("--latency", type=seconds, help="seconds from one process to another")
    parser.add_argument("--bandwidth", type=bandwidth, help="bus bandwidth, bytes per second")
    gib = number(float, 0, above=True, most=10**6)
    parser.add_argument("--memory_gib", type=gib, default=80, help="memory of a GPU")
    parser.add_argument("--output_dir", default="runs/predict_scaling", help="folder for results")
    return parser.parse_args()


if __name__ == "__main__":
    entry.run(main)
