"""Finds images with equal bytes: a model must not be evaluated on copies of what it trained on."""

import hashlib

import numpy as np

from utils.data.report import LeftOut

COMPARED = 400  # images; of more than 40,000, a hundredth


def find_duplicates(splits):
    """Finds equal images, within and across splits: among those of the same size, by a checksum.

    If too many have the same size, those are compared whose size the fewest others have.

    Args:
        splits (dict): name -> Images.

    Returns:
        tuple: split -> int64 array [samples], the number of the first image with the same bytes,
        counted over all splits; lines for the report about the data set.
    """
    parts = list(splits.values())
    samples = [(split, index) for split in splits for index in range(len(splits[split]))]
    labels = np.concatenate([images.labels for images in parts])
    sizes = np.concatenate([images.source.sizes[images.rows] for images in parts])
    _, groups, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    alike = np.flatnonzero((counts[groups] > 1) & (sizes > 0))
    alike = alike[np.argsort(counts[groups[alike]], kind="stable")]
    most = max(COMPARED, len(sizes) // 100)
    first, seen, kinds = np.arange(len(sizes)), {}, LeftOut()
    for number in sorted(alike[:most].tolist()):
        split, index = samples[number]
        other = first[number] = seen.setdefault(_checksum(splits[split], index), number)
        if other != number:
            other_split = samples[other][0]
            place = f"in {split}" if split == other_split else f"in {other_split} and {split}"
            classes = "" if labels[number] == labels[other] else ", with different classes"
            kinds.add(f"twice {place}{classes}", splits[split].name(index))
    lines = kinds.lines("equal images")
    if len(alike) > most:
        count = len(alike) - most
        lines.append(f"{count:,} images of the same size were not compared with others")
    ends = np.cumsum([len(images) for images in parts])[:-1]
    return dict(zip(splits, np.split(first, ends), strict=True)), lines


def _checksum(images, index):
    """A checksum of the bytes of an image; of one that cannot be read, its name."""
    try:
        return hashlib.sha256(images.source.read(images.rows[index])).digest()
    except (OSError, ValueError):
        return images.name(index)
