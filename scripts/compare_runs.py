"""Compares several runs: draws their curves over one another, and prints how they differ.

    python scripts/compare_runs.py runs/a runs/b runs/c
    python scripts/compare_runs.py runs/seed* --metric loss --smoothing 0.98

Writes `compare_runs.png` to `--output_dir`: the training loss, raw and smoothed, and the metric of the evaluations, by
optimizer step, by sample and by time. Time is that of training: evaluations, checkpoints and interruptions do not count. The
table lists the arguments that differ, and the last and best value of the metric. Works while the runs are still training.
"""

import sys
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits, plots, report
from utils.arguments import MAY_CHANGE, Parser, number
from utils.exits import UserError
from utils.files import read_json, read_json_lines


def read_run(folder):
    """Reads one run.

    Returns:
        dict: `name`, `arguments` (dict), `points`: split -> list of dicts, the lines of that split in metrics.jsonl, each with
        `samples` and `seconds` (of training) so far.
    """
    folder = Path(folder)
    record, path = read_json(folder / "args.json"), folder / "metrics.jsonl"
    if record is None or not path.exists():
        raise UserError(f"{folder} is not the folder of a run: it needs args.json and metrics.jsonl")
    batch_size, points = record["arguments"]["batch_size"], {}
    seconds, step = 0.0, 0
    for line in read_json_lines(path):
        if line["split"] == "train":
            seconds += (line["step"] - step) * line["step_seconds"]
            step = line["step"]
        place = {"samples": line["step"] * batch_size, "seconds": seconds}
        points.setdefault(line["split"], []).append(line | place)
    return {"name": folder.name, "arguments": record["arguments"], "points": points}


def name_apart(runs, folders):
    """Names runs after the last parts of their paths that tell them apart."""
    parts = [Path(folder).resolve().parts for folder in folders]
    length = next(n for n in range(1, 99) if len({part[-n:] for part in parts}) == len(parts))
    for run, part in zip(runs, parts, strict=True):
        run["name"] = "/".join(part[-length:])


def choose_metric(runs, wanted):
    """The evaluation metric that all runs have: `wanted`, or accuracy before loss."""
    names = []
    for run in runs:
        lines = [line for split in ("val", "test") for line in run["points"].get(split, ())]
        names.append({name for line in lines for name in line if name not in ("split", "step", "epoch", "samples", "seconds")})
    common = set.intersection(*names)
    for name in [wanted] if wanted else ["accuracy", "loss", *sorted(common)]:
        if name in common:
            return name
    some = ", ".join(sorted(set.union(*names))) or "none"
    raise UserError(f"the runs have no metric {wanted or ''} of evaluations in common: they have {some}")


def table(runs, metric):
    """The last and best value of `metric` in each run, and the arguments in which the runs differ, as text."""
    best_of = min if metric in ("loss", "bits_per_byte") else max
    arguments = sorted({name for run in runs for name in run["arguments"]} - MAY_CHANGE - {"init_from"})
    differing = [name for name in arguments if len({str(run["arguments"].get(name)) for run in runs}) > 1]
    rows = [("run", "steps", "samples", "seconds", f"last {metric}", f"best {metric}", *differing)]
    for run in runs:
        last = run["points"]["train"][-1] if "train" in run["points"] else dict(step=0, samples=0, seconds=0.0)
        values = [line[metric] for split in ("val", "test") for line in run["points"].get(split, ()) if metric in line]
        length = (f"{last['step']:,}", f"{last['samples']:,}", f"{last['seconds']:.1f}")
        own = [str(run["arguments"].get(name)) for name in differing]
        rows.append((run["name"], *length, f"{values[-1]:.4f}", f"{best_of(values):.4f}", *own))
    return report.columns(rows)


def main():
    args = parse_args()
    runs = [read_run(folder) for folder in args.runs]
    name_apart(runs, args.runs)
    metric = choose_metric(runs, args.metric)
    print(table(runs, metric))
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    plots.compare_runs(folder / "compare_runs.png", runs, metric, args.smoothing)
    print(f"curves: {folder / 'compare_runs.png'}")


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run (--output_dir of a training script)")
    parser.add_argument("--metric", help="of the evaluations; default: accuracy, or else loss")
    parser.add_argument(
        "--smoothing", type=number(float, 0, below=1), default=0.9, help="of the training loss: 0 none, 0.99 much"
    )
    parser.add_argument("--output_dir", default="runs", help="folder for compare_runs.png")
    args = parser.parse_args()
    if len({Path(run).resolve() for run in args.runs}) < len(args.runs):
        raise UserError("the same run is given twice")
    return args


if __name__ == "__main__":
    exits.run(main)
