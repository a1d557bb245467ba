"""Metrics over a split, from the outputs for every sample, and their standard errors."""

import math

import torch

from utils.run.failures import UserError


def summarize(labels, losses, top):
    """Computes the mean loss, the accuracy, and metrics in which rare classes count as much.

    Args:
        labels: int64 [samples]; -1: there is no image, which does not count.
        losses: float32 [samples].
        top: int64 [samples, up to 5], the most likely classes, the likeliest first.

    Returns:
        dict: `loss` and `accuracy`, each with its standard error; with five columns in `top`,
        `top5`; `balanced_accuracy`, the mean of the accuracy of each class; `macro_f1`, the mean of
        the F1 score of each class; and the number of `images`. A class without images, and for the
        F1 score also without predictions, does not count.

    Raises:
        UserError: there is no image.
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
    some = true + predicted > 0
    metrics["macro_f1"] = (2 * right / (true + predicted))[some].mean().item()
    return {**metrics, "images": many}


def readable(labels):
    """Which labels are not -1, bool [samples]. Raises UserError if none is: there is no image."""
    found = labels >= 0
    if not found.any():
        raise UserError(f"none of the {len(labels):,} images can be read")
    return found


def moments(sums, counts):
    """What `mean_and_error` needs of some samples; moments of several parts can be added.

    Args:
        sums: [samples], the sum of the losses of each, of
        counts: [samples] tokens or bytes; a sample with none does not count.

    Returns:
        float64 [6].
    """
    x, n = sums.double(), counts.double()
    return torch.stack([(n > 0).double(), n, x, n * n, n * x, x * x]).sum(1)


def mean_and_error(moments):
    """The mean loss over all tokens, and its standard error as if samples were independent.

    Returns:
        tuple[float, float | None, int]: and the number of tokens; None: of a single sample there is
        no error.
    """
    many, total, x, nn, nx, xx = moments.tolist()  # the only wait for the device
    mean = x / total
    # Of a ratio: samples with fewer tokens than others count less.
    squares = xx - 2 * mean * nx + mean**2 * nn
    if many < 2 or math.isnan(squares):
        return mean, None, int(total)
    return mean, math.sqrt(max(squares, 0) * many / (many - 1)) / total, int(total)


def with_error(name, mean, error):
    """A metric and its standard error, if there is one, as a dict for the log and the results."""
    return {name: mean} | ({} if error is None else {f"{name}_standard_error": error})


def score(metrics, name):
    """The metric called `name` as a score, of which higher is better."""
    return -metrics[name] if name == "loss" else metrics[name]


def _per_class(labels, predictions):
    """How many images of each class are classified right, exist, and are predicted: float64."""
    classes = int(torch.cat([labels, predictions]).max()) + 1
    counted = (labels[labels == predictions], labels, predictions)
    return [values.bincount(minlength=classes).double() for values in counted]


def per_class(labels, predictions, class_names):
    """What `class_accuracy` and `class_precision` return, for the results."""
    arguments = (labels, predictions, class_names)
    return {
        "per_class": class_accuracy(*arguments),
        "per_class_precision": class_precision(*arguments),
    }


def class_precision(labels, predictions, class_names):
    """The share of right ones among the predictions of each class that has some: name -> share.

    Args:
        labels, predictions: int64 [samples]; a label of -1 does not count.
    """
    return class_accuracy(predictions[labels >= 0], labels[labels >= 0], class_names)


def class_accuracy(labels, predictions, class_names):
    """The accuracy of each class that has images, highest first: name -> share.

    Args:
        labels, predictions: int64 [samples].
    """
    hits, shares = predictions == labels, {}
    for label, name in enumerate(class_names):
        members = labels == label
        if members.any():
            shares[name] = hits[members].double().mean().item()
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
