"""How far will data parallel training scale? Predicts step time and efficiency for 8 to 4096 processes.

    python scripts/predict_scaling.py --parameters 11e6 --step_seconds 0.05 --topology runs/check_topology/topology.json
    python scripts/predict_scaling.py --parameters 1.5e9 --step_seconds 0.9 --latency 10e-6 --bandwidth 50e9
    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/predict_scaling.py --measure

`--step_seconds` is the time of a step on one process with its batch size, `--topology` the result of `check_topology.py` (or
give latency in seconds and bus bandwidth in bytes per second).

The model, for W processes and n bytes of gradients over links of latency a and bandwidth b:

- all-reduce by a ring: 2 (W - 1) a + 2 n (W - 1) / (W b) (Patarasuk & Yuan, JPDC 2009); by two pipelined trees, up and
  down: each way n / b + 2 a log2(W) + sqrt(8 a log2(W) n / b) (Sanders, Speck & Traeff, Parallel Computing 2009). NCCL
  has both; the faster one counts.
- DDP sends gradients in buckets of 25 MiB (the first: 1 MiB), one after the other, while the backward pass (two thirds of
  the computation) produces them; a step waits only for what that pass does not hide (Li et al., arXiv:2006.15704).
- Weak scaling: the batch per process stays the same and the global batch grows. Strong scaling: the global batch stays the
  same, so that W processes compute 1 / W each and send as much as before. The scripts of this collection scale strongly.
- Memory for weights, gradients and two Adam states in float32: 16 bytes per parameter, on every process with DDP; FSDP
  divides it by W and sends 1.5 times as much (Rajbhandari et al., arXiv:1910.02054).

`--measure` runs a network of --parameters on W real processes, and compares the predicted step time with the measured one.
Results of 2026-11-21: see the README.
"""

import json
import math
import sys
import time
from pathlib import Path

# `utils` lies beside this script (a copy) or one folder up (the repository).
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
BACKWARD = 2 / 3  # of the computation: two matrix products for each one of the forward pass


# ------------------------------------------------------------------------------------------------------- the model


def all_reduce_seconds(processes, size, latency, bandwidth):
    """Seconds to sum `size` bytes over all processes: the faster of ring and tree."""
    if processes == 1:
        return 0.0
    ring = 2 * (processes - 1) * latency + 2 * (processes - 1) / processes * size / bandwidth
    climb, transfer = latency * math.log2(processes), size / bandwidth
    return min(ring, 2 * (transfer + 2 * climb + math.sqrt(8 * climb * transfer)))


def buckets(size):
    """The bytes of DDP's buckets, in the order in which they are sent."""
    first = min(FIRST_BUCKET, size)
    whole, rest = divmod(size - first, BUCKET)
    return [first] + [BUCKET] * whole + [rest] * (rest > 0)


def step_seconds(processes, compute, size, latency, bandwidth, overlap=True):
    """Seconds of one step: computation, and communication that it does not hide."""
    if not overlap:
        return compute + sum(all_reduce_seconds(processes, bucket, latency, bandwidth) for bucket in buckets(size))
    made, sent = 0, compute * (1 - BACKWARD)
    for bucket in buckets(size):
        made += bucket
        ready = compute * (1 - BACKWARD) + compute * BACKWARD * made / size
        sent = max(sent, ready) + all_reduce_seconds(processes, bucket, latency, bandwidth)
    return max(compute, sent)


def fit_link(rows, processes):
    """Estimates latency and bandwidth of the link from measured all-reduces.

    The time of the smallest message is all latency; the best bus bandwidth is the bandwidth of the link.
    """
    latency = min(row["seconds"] for row in rows) / min(2 * (processes - 1), 4 * math.log2(processes))
    return latency, max(row["bus_bandwidth"] for row in rows)


def predict(args, latency, bandwidth):
    """Predicts seconds per step and efficiency, for weak and strong scaling: a row for each number of processes."""
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


