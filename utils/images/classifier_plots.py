"""Draws what a classifier predicts: images with their classes, and which classes are confused."""

import contextlib
import functools

import numpy as np
import torch
from PIL import Image

from utils.report import plots
from utils.run.output import one_line, plural


@plots.extra
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
    figure, axis = plots.subplots(1, 1, figsize=size)
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
    plots.save(figure, path)


@plots.extra
def confusion_matrix(path, counts, class_names):
    """Draws int64 [true, predicted] counts as percentages of each true class."""
    share = (100 * counts.float() / counts.sum(1, keepdim=True).clamp(min=1)).numpy()
    count = len(class_names)
    figure, axis = plots.subplots(1, 1, figsize=(max(0.62 * count + 2, 6.2), 0.58 * count + 1.6))
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
    plots.save(figure, path)


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
    texts = [plots.for_plot(text) for text in texts]
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
