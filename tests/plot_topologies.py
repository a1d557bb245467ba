"""Draws the losses of runs that differ only in their topology, and how they differ, at every step.

python tests/plot_topologies.py .github/gpt_topologies.png "1 process=runs/one" \\
    "2 processes=runs/two" ...

The differences are to the run that is given first.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from utils.report import plots
from utils.run.files import read_json_lines

STYLES = (("-", 5), ("--", 3.5), (":", 2), ("-.", 1.2))  # and widths, so that no curve is hidden

path, *named = sys.argv[1:]
runs = {}
for word in named:
    label, _, folder = word.partition("=")
    lines = read_json_lines(Path(folder) / "metrics.jsonl")
    runs[label] = {line["step"]: line["loss"] for line in lines if line["split"] == "train"}
first, reference = next(iter(runs.items()))
figure, (left, right) = plots.subplots(1, 2, figsize=(11, 4))
for (label, losses), (style, width) in zip(runs.items(), STYLES, strict=False):
    steps = list(losses)
    left.plot(steps, losses.values(), style, label=label, linewidth=width, alpha=0.8)
    if losses is not reference:
        differences = [abs(losses[step] - reference[step]) for step in steps]
        shown = [max(difference, 1e-9) for difference in differences]  # a log axis cannot show 0
        right.plot(steps, shown, label=f"{label}: at most {max(shown):.1e}", linewidth=1)
left.set(xlabel="optimizer step", ylabel="training loss, nats per byte")
left.set_title("Four topologies, one curve")
right.axhline(1e-4, color="black", linestyle="--", linewidth=1, label="promised: 1e-4")
right.set(xlabel="optimizer step", ylabel="difference", yscale="log")
right.set_title(f"Difference to {first}")
for axis in (left, right):
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
plots.save(figure, path)
