"""Draws image files with matplotlib, without a display; errors in extras are warnings."""

import contextlib
import functools
import warnings
from pathlib import Path

import numpy as np

from utils.run.files import json_lines
from utils.run.output import one_line, warn

DPI = 110
# Colors that color-blind people can tell apart (Okabe & Ito, jfly.uni-koeln.de/color).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SHARES = ("accuracy", "top5")  # metrics that cannot be more than 1


@contextlib.contextmanager
def optional(what):
    """A block that writes `what` (str): an error costs that and a warning, not the run."""
    try:
        yield
    except Exception as error:
        reason = one_line(str(error).strip() or type(error).__name__)
        warn(f"{what} is missing ({type(error).__name__}: {reason})")


def extra(draw):
    """Decorates a function that draws a plot: an error costs the plot and a warning, not the run.

    It returns whether the plot was drawn.
    """

    @functools.wraps(draw)
    def wrapper(*args, **options):
        with optional(f"a plot ({draw.__name__})"), warnings.catch_warnings():
            # About each letter that no font has.
            warnings.filterwarnings("ignore", "Glyph|Matplotlib currently", UserWarning)
            draw(*args, **options)
            return True
        return False

    return wrapper


@extra
def curves(folder, labels=None):
    """Draws metrics of each split over steps: `metrics.jsonl` becomes `curves.png`.

    They are the loss, and the metric that the evaluations name first.

    Args:
        folder (Path): that of the run.
        labels (dict | None): metric -> label of its axis; without one, it is the metric's name.
    """
    path = Path(folder) / "metrics.jsonl"
    labels = _logged_metrics(path) | (labels or {})
    curves = {}  # (split, metric) -> points; the file may have a million lines
    for line in json_lines(path):
        for name in labels.keys() & line.keys():
            curves.setdefault((line["split"], name), []).append((line["step"], line[name]))
    # The same color in both panels.
    styles = {"train": ("-", COLORS[0]), "val": ("o-", COLORS[1]), "test": ("o-", COLORS[1])}
    figure, axes = subplots(1, len(labels), figsize=(5 * len(labels), 3.6), squeeze=False)
    for axis, name in zip(axes[0], labels, strict=True):
        for split, (style, color) in styles.items():
            points = curves.get((split, name))
            if not points:
                continue
            label = f"{split} (last: {points[-1][1]:.4g})"
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
    save(figure, path.with_name("curves.png"))


def _logged_metrics(path):
    """The metrics of `curves`: those of the first evaluation, without counts and errors."""
    lines = (line for line in json_lines(path) if line["split"] in ("val", "test"))
    others = {"loss", "epoch", "score"}
    names = [name for name, value in next(lines, {}).items() if isinstance(value, float)]
    metrics = [
        name for name in names if name not in others and not name.endswith("_standard_error")
    ]
    return {name: name.replace("_", " ") for name in ("loss", *metrics[:1])}


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
