"""Metrics of image classifiers over a split, from the outputs for every sample."""

import torch

from utils.data.evaluation import mean_and_error, moments, with_error
from utils.run.failures import UserError


def summarize(labels, losses, top):
    """Computes the mean loss, the accuracy, and metrics in which rare classes count as much.

    Args:
        labels: int64 [samples]; -1: there is no image, which does not count.
        losses: float32 [samples].
        top: int64 [samples, up to 5], the most likely classes, the likeliest first.

    Returns:
        dict: `loss` and `accuracy`, each with its standard error; with five columns in `top`,
        `top5`; `balanced_accuracy` and `macro_f1`, means over classes that have images (or, for
        F1, predictions); and the number of `images`. Raises UserError if there is none.
    """
    counts, hits = readable(labels), top == labels[:, None]
    metrics, many = {}, int(counts.sum())
    for name, values in {"loss": losses[counts], "accuracy": hits[counts, 0]}.items():
        mean, error, _ = mean_and_error(moments(values, torch.ones(many)))
        metrics |= with_error(name, mean, error)
    if top.shape[1] > 4:
        metrics["top5"] = hits[counts].any(1).double().mean().item()
    right, true, predicted = _per_class(labels[counts], top[counts, 0])
    metrics["balanced_accuracy"] = (right / true)[true > 0].mean().item()
    mask = true + predicted > 0
    metrics["macro_f1"] = (2 * right / (true + predicted))[mask].mean().item()
    return {**metrics, "images": many}


def readable(labels):
    """Which labels are not -1, bool [samples]. Raises UserError if none is: there is no image."""
    mask = labels >= 0
    if not mask.any():
        raise UserError(f"none of the {len(labels):,} images can be read")
    return mask


def score(metrics, name):
    """The metric called `name` as a score, of which higher is better."""
    return -metrics[name] if name == "loss" else metrics[name]


def per_class(labels, predictions, class_names):
    """Accuracy and precision of each class, for the results: name -> share, highest first.

    Args: labels, predictions: int64 [samples]; a label of -1 does not count.
    """
    counts = labels >= 0
    right, true, predicted = _per_class(labels[counts], predictions[counts])
    return {
        "per_class": _shares(right, true, class_names),
        "per_class_precision": _shares(right, predicted, class_names),
    }


def _per_class(labels, predictions):
    """How many images of each class are classified right, exist, and are predicted: float64."""
    classes = int(torch.cat([labels, predictions]).max()) + 1
    counted = (labels[labels == predictions], labels, predictions)
    return [values.bincount(minlength=classes).double() for values in counted]


def _shares(right, totals, class_names):
    """The share of right ones for each class that has any, highest first: name -> share."""
    counts = zip(class_names, right.tolist(), totals.tolist(), strict=False)  # the last have none
    shares = {name: hits / total for name, hits, total in counts if total}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
