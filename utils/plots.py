"""Draws image files with matplotlib; needs no display."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from utils.files import read_json, read_json_lines

DPI = 110
# Colors that color-blind people can tell apart (Okabe & Ito, jfly.uni-koeln.de/color).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LABELS = {"loss": "loss (nats)", "bits_per_byte": "bits per byte"}
SHARES = ("accuracy", "top5")  # metrics that cannot be more than 1


def image_grid(path, images, labels, predictions, class_names, columns=8, title=None):
    """Draws images with their predicted classes; a wrong prediction is red, with the true class below it.

    Args:
        images: uint8 [count, 3, height, width]. labels, predictions: int64 [count].
        title (str | None): None: how many are correct.
    """
    rows, (height, width) = -(-len(images) // columns), images.shape[-2:]
    # All images in one array, with room for two lines of text above each: separate axes per image would take seconds.
    top, side = round(0.42 * height), round(0.14 * width)
    cell_height, cell_width = height + top, width + side
    sheet = np.full((rows * cell_height, columns * cell_width, 3), 255, np.uint8)
    figure, axis = subplots(1, 1, figsize=(columns * 1.35, rows * 1.35 * cell_height / cell_width + 0.5))
    axis.axis("off")
    for index, (image, label, prediction) in enumerate(zip(images, labels.tolist(), predictions.tolist(), strict=True)):
        y, x = index // columns * cell_height + top, index % columns * cell_width
        sheet[y : y + height, x : x + width] = image.permute(1, 2, 0)
        correct = prediction == label
        text = class_names[label] if correct else f"{class_names[prediction]}\n(true: {class_names[label]})"
        color = "#1a7f37" if correct else "#cf222e"
        # Only the text in the first and last column can reach the margin, and the layout of text takes time.
        place = dict(ha="center", va="bottom", linespacing=1.0, in_layout=index % columns in (0, columns - 1))
        axis.text(x + width / 2, y - 1, text, fontsize=9, color=color, **place)
    axis.imshow(sheet, interpolation="nearest")
    correct = (labels == predictions).sum().item()
    figure.suptitle(title or f"Predicted class of {len(images)} test images: {correct} correct", fontsize=11)
    save(figure, path)


def confusion_matrix(path, counts, class_names):
    """Draws int64 [true, predicted] counts as percentages of each true class."""
    share = 100 * counts.float() / counts.sum(1, keepdim=True).clamp(min=1)
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
    axis.set_xticks(range(count), class_names, rotation=45, ha="right")
    axis.set_yticks(range(count), class_names)
    axis.set_xlabel("predicted class")
    axis.set_ylabel("true class")
    accuracy = 100 * counts.diag().sum() / counts.sum().clamp(min=1)
    axis.set_title(f"Percentage of each true class ({int(counts.sum()):,} images, {accuracy:.2f} % correct)", fontsize=11)
    save(figure, path)


def curves(folder, figures=("loss", "accuracy")):
    """Draws the metrics `figures` of each split over steps: reads `metrics.jsonl` and writes `curves.png`, both in `folder`."""
    folder = Path(folder)
    records, arguments = read_json_lines(folder / "metrics.jsonl"), (read_json(folder / "args.json") or {}).get("arguments", {})
    smoothing = arguments.get("label_smoothing")
    figure, axes = subplots(1, 2, figsize=(10, 3.6))
    for axis, name in zip(axes, figures, strict=True):
        # The same color in both panels.
        for split, style, color in (("train", "-", COLORS[0]), ("val", "o-", COLORS[1]), ("test", "o-", COLORS[1])):
            points = [(r["step"], r[name]) for r in records if r["split"] == split and name in r]
            if points:
                label = f"{split} (last: {points[-1][1]:.4g})"
                if split == "train" and smoothing and name == "loss":
                    label = f"train (label smoothing {smoothing:g} raises it)"
                axis.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=4, clip_on=False)
        axis.set_xlabel("optimizer step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlim(left=0)
        axis.set_ylabel(LABELS.get(name, name))
        if name in SHARES:
            axis.set_ylim(top=1)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)  # above the curves, to hide none
    save(figure, folder / "curves.png")


def compare_runs(path, runs, metric, smoothing):
    """Draws the training loss and one evaluation metric of several runs, by step, by sample and by time.

    Args:
        runs (list): dicts with `name` and `points`, as `compare_runs.py` reads them.
        smoothing (float | None): factor of the exponential moving average of the training loss, per log line; None: one that
            averages over about a twentieth of each run.
    """
    figure, axes = subplots(2, 3, figsize=(10.5, 6.5), sharey="row")
    for row, (splits, name) in zip(axes, ((("train",), "loss"), (("val", "test"), metric)), strict=True):
        for axis, unit in zip(row, ("step", "samples", "seconds"), strict=True):
            for number, run in enumerate(runs):
                lines = [line for split in splits for line in run["points"].get(split, ()) if name in line]
                color = COLORS[number % len(COLORS)]
                style = ("-", "--", ":", "-.")[number // len(COLORS) % 4]
                x, y = [line[unit] for line in lines], [line[name] for line in lines]
                if splits == ("train",):
                    factor = 1 - 1 / max(1, len(y) / 20) if smoothing is None else smoothing
                    axis.plot(x, y, color=color, alpha=0.4, linewidth=1)
                    axis.plot(x, smooth(y, factor), style, color=color, label=run["name"])
                else:
                    axis.plot(x, y, style, marker="o", markersize=3, color=color, label=run["name"], clip_on=False)
            axis.locator_params("x", nbins=4)
            axis.set_xlim(left=0)
            axis.set_xlabel({"step": "optimizer step", "samples": "samples", "seconds": "seconds of training"}[unit])
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"evaluation {LABELS.get(name, name)}")
        if name in SHARES:
            row[0].set_ylim(top=1)
    smoothed = any(run["arguments"].get("label_smoothing") for run in runs)
    axes[0][0].set_ylabel(f"training {LABELS['loss']}" + ",\nraised by label smoothing" * smoothed)
    axes[0][1].set_title("bold: smoothed, pale: each log line", fontsize="medium")
    # Below the curves, so that it hides none of them.
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=min(4, len(runs)), frameon=False)
    save(figure, path, rect=(0, 0.03 + 0.03 * -(-len(runs) // 4), 1, 1))


def smooth(values, factor):
    """Exponential moving average without a bias towards the first value (as Adam corrects its averages)."""
    total = weight = 0.0
    smoothed = []
    for value in values:
        total = factor * total + (1 - factor) * value
        weight = factor * weight + (1 - factor)
        smoothed.append(total / weight)
    return smoothed


def classification(folder, data, predictions):
    """Draws the predictions of a classifier on a test set: `predictions.png` and `confusion_matrix.png` in `folder`.

    Args:
        data: has `test.images` uint8 [samples, 3, height, width], `test.labels` int64 [samples] and `class_names`.
        predictions: int64 [samples], in the same order.

    Returns:
        dict: name of each picture -> uint8 [1, height, width, 3].
    """
    count = min(40, len(predictions))
    images, labels = data.test.images[:count], data.test.labels[:count]
    image_grid(folder / "predictions.png", images, labels, predictions[:count], data.class_names)
    confusion_matrix(folder / "confusion_matrix.png", confusion(data, predictions), data.class_names)
    return {name: _pixels(folder / f"{name}.png") for name in ("predictions", "confusion_matrix")}


def confusion(data, predictions):
    """Counts test samples by class: int64 [true, predicted]."""
    classes = len(data.class_names)
    return torch.bincount(data.test.labels * classes + predictions, minlength=classes**2).view(classes, classes)


def of_pictures(folder, dataset, metrics, class_names):
    """Draws the results of a classifier of pictures in `folder`: `predictions.png`, `mistakes.png`, `confusion_matrix.png`.

    Args:
        dataset: returns a batch of `images`, uint8 [count, 3, size, size], for a list of ids (`__getitems__`).
        metrics: has `labels`, `predictions`, int64 [samples], and `losses` [samples]. A label of -1 means no picture.
        class_names: with more than 50, there is no confusion matrix.

    Returns:
        dict: name of each picture -> uint8 [1, height, width, 3].
    """
    labels, predictions = metrics["labels"], metrics["predictions"]
    readable = (labels >= 0).nonzero()[:, 0]
    wrong = readable[(labels != predictions)[readable]]
    spread = readable[torch.linspace(0, len(readable) - 1, min(40, len(readable))).long()]  # from all classes
    worst = wrong[metrics["losses"][wrong].argsort(descending=True, stable=True)[:40]]
    drawn, missed = [], (labels != predictions)[spread].sum()
    shown = f"{len(spread)} of {len(readable):,}" if len(spread) < len(readable) else len(spread)
    for name, ids, title in (
        ("predictions", spread, f"{shown} images, {len(spread) - missed} correct"),
        (
            "mistakes",
            worst,
            f"The {len(worst)} mistakes with the highest loss, of {len(wrong):,} among {len(readable):,} images",
        ),
    ):
        if len(ids):
            images = dataset.__getitems__(ids.tolist())["images"]
            image_grid(folder / f"{name}.png", images, labels[ids], predictions[ids], class_names, title=title)
            drawn.append(name)
    if len(class_names) <= 50:
        classes = len(class_names)
        counts = torch.bincount(labels[readable] * classes + predictions[readable], minlength=classes**2).view(classes, classes)
        confusion_matrix(folder / "confusion_matrix.png", counts, class_names)
        drawn.append("confusion_matrix")
    return {name: _pixels(folder / f"{name}.png") for name in drawn}


def contact_sheet(path, dataset, rows, columns=8, most=64):
    """Draws up to `most` pictures, evenly spread over all of them, with their most likely class and its probability.

    Args:
        dataset: returns a batch of `images`, uint8 [count, 3, size, size], for a list of ids (`__getitems__`).
        rows (list): for each picture a dict with `file` and `classes`, a list of (name, probability); empty: unreadable.
    """
    chosen = torch.linspace(0, len(rows) - 1, min(most, len(rows))).long().tolist()
    images = dataset.__getitems__(chosen)["images"]
    count, size = len(chosen), images.shape[-1]
    columns = min(columns, count)
    rows_of_sheet = -(-count // columns)
    figure, axes = subplots(rows_of_sheet, columns, figsize=(1.7 * columns, 2.0 * rows_of_sheet + 0.4))
    for axis in np.ravel(axes):
        axis.axis("off")
    for axis, index, image in zip(np.ravel(axes), chosen, images, strict=False):
        classes, name = rows[index]["classes"], Path(rows[index]["file"]).name
        axis.imshow(image.permute(1, 2, 0) if classes else np.full((size, size, 3), 230, np.uint8), interpolation="nearest")
        label = f"{classes[0][0][:18]} {classes[0][1]:.0%}" if classes else "unreadable"
        axis.set_title(f"{name if len(name) <= 20 else name[:9] + '…' + name[-10:]}\n{label}", fontsize=7)
    figure.suptitle(f"{count} of {len(rows):,} pictures" if count < len(rows) else f"{count} pictures", fontsize=10)
    save(figure, path)


def class_accuracy(metrics, class_names):
    """The accuracy of each class that has pictures, highest first: name -> share. `metrics` as for `of_pictures`."""
    labels, hits = metrics["labels"], metrics["predictions"] == metrics["labels"]
    shares = {n: hits[labels == c].double().mean().item() for c, n in enumerate(class_names) if (labels == c).any()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _pixels(path):
    return np.asarray(Image.open(path).convert("RGB"))[None]


def class_table(data, predictions):
    """A table of the accuracy per class, lowest last; arguments as for `classification`."""
    counts = confusion(data, predictions)
    totals = counts.sum(1)
    width = max(len(name) for name in data.class_names)
    lines = []
    for i in torch.argsort(-(counts.diag() / totals.clamp(min=1)), stable=True).tolist():
        wrong = counts[i].clone()
        wrong[i] = 0
        mistaken = f"   most often confused with {data.class_names[wrong.argmax()]} ({wrong.max()})" if wrong.any() else ""
        accuracy = 100 * counts[i, i] / totals[i].clamp(min=1)
        lines.append(f"  {data.class_names[i]:{width}}  {accuracy:6.2f} %  of {totals[i]}{mistaken}")
    return "\n".join(lines)


def bandwidth(path, rows, processes, backend):
    """Draws time and bus bandwidth of an all-reduce over the message size, from rows of `check_topology.py`."""
    figure, axes = subplots(1, 2, figsize=(10, 3.6))
    sizes = [row["bytes"] for row in rows]
    for axis, values, label in (
        (axes[0], [row["seconds"] * 1e3 for row in rows], "milliseconds"),
        (axes[1], [row["bus_bandwidth"] / 1e9 for row in rows], "bus bandwidth, GB/s"),
    ):
        axis.plot(sizes, values, "o-")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [f"{size // 2**20} M" if size >= 2**20 else f"{size // 2**10} K" for size in sizes])
        axis.set_xlabel("message, bytes")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    figure.suptitle(f"All-reduce between {processes} processes over {backend}", fontsize=11)
    save(figure, path)


def scaling(path, rows):
    """Draws step time and efficiency over the number of processes, from rows of `predict_scaling.py`."""
    figure, axes = subplots(1, 2, figsize=(10, 3.6))
    processes = [row["processes"] for row in rows]
    for kind, label in (("weak", "same batch per process"), ("strong", "same global batch")):
        axes[0].plot(processes, [row[f"{kind}_seconds"] * 1e3 for row in rows], "o-", label=label)
        axes[1].plot(processes, [100 * row[f"{kind}_efficiency"] for row in rows], "o-", label=label)
    axes[0].set(ylabel="milliseconds per step", yscale="log")
    axes[1].set(ylabel="efficiency, percent", ylim=(0, 105))
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(processes, processes, rotation=45)
        axis.set_xlabel("processes")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("Data parallel training, predicted", fontsize=11)
    save(figure, path)


def benchmark(path, figures):
    """Draws the figures of `benchmark.py` that are ratios: the median of each, with its range.

    Args:
        figures (dict): name -> `median`, `min`, `max` and `unit`.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    ratios = {name: figure for name, figure in figures.items() if figure["unit"].endswith("ratio")}
    figure, axis = subplots(1, 1, figsize=(8, 0.4 * max(len(ratios), 1) + 1.3))
    for row, values in enumerate(reversed(ratios.values())):
        middle = values["median"]
        axis.plot([values["min"], values["max"]], [row, row], color="C0", linewidth=2)
        axis.plot(middle, row, "o", color="C0")
        axis.annotate(f"{middle:.3g}", (middle, row), xytext=(0, 6), textcoords="offset points", ha="center")
    axis.axvline(1, color="gray", linewidth=1)
    axis.set_xscale("log")
    left, right = axis.get_xlim()
    axis.set_xlim(min(left, 0.45), max(right, 2.2))  # so that there is a tick on each side of 1
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_yticks(range(len(ratios)), list(reversed(ratios)))
    axis.set_ylim(-0.5, len(ratios) - 0.3)
    axis.set_xlabel("ratio to the other side (median and range of the rounds)")
    axis.grid(alpha=0.3, axis="x", which="both")
    save(figure, path)


def save(figure, path, rect=(0, 0, 1, 1)):
    """Writes a figure to a PNG file; the same figure gives the same bytes. `rect`: the part of the figure for its axes."""
    figure.tight_layout(rect=rect)
    figure.canvas.print_png(path, metadata={"Software": None})  # `savefig` would draw everything twice


def subplots(rows, columns, figsize, **options):
    """Makes a figure and its axes, for `save`, like `matplotlib.pyplot.subplots`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here, because training should not wait for these imports
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, **options)
    for axis in np.ravel(axes):
        axis.spines[["top", "right"]].set_visible(False)  # they would hide a curve at the upper limit, such as an accuracy of 1
    return figure, axes
