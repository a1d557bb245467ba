"""Measures the speeds that this collection claims, as ratios in one run on one machine.

    python scripts/benchmarks/benchmark.py --quick               # those without data, 15 minutes
    python scripts/benchmarks/benchmark.py loop_overhead startup_ratio    # some of them
    python scripts/benchmarks/benchmark.py --text input.txt --images cifar10    # two need data

Each benchmark runs both sides in turn, `--rounds` times, each time in new processes, and gives the
median of the rounds with their range. After each benchmark it writes `benchmark.json` and
`benchmark.md` to `--output_dir`. `README.md` in this folder has the results; each benchmark says
what it measures where it is defined.

Copy it together with the other files of its folder, with `train_cifar.py` and `train_gpt.py`, and
with the other scripts that a benchmark runs.
"""

import platform
import signal
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path

# Finds `utils` and the training scripts next to this script (a copy) or above (the repository).
sys.path[1:1] = map(str, Path(__file__).resolve().parents[1:3])
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()
    # As an exception: subprocess.run then kills its process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(process.PREEMPTED))

import cifar
import costs
import gpt
import lm
import peers
import records

from utils.run import devices, entry
from utils.run.arguments import Parser, number
from utils.run.failures import UserError
from utils.run.files import write_json, write_text
from utils.run.record import versions

# Each is called with the arguments: name of a figure -> (one value per round, unit).
BENCHMARKS = {
    "loop_overhead": cifar.loop_overhead,
    "tutorial_speedup": cifar.tutorial_speedup,
    "scaling_efficiency": cifar.scaling_efficiency,
    "startup_ratio": costs.startup_ratio,
    "time_to_accuracy": records.time_to_accuracy,
    "checkpoint_blocking": costs.checkpoint_blocking,
    "gpt": gpt.gpt,
    "lm": lm.lm,
    "attention": lm.attention,
    "peers": peers.peers,
}
NEEDS = {"gpt": "text", "time_to_accuracy": "images", "peers": "peers"}


# ------------------------------------------------------------------------------------------- table


def table(record):
    """Formats the figures as a table in Markdown, with the parts of a benchmark in one row."""
    lines = [f"{record['hardware']}, torch {record['versions']['torch']}, {record['date']}", ""]
    lines += ["| name | median (range) | rounds | unit |", "|---|---|---|---|"]
    rows = {}
    for name, figure in record["figures"].items():
        benchmark = figure["command"].split()[2]
        part = name.removeprefix(benchmark).lstrip("/_")
        spread = f"{figure['median']:.3g} ({figure['min']:.3g} to {figure['max']:.3g})"
        row = rows.setdefault((benchmark, figure["n"], figure["unit"]), [])
        row.append(f"{part} {spread}".strip())
    for (name, rounds, unit), values in rows.items():
        lines.append(f"| `{name}` | {', '.join(values)} | {rounds} | {unit} |")
    return "\n".join(lines) + "\n"


def hardware():
    """Describes the processor: its cores and model, and whether it has bf16."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    bf16 = ", native bf16" if devices.has_bf16() else ""
    return f"{devices.cores()} cores of {model}{bf16}"


# -------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)  # before hours of measuring
    possible = [name for name in BENCHMARKS if name not in NEEDS or getattr(args, NEEDS[name])]
    names, figures = list(dict.fromkeys(args.names)) or possible, {}
    for name in names:
        print(f"{name} ...")
        command = f"python scripts/benchmarks/benchmark.py {name} --rounds {args.rounds}"
        command += " --quick" if args.quick else ""
        command += f" --{NEEDS[name]} PATH" if name in NEEDS else ""
        for figure, (values, unit) in BENCHMARKS[name](args).items():
            middle, low, high = statistics.median(values), min(values), max(values)
            spread = dict(median=middle, min=low, max=high, n=len(values))
            figures[figure] = {**spread, "unit": unit, "command": command}
            spread = f"({low:.3f} to {high:.3f}, {len(values)} rounds)"
            print(f"  {figure:28} {middle:8.3f}   {spread}  {unit}")
        write(folder, figures)
    print(f"written to {folder}")


def write(folder, figures):
    """Writes the figures so far, and a table of them."""
    record = {
        "hardware": hardware(),
        "versions": versions(),
        "date": datetime.now(UTC).date().isoformat(),
        "figures": figures,
    }
    write_json(folder / "benchmark.json", record)
    write_text(folder / "benchmark.md", table(record))


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"which benchmarks: {', '.join(BENCHMARKS)}; default: all that the given data allows",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer steps, one round, for a first look: a quarter of an hour on 2 cores",
    )
    parser.add_argument(
        "--rounds",
        type=number(int, 1, most=1000),
        help="how often to measure both sides, in turn; default: 5, with --quick 1",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="tinyshakespeare (input.txt), for the benchmark `gpt`"
    )
    parser.add_argument(
        "--images",
        metavar="PATH",
        help="CIFAR-10, as for train_cifar.py, for `time_to_accuracy`",
    )
    parser.add_argument(
        "--peers",
        metavar="FOLDER",
        help="with clones of pytorch-image-models and vision (torchvision), for `peers`",
    )
    parser.add_argument(
        "--output_dir",
        default="runs/benchmark",
        help="folder for the table, and the figures as JSON",
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 5)
    for name in args.names:
        if name not in BENCHMARKS:
            raise UserError(f"no benchmark is called {name}: choose from {', '.join(BENCHMARKS)}")
        if name in NEEDS and not getattr(args, NEEDS[name]):
            raise UserError(f"the benchmark {name} needs data: --{NEEDS[name]} (see --help)")
    return args


if __name__ == "__main__":
    entry.run(main)
