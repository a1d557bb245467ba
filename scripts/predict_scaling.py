"""How far will data parallel training scale? Predicts step time and efficiency for 8 to 4096 processes.

    python scripts/predict_scaling.py --parameters 11e6 --step_seconds 0.05 --topology runs/check_topology/topology.json
    python scripts/predict_scaling.py --parameters 1.5e9 --step_seconds 0.9 --latency 10e-6 --bandwidth 50e9
    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/predict_scaling.py --measure

`--step_seconds` is the time of a step on one process. `--topology` is the result of `check_topology.py`; instead of it, you can
give `--latency` in seconds and `--bandwidth` (bus bandwidth) in bytes per second.

The model, for W processes and n bytes of gradients over links of latency a and bandwidth b:

- Ring all-reduce: 2 (W - 1) a + 2 n (W - 1) / (W b) (Patarasuk & Yuan, JPDC 2009). Tree all-reduce with two pipelined trees:
  n / b + 2 a log2(W) + sqrt(8 a log2(W) n / b), once for the reduction and once for the broadcast (Sanders, Speck & Traeff,
  Parallel Computing 2009). NCCL has both; the prediction takes the faster one.
- DDP sends gradients in buckets of 25 MiB (the first: 1 MiB), one after the other, during the backward pass (two thirds of
  the computation); a step waits only for communication that is not hidden by it (Li et al., arXiv:2006.15704).
- Weak scaling: the batch per process stays the same and the global batch grows. Strong scaling: the global batch stays the
  same, so each of W processes computes 1 / W of it and sends as much as before. These scripts use strong scaling.
- Memory for weights, gradients and two Adam states in float32: 16 bytes per parameter, on every process with DDP; FSDP
  divides it by W and sends 1.5 times as much (Rajbhandari et al., arXiv:1910.02054).

`--measure` runs a network of --parameters on W real processes, and compares the predicted step time with the measured one.
For results see the README.
"""

import json
import math
import sys
import time
from pathlib import Path

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
BACKWARD = 2 / 3  # share of the computation: two matrix products for each one in the forward pass


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


def fit_link(rows, processes):
    """Estimates latency and bandwidth of the link from measured all-reduces.

    Assumes that the time of the smallest message is latency only, and takes the highest bus bandwidth as that of the link.
    """
    latency = min(row["seconds"] for row in rows) / min(2 * (processes - 1), 4 * math.log2(processes))
    return latency, max(row["bus_bandwidth"] for row in rows)


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
    needs = args.parameters * 16 / 2**30
    if needs > args.memory_gib * 0.7:
        fits = 2 ** math.ceil(math.log2(needs / (args.memory_gib * 0.7)))
        lines.append(
            f"Weights, gradients and Adam states take {needs:,.0f} GiB, too much for {args.memory_gib:g} GiB with activations: "
            f"use FSDP with {fits} processes or more (accelerate_configs/4gpu_fsdp.yaml), at 1.5 times the communication."
        )
    else:
        lines.append(f"Weights, gradients and Adam states take {needs:,.1f} of {args.memory_gib:g} GiB: no need for FSDP.")
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
    latency, bandwidth = args.latency, args.bandwidth
    if args.topology:
        try:
            topology_ = json.loads(Path(args.topology).read_text())
            latency, bandwidth = fit_link(topology_["all_reduce"], len(topology_["processes"]))
            machines = len({process["host"] for process in topology_["processes"]})
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise UserError(f"--topology {args.topology} is not a result of check_topology.py: {error}") from None
        if machines == 1:
            print(
                "*** measured within one machine: links between machines are slower; measure with two machines ***",
                file=sys.stderr,
                flush=True,
            )
    if args.step_seconds is None or latency is None or bandwidth is None:
        raise UserError("give --step_seconds, and --topology or both --latency and --bandwidth")
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
    write(args, "scaling.json", {"latency": latency, "bandwidth": bandwidth, "rows": rows})
    plots.scaling(Path(args.output_dir) / "scaling.png", rows)


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
    group = parser.add_argument_group("measuring, under accelerate launch")
    group.add_argument("--measure", action="store_true", help="run real steps on these processes, and compare")
    group.add_argument("--layers", type=number(int, 1), default=16, help="layers of the network to run")
    group.add_argument("--batch", type=number(int, 1), default=512, help="samples per process and step")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
