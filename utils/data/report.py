"""What is said about a data set before training: its splits, its classes, and what was left out."""

import hashlib

import numpy as np

from utils.run.collectives import gather
from utils.run.domains import shown
from utils.run.failures import UserError
from utils.run.output import one_line

CLASSES_SHOWN = 10


class LeftOut:
    """What was found in a data set and is not used, by kind."""

    def __init__(self):
        self._kinds = {}  # kind -> [count, an example]

    def add(self, kind, example, count=1):
        """Counts `count` more of a kind.

        Args:
            kind (str): what they are, in the plural.
            example (str): the path of one of them; the first that is given is shown.
        """
        self._kinds.setdefault(kind, [0, example])[0] += count

    def lines(self, heading="left out"):
        """One line for each kind."""
        return [
            f"{heading}: {kind}: {count:,} ({one_line(example)})"
            for kind, (count, example) in sorted(self._kinds.items())
        ]


def agree(accelerator, name, data):
    """Prints what a data set is, on the main process; call it on every process.

    Args:
        name (str): the value of `--dataset`.
        data: has `description`, one line with a checksum, and `details`, more lines.

    Returns:
        str: the description: a run that records it continues with the same data only.

    Raises:
        UserError: the data set differs between machines.
    """
    everywhere = sorted(set(gather(accelerator, data.description)))
    if len(everywhere) > 1:
        differing = " against ".join(everywhere)
        raise UserError(f"--dataset {name} differs between machines: {differing}")
    if accelerator.is_main_process:
        print("\n  ".join([f"data: {data.description}", *data.details]))
    return data.description


def describe_images(splits, class_names):
    """One line about labeled images: their numbers, and a checksum.

    Args:
        splits (dict[str, Images]): of which each has a fingerprint.
    """
    counts = [f"{len(images):,} {split}".removesuffix(" all") for split, images in splits.items()]
    listed = " and ".join([", ".join(counts[:-1]), counts[-1]] if len(counts) > 1 else counts)
    digest = hashlib.sha256(repr(class_names).encode("utf-8", "surrogateescape"))
    for images in splits.values():
        digest.update(images.fingerprint().encode())
    short = digest.hexdigest()[:12]
    return f"{listed} images of {len(class_names)} classes (fingerprint {short})"


def count_classes(splits, class_names):
    """A line for each split: how many samples it has, and how many of the first ten classes.

    Args:
        splits (dict): of anything with `labels`, int64 [samples], an array or a tensor.
    """
    lines, width = [], max(map(len, splits))
    names = [shown(name) if name != name.strip() else one_line(name) for name in class_names]
    for split, samples in splits.items():
        labels = np.asarray(samples.labels)
        counts = np.bincount(labels, minlength=len(class_names)).tolist()
        pairs = zip(names[:CLASSES_SHOWN], counts, strict=False)
        listed = ", ".join(f"{name} {count:,}" for name, count in pairs)
        more = len(class_names) - CLASSES_SHOWN
        others = f", and {more} more classes" if more > 0 else ""
        lines.append(f"{split:{width}} {len(labels):,}: {listed}{others}")
    return lines
