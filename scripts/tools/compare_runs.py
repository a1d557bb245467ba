"""Compares runs: their curves, results and arguments, and how much losses and weights differ.

    python scripts/tools/compare_runs.py runs/a runs/b runs/c
    python scripts/tools/compare_runs.py runs/seed* --metric loss

Writes `compare_runs.png` to `--output_dir`: the training loss, raw and smoothed, and the metric of
the evaluations, by optimizer step, by sample and by time. Time is that of training: evaluations,
checkpoints and interruptions do not count. Prints the metric of the last and of the highest-scoring
evaluation, the arguments that differ, and the largest differences of the losses and the final
weights from those of the first run. Also works while the runs are still training.
"""

import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open

# Finds `utils` and the training scripts next to this script (a copy) or above (the repository).
sys.path[1:1] = map(str, Path(__file__).resolve().parents[1:3])
from utils import flags
from utils.report import plots
from utils.report.plots import for_plot
from utils.run import entry, manifest
from utils.run.arguments import MAY_CHANGE, Parser
from utils.run.failures import UserError
from utils.run.files import json_lines, read_json

NOT_METRICS = {"split", "step", "epoch", "score", "samples", "seconds"}
RAISED = ",\nraised by label smoothing"
LINE_STYLES = ("-", "--", ":", "-.")


def read_run(folder):
    """Reads one run. Of each line of its training it keeps three numbers: there may be a million.

    Returns:
        dict: `name`; `arguments` (dict, with `processes` and `mixed_precision`); `train`, the
            `step` and `loss` of each log line, float64 arrays; `evaluations`, the log lines (dicts)
            of val, or without a val split of test. Both have the `samples` and the `seconds` of
            training so far; `weights`, the file of the final ones.
    """
    folder = Path(folder)
    record, path = read_json(folder / "args.json"), folder / "metrics.jsonl"
    try:  # other projects have files of this name, too
        arguments, batch_size = record["arguments"], record["arguments"]["batch_size"]
        launched = {name: record["topology"][name] for name in ("processes", "mixed_precision")}
    except (KeyError, TypeError):
        record = None
    if record is None or not path.exists():
        raise UserError(
            f"{folder} is not the folder of a run: it needs args.json and metrics.jsonl of a "
            "training script"
        )
    trained, evaluated = [], {"val": [], "test": []}
    for line in json_lines(path):
        if line["split"] == "train":
            trained.append((line["step"], line["loss"], line["step_seconds"]))
        elif line["split"] in evaluated:
            evaluated[line["split"]].append(line)
    step, loss, step_seconds = np.array(trained, float).reshape(-1, 3).T
    seconds = (np.diff(step, prepend=0) * step_seconds).cumsum()
    train = {"step": step, "loss": loss, "samples": step * batch_size, "seconds": seconds}
    evaluations = evaluated["val"] or evaluated["test"]
    steps = [line["step"] for line in evaluations]
    passed = np.interp(steps, np.append(0, step), np.append(0, seconds)).tolist()
    for line, so_far in zip(evaluations, passed, strict=True):
        line |= {"samples": line["step"] * batch_size, "seconds": so_far}
    arguments |= launched
    run = dict(name=folder.name, arguments=arguments, train=train, evaluations=evaluations)
    return run | dict(weights=folder / "model.safetensors")


def name_apart(runs, folders):
    """Names runs after the last parts of their paths that tell them apart."""
    parts = [Path(folder).resolve().parts for folder in folders]
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    for run, part in zip(runs, parts, strict=True):
        run["name"] = "/".join(part[-length:])


def choose_metric(runs, metric):
    """The metric to show: `metric`, or accuracy, or else loss, or the first by name."""
    metrics = {name for run in runs for line in run["evaluations"] for name in line} - NOT_METRICS
    if metric and metrics and metric not in metrics:
        raise UserError(f"no run evaluates {metric}: they have {', '.join(sorted(metrics))}")
    names = (metric, "accuracy", "loss", *sorted(metrics))
    return next((name for name in names if name in metrics), metric or "loss")


def table(runs, metric):
    """Formats two tables: the results of each run, and the arguments that differ.

    An argument that some run does not have, because it is of another script, is left out.
    """
    header = ("run", "steps", "samples", "seconds in steps", f"last {metric}")
    rows = [(*header, f"{metric} at best score")]
    rows += [result_row(run, metric) for run in runs]
    results = columns(rows)
    shared = set.intersection(*(set(run["arguments"]) for run in runs))
    shared -= MAY_CHANGE | flags.MAY_CHANGE
    differing = []
    for name in sorted(shared):
        values = [str(run["arguments"][name]) for run in runs]
        if len(set(values)) > 1:
            differing.append((name, *values))
    if not differing:
        return results
    header = ("argument", *(run["name"] for run in runs))
    return f"{results}\n\n{columns([header, *differing])}"


