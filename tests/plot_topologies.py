"""Draws the losses of runs that differ only in their topology, and their difference to the first run, at every step.

python tests/plot_topologies.py .github/gpt_topologies.png "1 process=runs/one" "2 processes=runs/two" ...
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

picture, *named = sys.argv[1:]
runs = {}
for label, _, folder in (part.partition("=") for part in named):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    runs[label] = {record["step"]: record["loss"] for record in records if record["split"] == "train"}
reference = next(iter(runs.values()))
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
for (label, losses), style, width in zip(runs.items(), ("-", "--", ":", "-."), (5, 3.5, 2, 1.2), strict=False):
    left.plot(losses.keys(), losses.values(), style, label=label, linewidth=width, alpha=0.8)
    if losses is not reference:
        # At least 1e-9, because a logarithmic axis cannot show 0
        differences = {step: max(abs(loss - reference[step]), 1e-9) for step, loss in losses.items()}
        largest = max(differences.values())
        right.plot(differences.keys(), differences.values(), label=f"{label}: at most {largest:.1e}", linewidth=1)
left.set(xlabel="optimizer step", ylabel="training loss, nats per byte", title="Four topologies, one curve")
right.axhline(1e-4, color="black", linestyle="--", linewidth=1, label="promised: 1e-4")
right.set(xlabel="optimizer step", ylabel="difference", yscale="log", title=f"Difference to {next(iter(runs))}")
for axis in (left, right):
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
figure.tight_layout()
figure.savefig(picture, dpi=110, metadata={"Software": None})
