"""Metrics of an image classifier over a whole split, from the outputs for every image."""


def summarize(labels, losses, top):
    """Computes the mean loss, the accuracy, and the top-5 accuracy.

    Args:
        labels: int64 [samples]; -1: there is no image, which does not count.
        losses: float32 [samples].
        top: int64 [samples, up to 5], the most likely classes, the likeliest first.

    Returns:
        dict: `loss`, `accuracy`, and, with five columns in `top`, `top5`.
    """
    counts, hits = labels >= 0, top == labels[:, None]
    metrics = {
        "loss": losses[counts].double().mean().item(),
        "accuracy": hits[counts, 0].double().mean().item(),
    }
    if top.shape[1] > 4:
        metrics["top5"] = hits[counts].any(1).double().mean().item()
    return metrics


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
