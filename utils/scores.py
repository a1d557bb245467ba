"""Metrics of an image classifier over a whole split, from the outputs for every image."""

import torch


def summarize(labels, losses, top):
    """Computes the mean loss, the accuracy, and metrics in which rare classes count as much.

    Args:
        labels: int64 [samples]; -1: there is no image, which does not count.
        losses: float32 [samples].
        top: int64 [samples, up to 5], the most likely classes, the likeliest first.

    Returns:
        dict: `loss`; `accuracy`; with five columns in `top`, `top5`; `balanced_accuracy`, the mean
        of the accuracy of each class; and `macro_f1`, the mean of the F1 score of each class. A
        class without images, and for the F1 score also without predictions, does not count.
    """
    counts, hits = labels >= 0, top == labels[:, None]
    metrics = {
        "loss": losses[counts].double().mean().item(),
        "accuracy": hits[counts, 0].double().mean().item(),
    }
    if top.shape[1] > 4:
        metrics["top5"] = hits[counts].any(1).double().mean().item()
    right, true, predicted = _per_class(labels[counts], top[counts, 0])
    metrics["balanced_accuracy"] = (right / true)[true > 0].mean().item()
    some = true + predicted > 0
    metrics["macro_f1"] = (2 * right / (true + predicted))[some].mean().item()
    return metrics


def score(metrics, name):
    """The metric called `name` as a score, of which higher is better."""
    return -metrics[name] if name == "loss" else metrics[name]


def _per_class(labels, predictions):
    """How many images of each class are classified right, exist, and are predicted: float64."""
    classes = int(torch.cat([labels, predictions]).max()) + 1
    counted = (labels[labels == predictions], labels, predictions)
    return [values.bincount(minlength=classes).double() for values in counted]


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
