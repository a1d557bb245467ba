"""Draws what a classifier predicts: images with their classes, and which classes are confused."""

import numpy as np
import torch
from PIL import Image

from utils.report import plots
from utils.run.output import plural


@plots.extra
def image_grid(path, images, labels, predictions, class_names, title):
    """Draws images with their predicted classes.

    A wrong prediction is red, with the true class below it.

    Args:
        images: uint8 [count, 3, height, width].
        labels, predictions: int64 [count].
        title (str): above all images.
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
    names = [plots.for_plot(shorten(name)) for name in class_names]
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
        place = dict(ha="center", va="top", linespacing=1.0, in_layout=at_edge)
        axis.text(x + width / 2, y - 0.95 * top, text, fontsize=9, color=color, **place)
    axis.imshow(sheet, interpolation="nearest")
    figure.suptitle(title, fontsize=11)
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
    names = list(map(plots.for_plot, class_names))
    axis.set_xticks(range(count), names, rotation=45, ha="right")
    axis.set_yticks(range(count), names)
    axis.set_xlabel("predicted class")
    axis.set_ylabel("true class")
    accuracy = 100 * counts.diag().sum() / counts.sum().clamp(min=1)
    axis.set_title(
        f"Percentage of each true class ({int(counts.sum()):,} images, {accuracy:.2f} % correct)",
        fontsize=11,
    )
    plots.save(figure, path)


def of_images(folder, dataset, samples, class_names):
    """Draws the results of an image classifier into a folder (Path).

    Writes `predictions.png`; and if there are any mistakes, `mistakes.png` and, of at most 50
    classes, `confusion_matrix.png`.

    Args:
        dataset (ImageBatches | Split): the images.
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
    if len(wrong) and len(class_names) <= 50:
        counts = torch.zeros(len(class_names), len(class_names), dtype=torch.int64)
        places = labels[readable], predictions[readable]
        counts.index_put_(places, torch.tensor(1), accumulate=True)
        if confusion_matrix(folder / "confusion_matrix.png", counts, class_names):
            drawn.append("confusion_matrix")
    return {
        name: np.asarray(Image.open(folder / f"{name}.png").convert("RGB"))[None] for name in drawn
    }


def shorten(text, most=14):
    """Shortens a name that would reach into the next image."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
