"""Finds images with equal bytes: a model must not be evaluated on copies of what it trained on."""

from collections import defaultdict

import numpy as np

from utils.data.report import LeftOut

ENDS = 4096  # bytes
COMPARED = 400  # images; of more than 40,000, a hundredth


def find_duplicates(splits):
    """Finds equal images, within and across splits.

    Images of the same size are compared by their first and last bytes, and if these are equal, by
    all. If too many have the same size, those are compared whose size the fewest others have.

    Args:
        splits (dict): name -> Images.

    Returns:
        tuple: split -> int64 array [samples], the number of the first image with the same bytes,
        counted over all splits; how many images of the same size were not compared.
    """
    sizes = np.concatenate([images.source.sizes[images.rows] for images in splits.values()])
    _, groups, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    alike = np.flatnonzero((counts[groups] > 1) & (sizes > 0))
    alike = alike[np.argsort(counts[groups[alike]], kind="stable")]
    most = max(COMPARED, len(sizes) // 100)
    first = np.arange(len(sizes))
    for number, copies in _equal(alike[:most].tolist(), splits).items():
        first[copies] = number
    ends = np.cumsum([len(images) for images in splits.values()])[:-1]
    return dict(zip(splits, np.split(first, ends), strict=True)), max(0, len(alike) - most)


def describe_duplicates(splits, first, uncompared):
    """Lines for the report about a data set: which images are in it more than once.

    Args:
        splits (dict): name -> Images.
        first, uncompared: as `find_duplicates` returns them, for these splits.
    """
    numbers, counts = np.unique(np.concatenate(list(first.values())), return_counts=True)
    repeated = numbers[counts > 1]
    seen, kinds = {}, LeftOut()
    for split, images in splits.items():
        for index in np.flatnonzero(np.isin(first[split], repeated)).tolist():
            number, label = int(first[split][index]), int(images.labels[index])
            if number not in seen:
                seen[number] = split, label
                continue
            other_split, other_label = seen[number]
            place = f"in {split}" if split == other_split else f"in {other_split} and {split}"
            classes = "" if label == other_label else ", with different classes"
            kinds.add(f"twice {place}{classes}", images.name(index))
    lines = kinds.lines("equal images")
    if uncompared:
        lines.append(f"{uncompared:,} images of the same size were not compared with others")
    return lines


def _equal(numbers, splits):
    """The numbers of equal images, by the lowest of them."""
    parts = list(splits.values())
    starts = np.cumsum([0, *map(len, parts)])

    def digest(number, *ends):
        part = np.searchsorted(starts, number, side="right") - 1
        return parts[part].digest(parts[part].rows[number - starts[part]], *ends)

    by_ends, by_content = defaultdict(list), defaultdict(list)
    for number in sorted(numbers):
        by_ends[digest(number, ENDS)].append(number)
    for candidates in by_ends.values():
        for number in candidates if len(candidates) > 1 else ():
            by_content[digest(number)].append(number)
    return {copies[0]: copies for copies in by_content.values()}
