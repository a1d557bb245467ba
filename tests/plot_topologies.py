"""Draws the losses of runs that differ only in their topology, at every step.

python tests/plot_topologies.py .github/gpt_topologies.png "1 process=runs/one" \\
    "2 processes=runs/two" ...

Prints how much the losses differ from those of the run that is given first.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from utils.report import plots
from utils.run.files import json_lines, read_json

# Of lines and their widths, so that no curve is hidden.
STYLES = (("-", 9), ("-", 6), ("-", 3.5), ("--", 1.5))

path, *named = sys.argv[1:]
runs, resumed = {}, None
for word in named:
    label, _, folder = word.partition("=")
    lines = list(json_lines(Path(folder) / "metrics.jsonl"))
    runs[label] = {line["step"]: line["loss"] for line in lines if line["split"] == "train"}
    resumed = read_json(Path(folder) / "args.json")["starts"][-1]["step"] or resumed
reference, *others = runs.values()
most = max(abs(losses[step] - reference[step]) for losses in others for step in reference)
print(f"the losses differ by at most {most:.1e}")
figure, axis = plots.subplots(1, 1, figsize=(8, 3.8))
for (label, losses), (style, width), color in zip(
    runs.items(), STYLES, plots.COLORS[-2:] + plots.COLORS[:2], strict=False
):
    axis.plot(*zip(*losses.items(), strict=True), style, label=label, linewidth=width, color=color)
if resumed:
    axis.axvline(resumed, color="gray", linewidth=1, linestyle=":")
    axis.annotate("killed on 2 processes,\nresumed on 1", (resumed + 4, 3.6), fontsize=9)
axis.set(xlabel="optimizer step", ylabel="training loss, nats per byte")
axis.set_title("One curve on any number of processes", fontsize=12)
axis.grid(alpha=0.3)
axis.legend()
plots.save(figure, path)
