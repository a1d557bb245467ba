"""Draws image files with matplotlib; needs no display."""

import functools
import json
import os
import warnings
from pathlib import Path

import numpy as np

from utils.report.extras import optional
from utils.run.files import read_json
from utils.run.output import one_line

DPI = 110
# Colors that color-blind people can tell apart (Okabe & Ito, jfly.uni-koeln.de/color).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PARTS = 2000  # of a long log, from which a curve has some points each
SHARES = ("accuracy", "top5")  # metrics that cannot be more than 1


def extra(draw):
    """Decorates a function that draws a plot: an error costs the plot and a warning, not the run.

    It returns whether the plot was drawn.
    """

    @functools.wraps(draw)
    def wrapper(*args, **options):
        with optional(f"a plot ({draw.__name__})"), warnings.catch_warnings():
            # Of each letter that no font has.
            warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
            draw(*args, **options)
            return True
        return False

    return wrapper


@extra
def curves(folder, labels=None):
    """Draws metrics of each split over steps: `metrics.jsonl` becomes `curves.png`.

    Args:
        folder (Path): that of the run.
        labels (dict | None): metric -> label of its axis; None: the loss, and the metric that the
            evaluations name first.
    """
    folder = Path(folder)
    labels = labels or _logged_metrics(folder / "metrics.jsonl")
    arguments = (read_json(folder / "args.json") or {}).get("arguments", {})
    smoothing = arguments.get("label_smoothing")
    # The same color in both panels.
    styles = {"train": ("-", COLORS[0]), "val": ("o-", COLORS[1]), "test": ("o-", COLORS[1])}
    curves = read_curves(folder / "metrics.jsonl", styles, labels)
    figure, axes = subplots(1, len(labels), figsize=(5 * len(labels), 3.6), squeeze=False)
    for axis, name in zip(axes[0], labels, strict=True):
        for split, (style, color) in styles.items():
            points = curves.get((split, name))
            if not points:
                continue
            label = f"{split} (last: {points[-1][1]:.4g})"
            if split == "train" and smoothing and name == "loss":
                label = f"train (label smoothing {smoothing:g} raises it)"
            look = dict(color=color, label=label, markersize=4, clip_on=False)
            axis.plot(*zip(*points, strict=True), style, **look)
        axis.set_xlabel("optimizer step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlim(left=0)
        axis.set_ylabel(labels[name])
        if name in SHARES:
            axis.set_ylim(top=1.02)  # a curve at 1 is not on the frame
        axis.grid(alpha=0.3)
        # Above the curves, to hide none.
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    save(figure, folder / "curves.png")


def _logged_metrics(path):
    """The metrics of `curves`: those of the first evaluation, without counts and errors."""
    names = []
    for lines in read_parts(path):
        if evaluation := next((line for line in lines if line["split"] in ("val", "test")), None):
            names = [name for name, value in evaluation.items() if isinstance(value, float)]
            break
    others = {"loss", "epoch", "score"}
    kept = [name for name in names if name not in others and not name.endswith("_standard_error")]
    return {name: name.replace("_", " ") for name in ("loss", *kept[:1])}


def read_curves(path, splits, names):
    """Reads some metrics of `metrics.jsonl`: all points of a short one, and a part of a long one.

    Of each of its parts this keeps the lowest, the highest and the last value.

    Args:
        splits, names: of the curves.

    Returns:
        dict: (split, name) -> list of (step, value).
    """
    points = {}
    for lines in read_parts(path):
        part = {}
        for line in lines:
            for name in names if line["split"] in splits else ():
                if name in line:
                    point = (line["step"], line[name])
                    part.setdefault((line["split"], name), []).append(point)
        for curve, found in part.items():
            values = [value for _, value in found]
            extremes = {values.index(min(values)), values.index(max(values)), len(values) - 1}
            points.setdefault(curve, []).extend(found[index] for index in sorted(extremes))
    return points


def read_parts(path):
    """Yields the lines of `metrics.jsonl`, parsed, in `PARTS` lists.

    A line that its writer has not completed is left out.
    """
    with open(path, encoding="utf-8") as file:
        size = os.fstat(file.fileno()).st_size // PARTS + 1
        while lines := file.readlines(size):
            yield [json.loads(line) for line in lines if line.endswith("}\n")]


def save(figure, path, rect=None):
    """Writes a figure to a PNG file; the same figure gives the same bytes.

    `rect`: the part of the figure for its axes; None: all of it, in one layout.
    """
    figure.tight_layout(rect=rect)
    # `savefig` would draw everything twice. Fast compression: the files are a little larger.
    options = dict(metadata={"Software": None}, pil_kwargs={"compress_level": 1})
    figure.canvas.print_png(path, **options)


def subplots(rows, columns, figsize, **options):
    """Makes a figure and its axes, for `save`, like `matplotlib.pyplot.subplots`."""
    # Here, because training should not wait for these imports.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, **options)
    for axis in np.ravel(axes):
        # They would hide a curve at the upper limit, such as an accuracy of 1.
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def for_plot(text):
    """Escapes a name for Matplotlib: `$` would start a formula."""
    return one_line(text).replace("$", r"\$")
