"""Draws image files with matplotlib; needs no display."""

import contextlib
import functools
import json
import os
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from utils.run.failures import optional
from utils.run.files import read_json
from utils.run.output import one_line, plural

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
def image_grid(path, images, labels, predictions, class_names, title=None):
    """Draws images with their predicted classes.

    A wrong prediction is red, with the true class below it.

    Args:
        images: uint8 [count, 3, height, width].
        labels, predictions: int64 [count].
        title (str | None): None: how many are correct.
    """
    columns, (height, width) = min(8, max(4, len(images))), images.shape[-2:]
    rows = -(-len(images) // columns)
    # All images in one array, with room for two lines of text above each: separate axes per image
    # would take seconds.
    top, side = round(0.42 * height), round(0.14 * width)
    cell_height, cell_width = height + top, width + side
    sheet = np.full((rows * cell_height, columns * cell_width, 3), 255, np.uint8)
    size = (columns * 1.35, rows * 1.35 * cell_height / cell_width + 0.5)
    figure, axis = subplots(1, 1, figsize=size)
    axis.axis("off")
    names, fonts = drawable(shorten(name) for name in class_names)
    pairs = zip(labels.tolist(), predictions.tolist(), strict=True)
    for index, (label, prediction) in enumerate(pairs):
        row, column = divmod(index, columns)
        y, x = row * cell_height + top, column * cell_width
        sheet[y : y + height, x : x + width] = images[index].permute(1, 2, 0)
        text, color = names[prediction], "#1a7f37"
        if prediction != label:
            text, color = f"{text}\n(true: {names[label]})", "#cf222e"
        # Only the text in the first and last column can reach the margin, and the layout of text
        # takes time.
        at_edge = column in (0, columns - 1)
        place = dict(ha="center", va="top", linespacing=1.0, in_layout=at_edge, family=fonts)
        axis.text(x + width / 2, y - 0.95 * top, text, fontsize=9, color=color, **place)
    axis.imshow(sheet, interpolation="nearest")
    correct = (labels == predictions).sum().item()
    default = f"Predicted class of {len(images)} test images: {correct} correct"
    figure.suptitle(title or default, fontsize=11)
    save(figure, path)


@extra
def confusion_matrix(path, counts, class_names):
    """Draws int64 [true, predicted] counts as percentages of each true class."""
    share = (100 * counts.float() / counts.sum(1, keepdim=True).clamp(min=1)).numpy()
    count = len(class_names)
    figure, axis = subplots(1, 1, figsize=(max(0.62 * count + 2, 6.2), 0.58 * count + 1.6))
    axis.imshow(share, cmap="Blues", vmin=0, vmax=100)
    if count <= 20:
        for i in range(count):
            for j in range(count):
                if share[i, j] >= 0.05:
                    color = "white" if share[i, j] > 55 else "black"
                    place = dict(ha="center", va="center", in_layout=False)
                    axis.text(j, i, f"{share[i, j]:.1f}", fontsize=8, color=color, **place)
    names, fonts = drawable(class_names)
    axis.set_xticks(range(count), names, rotation=45, ha="right", family=fonts)
    axis.set_yticks(range(count), names, family=fonts)
    axis.set_xlabel("predicted class")
    axis.set_ylabel("true class")
    accuracy = 100 * counts.diag().sum() / counts.sum().clamp(min=1)
    axis.set_title(
        f"Percentage of each true class ({int(counts.sum()):,} images, {accuracy:.2f} % correct)",
        fontsize=11,
    )
    save(figure, path)


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


def classification(folder, split, predictions, class_names):
    """Draws the predictions of a classifier: `predictions.png` and `confusion_matrix.png`.

    Args:
        folder (Path): where to write them.
        split: has `images` uint8 [samples, 3, height, width] and `labels` int64 [samples].
        predictions: int64 [samples], in the same order.

    Returns:
        dict: name of each image -> uint8 [1, height, width, 3].
    """
    count = min(40, len(predictions))
    images, labels = split.images[:count], split.labels[:count]
    counts = confusion(split.labels, predictions, len(class_names))
    drawn = []
    path = folder / "predictions.png"
    if image_grid(path, images, labels, predictions[:count], class_names):
        drawn.append("predictions")
    drawn += _draw_confusion(folder, counts, class_names)
    return {name: _pixels(folder / f"{name}.png") for name in drawn}


def _draw_confusion(folder, counts, class_names):
    """Draws the confusion matrix, unless nothing is confused; its name in a list, if drawn."""
    mistakes = counts.sum() - counts.diag().sum()
    path = folder / "confusion_matrix.png"
    return ["confusion_matrix"] if mistakes and confusion_matrix(path, counts, class_names) else []


def confusion(labels, predictions, classes):
    """Counts samples by class: int64 [true, predicted]."""
    return torch.bincount(labels * classes + predictions, minlength=classes**2).view(
        classes, classes
    )


def of_images(folder, dataset, samples, class_names):
    """Draws the results of an image classifier.

    Writes `predictions.png`, `mistakes.png` and `confusion_matrix.png` (of at most 50 classes).

    Args:
        folder (Path): where to write them.
        dataset: returns a batch of `images`, uint8 [count, 3, size, size], for a list of ids
            (`__getitems__`).
        samples (dict): `labels`, `predictions`, int64 [samples], and `losses` [samples]. A label of
            -1 means that there is no image.

    Returns:
        dict: name of each plot -> uint8 [1, height, width, 3].
    """
    labels, predictions = samples["labels"], samples["predictions"]
    readable = (labels >= 0).nonzero()[:, 0]
    wrong = readable[(labels != predictions)[readable]]
    # Of all classes: evenly spread over the data.
    places = torch.linspace(0, len(readable) - 1, min(40, len(readable))).long()
    shown = readable[places]
    correct = (labels == predictions)[shown].sum()
    of_all = f" of {len(readable):,}" if len(shown) < len(readable) else ""
    worst = wrong[samples["losses"][wrong].argsort(descending=True, stable=True)[:40]]
    mistakes = f"{plural(len(worst), 'mistake')} with the highest loss"
    titles = {
        "predictions": (shown, f"{len(shown)}{of_all} images, {correct} correct"),
        "mistakes": (worst, f"{mistakes}, of {len(wrong):,} among {len(readable):,} images"),
    }
    drawn = []
    for name, (ids, title) in titles.items():
        if len(ids):
            images = dataset.__getitems__(ids.tolist())["images"]
            path, truth = folder / f"{name}.png", labels[ids]
            if image_grid(path, images, truth, predictions[ids], class_names, title=title):
                drawn.append(name)
    if len(class_names) <= 50:
        counts = confusion(labels[readable], predictions[readable], len(class_names))
        drawn += _draw_confusion(folder, counts, class_names)
    return {name: _pixels(folder / f"{name}.png") for name in drawn}


def _pixels(path):
    return np.asarray(Image.open(path).convert("RGB"))[None]


def class_table(labels, predictions, class_names):
    """A table of the accuracy per class, lowest last; labels, predictions: int64 [samples]."""
    counts = confusion(labels, predictions, len(class_names))
    totals = counts.sum(1)
    names = [one_line(name) for name in class_names]
    width = max(len(name) for name in names)
    lines = []
    for i in torch.argsort(-(counts.diag() / totals.clamp(min=1)), stable=True).tolist():
        wrong = counts[i].clone()
        wrong[i] = 0
        mistaken = ""
        if wrong.any():
            mistaken = f"   most often confused with {names[wrong.argmax()]} ({wrong.max()})"
        accuracy = 100 * counts[i, i] / totals[i].clamp(min=1)
        lines.append(f"  {names[i]:{width}}  {accuracy:6.2f} %  of {totals[i]}{mistaken}")
    return "\n".join(lines)


def drawable(texts):
    """Escapes names for a plot; letters that no installed font has become code points, `\\u732b`.

    Returns:
        tuple[list[str], list[str]]: the texts, and the font families that together have their
        letters: Matplotlib takes each letter from the first that has it.
    """
    texts = [for_plot(text) for text in texts]
    fonts, missing = _fonts_for(frozenset("".join(texts)))
    escapes = {ord(letter): f"\\u{ord(letter):04x}" for letter in missing}
    return [text.translate(escapes) for text in texts], fonts


def shorten(text, most=14):
    """Shortens a name that would reach into the next image."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


@functools.cache
def _fonts_for(letters):
    """The font families that together have the letters, and the set of those that none has."""
    from matplotlib import font_manager

    fonts = ["DejaVu Sans"]  # comes with Matplotlib
    path = font_manager.findfont(fonts[0])
    missing = set(letters) - set(map(chr, font_manager.get_font(path).get_charmap()))
    for entry in font_manager.fontManager.ttflist if missing else ():
        with contextlib.suppress(OSError, RuntimeError):  # a font was removed, or is damaged
            covered = missing & set(map(chr, font_manager.get_font(entry.fname).get_charmap()))
            # "Last Resort" has one box for all letters of a script.
            if covered and not entry.name.startswith("Last Resort"):
                fonts.append(entry.name)
                missing -= covered
    return fonts, missing


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