def columns(rows):
    """Formats rows of strings as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def differences(first, run):
    """A line about the largest differences between two runs, if they have anything in common."""
    _, ours, theirs = np.intersect1d(
        first["train"]["step"], run["train"]["step"], return_indices=True
    )
    parts = []
    if len(ours):
        losses = np.abs(first["train"]["loss"][ours] - run["train"]["loss"][theirs])
        parts.append(f"training losses differ by at most {losses.max():.2g}")
    files = first["weights"], run["weights"]
    largest = weight_difference(*files) if all(file.exists() for file in files) else None
    if largest is not None:
        parts.append(f"final weights differ by at most {largest:.2g}")
    return f"{run['name']} and {first['name']}: {', '.join(parts)}" if parts else None


def weight_difference(first, second):
    """The largest difference of the weights in two files, a float; None: of different models."""
    with safe_open(first, "numpy") as ours, safe_open(second, "numpy") as theirs:
        shapes = [
            {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
            for file in (ours, theirs)
        ]
        if shapes[0] != shapes[1]:
            return None
        # One at a time: all weights of many runs may not fit into memory.
        pairs = ((ours.get_tensor(name), theirs.get_tensor(name)) for name in shapes[0])
        return max(np.abs(a.astype(float) - b).max(initial=0) for a, b in pairs)


def result_row(run, metric):
    """The row of the first table: how long a run was, and `metric` of two of its evaluations.

    They are the last one and the one with the highest score, whose checkpoint is kept. Without
    scores, as on a test split, which never chooses a checkpoint, both are the last one.
    """
    steps, samples, seconds = (
        run["train"][unit].max(initial=0) for unit in ("step", "samples", "seconds")
    )
    length = (f"{steps:,.0f}", f"{samples:,.0f}", f"{seconds:.1f}")
    evaluated = [line for line in run["evaluations"] if metric in line]
    if not evaluated:
        return (run["name"], *length, "-", "-")
    scored = [line for line in evaluated if "score" in line]
    # Of equal ones the same as `manifest.best` chooses.
    ranks = [(*manifest.rank(line["score"], line.get("loss")), line["step"]) for line in scored]
    best = scored[ranks.index(max(ranks))] if scored else evaluated[-1]
    return (run["name"], *length, f"{evaluated[-1][metric]:.4f}", f"{best[metric]:.4f}")


def draw(path, runs, metric):
    """Draws the training loss and an evaluation metric of runs, by step, by sample and by time."""
    labels = {"step": "optimizer step", "samples": "samples", "seconds": "seconds of training"}
    figure, axes = plots.subplots(2, 3, figsize=(10.5, 6.5), sharey="row")
    for column, (unit, label) in enumerate(labels.items()):
        losses_axis, metric_axis = axes[:, column]
        for index, run in enumerate(runs):
            color = plots.COLORS[index % len(plots.COLORS)]
            style = LINE_STYLES[index // len(plots.COLORS) % len(LINE_STYLES)]
            look = dict(color=color, label=for_plot(run["name"]))
            x, losses = run["train"][unit], run["train"]["loss"]
            losses_axis.plot(x, losses, color=color, alpha=0.4, linewidth=1)
            losses_axis.plot(x, smooth(losses), style, **look)
            evaluated = [line for line in run["evaluations"] if metric in line]
            x, values = ([line[name] for line in evaluated] for name in (unit, metric))
            metric_axis.plot(x, values, style, marker="o", markersize=3, clip_on=False, **look)
        for axis in (losses_axis, metric_axis):
            axis.locator_params("x", nbins=4)
            axis.set_xlim(left=0)
            axis.set_xlabel(label)
            axis.grid(alpha=0.3)
    smoothed = any(run["arguments"].get("label_smoothing") for run in runs)
    axes[0][0].set_ylabel(f"training loss{RAISED if smoothed else ''}")
    axes[0][1].set_title("bold: smoothed, pale: each log line", fontsize="medium")
    axes[1][0].set_ylabel(f"evaluation {metric.replace('_', ' ')}")
    if metric in plots.SHARES:
        axes[1][0].set_ylim(top=1)
    # Below the curves, so that it hides none of them.
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=4, frameon=False)
    legend_rows = -(-len(runs) // 4)
    plots.save(figure, path, rect=(0, 0.03 + 0.03 * legend_rows, 1, 1))


def smooth(values):
    """Exponential moving average, over about a twentieth of all values.

    Without a bias towards the first value, as Adam corrects it.
    """
    factor = 1 - 1 / max(1, len(values) / 20)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total = factor * total + (1 - factor) * value
        weight = factor * weight + (1 - factor)
        smoothed.append(total / weight)
    return smoothed


def main():
    args = parse_args()
    runs = [read_run(folder) for folder in args.runs]
    name_apart(runs, args.runs)
    metric = choose_metric(runs, args.metric)
    print(table(runs, metric))
    print(*filter(None, (differences(runs[0], run) for run in runs[1:])), sep="\n")
    path = Path(args.output_dir) / "compare_runs.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(path, runs, metric)
    print(f"curves: {path}")


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run (--output_dir of a training script)"
    )
    parser.add_argument(
        "--metric", help="metric of the evaluations; default: accuracy, or else loss"
    )
    parser.add_argument("--output_dir", default="runs", help="folder for compare_runs.png")
    args = parser.parse_args()
    if len({Path(run).resolve() for run in args.runs}) < len(args.runs):
        raise UserError("the same run is given twice")
    return args


if __name__ == "__main__":
    entry.run(main)