def verdict(args, rows):
    """Describes up to where DDP is efficient."""
    lines = []
    for kind, remedy in (
        ("weak", "Beyond that, use a larger batch per process, so that computation hides the all-reduce"),
        ("strong", "Beyond that, use a larger global batch with more processes, or they wait for each other"),
    ):
        good = [row["processes"] for row in rows if row[f"{kind}_efficiency"] >= args.worthwhile]
        upto = f"up to {max(good):,} processes" if good else f"for fewer than {rows[0]['processes']} processes only"
        last = good and max(good) == rows[-1]["processes"]
        batch = "the same batch per process" if kind == "weak" else "the same global batch"
        lines.append(f"With {batch} DDP keeps {args.worthwhile:.0%} of its efficiency {upto}.{'' if last else f' {remedy}.'}")
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
            began = time.perf_counter()
            function()
            if accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            taken = torch.tensor(time.perf_counter() - began, device=accelerator.device)
            times.append(accelerator.gather(taken[None]).max().item())
        return sorted(times[3:])[len(times[3:]) // 2]

    def compute():
        with accelerator.no_sync(model):
            accelerator.backward(model(data).square().mean())
        model.zero_grad()

    def step():
        accelerator.backward(model(data).square().mean())
        model.zero_grad()

    alone, whole, size = seconds_of(compute), seconds_of(step), sum(p.numel() for p in network.parameters()) * 4
    processes, found = accelerator.num_processes, {}
    if processes > 1:
        sizes = [2**i for i in range(10, 27, 4)]
        messages = {n: torch.ones(n // 4, device=accelerator.device) for n in sizes}
        taken = {n: seconds_of(lambda message=message: dist.all_reduce(message), 10) for n, message in messages.items()}
        rows = [{"seconds": taken[n], "bus_bandwidth": n / taken[n] * 2 * (processes - 1) / processes} for n in sizes]
        found["latency"], found["bandwidth"] = fit_link(rows, processes)
        found["predicted_overlapped"] = step_seconds(processes, alone, size, **found)
        found["predicted_in_turn"] = step_seconds(processes, alone, size, found["latency"], found["bandwidth"], overlap=False)
    found |= {"processes": processes, "gradient_bytes": size, "compute_seconds": alone, "measured_seconds": whole}
    if accelerator.is_main_process:
        print(f"{processes} process(es), {size / 2**20:.1f} MiB of gradients: computation only {alone * 1e3:.1f} ms")
        if processes > 1:
            print(
                f"link: {found['latency'] * 1e6:.0f} us, {found['bandwidth'] / 1e9:.2f} GB/s\n"
                f"step predicted {found['predicted_overlapped'] * 1e3:.1f} ms (communication hidden) to "
                f"{found['predicted_in_turn'] * 1e3:.1f} ms (not hidden), measured {whole * 1e3:.1f} ms"
            )
        write(args, f"measured_{processes}.json", found)
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
            found = json.loads(Path(args.topology).read_text())
            latency, bandwidth = fit_link(found["all_reduce"], len(found["processes"]))
            machines = len({process["host"] for process in found["processes"]})
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
        f"{args.parameters:,} parameters, {args.step_seconds:g} s a step on one process, "
        f"{latency * 1e6:.1f} us and {bandwidth / 1e9:.2f} GB/s between processes\n\n"
        f"{'':>9}  {'same batch per process':^24}  {'same global batch':^24}\n"
        f"{'processes':>9}  {'step':>11}  {'efficiency':>11}  {'step':>11}  {'efficiency':>11}"
    )
    for row in rows:
        print(
            f"{row['processes']:>9}  {row['weak_seconds'] * 1e3:8.2f} ms  {row['weak_efficiency']:>11.1%}  "
            f"{row['strong_seconds'] * 1e3:8.2f} ms  {row['strong_efficiency']:>11.1%}"
        )
    print(f"\n{verdict(args, rows)}")
    write(args, "scaling.json", {"latency": latency, "bandwidth": bandwidth, "rows": rows})
    plots.scaling(Path(args.output_dir) / "scaling.png", rows)


def write(args, name, record):
    try:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        (Path(args.output_dir) / name).write_text(json.dumps(record, indent=1))
    except OSError as error:
        raise UserError(f"cannot write to --output_dir {args.output_dir}: {error.strerror}") from None


def whole(text):
    """An argparse type: a whole number that may be written 1.5e9."""
    return int(number(float, 1)(text))


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=whole, default=4_000_000, help="of the model; 1.5e9 is fine")
    parser.add_argument("--step_seconds", type=number(float, 0, above=True), help="of a step on a single process")
    parser.add_argument("--topology", help="topology.json of check_topology.py")
    parser.add_argument("--latency", type=number(float, 0, above=True), help="seconds from one process to another")
    parser.add_argument("--bandwidth", type=number(float, 0, above=True), help="bus bandwidth, bytes per second")
    parser.add_argument("--memory_gib", type=number(float, 0, above=True), default=80, help="of one GPU")
    parser.add_argument("--worthwhile", type=number(float, 0, above=True), default=0.8, help="lowest acceptable efficiency")
    parser.add_argument("--output_dir", default="runs/predict_scaling")
    group = parser.add_argument_group("measuring, under accelerate launch")
    group.add_argument("--measure", action="store_true", help="compare the prediction with real steps on these processes")
    group.add_argument("--layers", type=number(int, 1), default=16, help="of the network to run")
    group.add_argument("--batch", type=number(int, 1), default=512, help="samples per process and step")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
