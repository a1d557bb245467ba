"""Compares several runs: overlays their curves, and prints their results and how their arguments differ.

    python scripts/compare_runs.py runs/a runs/b runs/c
    python scripts/compare_runs.py runs/seed* --metric loss --smoothing 0.98

Writes `compare_runs.png` to `--output_dir`: the training loss, raw and smoothed, and the metric of the evaluations, by
optimizer step, by sample and by time. Time is that of training: evaluations, checkpoints and interruptions do not count. Prints
the metric of the last and of the best evaluation, and the arguments that differ. Works while the runs are still training.
"""

import math
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
        dict: `name`; `arguments` (dict, with `processes` and `mixed_precision`); `points`: split -> list of dicts, the lines of
        that split in metrics.jsonl, each with `samples` and `seconds` (of training) so far.
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
    topology = {name: record["topology"][name] for name in ("processes", "mixed_precision")}
    return {"name": folder.name, "arguments": record["arguments"] | topology, "points": points}


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
        names.append({name for line in lines for name in line} - {"split", "step", "epoch", "score", "samples", "seconds"})
    common = set.intersection(*names)
    for name in [wanted] if wanted else ["accuracy", "loss", *sorted(common)]:
        if name in common:
            return name
    some = ", ".join(sorted(set.union(*names))) or "none"
    raise UserError(f"the runs have no metric {wanted or ''} of evaluations in common: they have {some}")


def table(runs, metric):
    """Two tables, as text: `metric` of the last and of the best evaluation of each run, and the arguments that differ.

    The best evaluation is that with the highest score, whose checkpoint is kept. An argument that some run does not have,
    because it is of another script, is left out.
    """
    rows = [("run", "steps", "samples", "seconds", f"last {metric}", f"{metric} at best score")]
    for run in runs:
        last = run["points"]["train"][-1] if "train" in run["points"] else dict(step=0, samples=0, seconds=0.0)
        lines = [line for split in ("val", "test") for line in run["points"].get(split, ()) if metric in line]
        best = max(lines, key=lambda line: line.get("score", -math.inf))
        length = (f"{last['step']:,}", f"{last['samples']:,}", f"{last['seconds']:.1f}")
        rows.append((run["name"], *length, f"{lines[-1][metric]:.4f}", f"{best[metric]:.4f}"))
    shared = set.intersection(*(set(run["arguments"]) for run in runs)) - MAY_CHANGE
    values = {name: [str(run["arguments"][name]) for run in runs] for name in sorted(shared)}
    differing = [(name, *own) for name, own in values.items() if len(set(own)) > 1]
    if not differing:
        return report.columns(rows)
    return f"{report.columns(rows)}\n\n{report.columns([('argument', *(run['name'] for run in runs)), *differing])}"


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
    parser.add_argument("--metric", help="metric of the evaluations; default: accuracy, or else loss")
    parser.add_argument(
        "--smoothing",
        type=number(float, 0, below=1),
        help="weight of the past in the smoothed training loss, per log line; default: averages over a twentieth of each run",
    )
    parser.add_argument("--output_dir", default="runs", help="folder for compare_runs.png")
    args = parser.parse_args()
    if len({Path(run).resolve() for run in args.runs}) < len(args.runs):
        raise UserError("the same run is given twice")
    return args


if __name__ == "__main__":
    exits.run(main)
