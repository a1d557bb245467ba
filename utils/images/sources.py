"""Finds a data set: the one place that decides what its rows, splits, classes and labels are.

A new kind of source is one more function like `local.find_arrays`, which returns splits of `Images`
and class names; every script, and evaluate.py, then takes it.
"""

import hashlib
import unicodedata
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from utils.data.scan import LeftOut
from utils.data.tables import SPLITS, hold_out, local_path
from utils.images import local
from utils.images.decoding import Images
from utils.run.arguments import shown
from utils.run.failures import UserError
from utils.run.output import one_line, plural

CLASSES_SHOWN = 10
COMPARED = 400  # images that may be copies; of more than 40,000, a hundredth
ALTERNATIVES = (
    "use a folder with one sub-folder per class (or train/ and val/ with such sub-folders), a Hub "
    "id such as uoft-cs/cifar10 or a folder in the Hub's layout, a Parquet file, an .npz file "
    "with arrays, or --dataset synthetic (scripts/README.md makes folders from a list of files)"
)


@dataclass
class ImageSplits:
    """A data set of labeled images.

    `splits` has `train`, and `val`, `test` or both. `class_names` are in the order of the labels.
    `description` is one line with a checksum (see `Images.fingerprint`), `details` are more lines:
    the classes, and what was left out.
    """

    splits: dict[str, Images]
    class_names: list[str]
    description: str
    details: list[str] = field(default_factory=list)


def find_images(name, *, seed=0, val_fraction=0.1, columns=None):
    """Finds the images of a data set and their classes; decodes none.

    A data set without a `val` split gets one, from `train`: an equal share of every class. So no
    script has to choose by results on test data.

    Args:
        name (str): see `ALTERNATIVES`.
        seed (int): seed of the split and of `synthetic`.
        val_fraction (float | None): share of each class for the split; 0: none. None: 0.1 if there
            is no `test` split either, else 0. The seed and the names of images decide which ones.
        columns (tuple | None): of a table, those with the images and the classes; None, also in the
            tuple: the only ones.

    Returns:
        ImageSplits.

    Raises:
        UserError: there is no such data set, it has another layout, or nothing is held out.
    """
    splits, class_names, left_out = find_splits(name, seed, columns)
    if len(class_names) < 2:
        raise UserError(
            f"--dataset {name} has only one class, {class_names[0]}: a classifier needs at least "
            "two"
        )
    first, copies = find_duplicates(splits)
    if val_fraction is None:
        val_fraction = 0.1 if len(splits) == 1 else 0
    if "val" not in splits and val_fraction > 0:
        train = splits["train"]
        train_rows, val_rows = split_off(train, class_names, seed, val_fraction, first)
        splits |= {"train": train.select(train_rows), "val": train.select(val_rows)}
    if len(splits) == 1:
        raise UserError(
            f"--dataset {name} has no test split and no val split: give --val_fraction 0.1, say, "
            "to hold out a part of train"
        )
    for split, images in splits.items():
        missing = np.flatnonzero(np.bincount(images.labels, minlength=len(class_names)) == 0)
        if len(missing):
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            class_name = shown(class_names[missing[0]])
            raise UserError(
                f"--dataset {name}: its {split} split has no image of class {class_name}{others}"
            )
    return described(splits, class_names, left_out, copies)


def find_splits(name, seed=0, columns=None, class_names=None):
    """Finds the splits that a data set has: `find_images` describes the arguments and errors.

    Args: class_names (list[str] | None): those of a model, which may have more; None: those of the
        training images.

    Returns:
        tuple: the splits (dict of `Images`), the names of the classes, and what was `LeftOut`.
    """
    splits, names, left_out = _open(name, seed, columns or (None, None), class_names)
    splits = {split: splits[split] for split in SPLITS if split in splits}
    if class_names is None and "train" not in splits:
        raise UserError(
            f"--dataset {name} has no train split, only {', '.join(splits)}: add it, or rename a "
            f"class that is called so; {ALTERNATIVES}"
        )
    where = "those of the model"
    if class_names is None:
        where = "its train split"
        class_names = [names[label] for label in np.unique(splits["train"].labels)]
        unused = [class_name for class_name in names if class_name not in class_names]
        if unused:
            left_out.add("classes without images to train with", unused[0], len(unused))
    position = {class_name: label for label, class_name in enumerate(class_names)}
    new_labels = np.array([position.get(class_name, -1) for class_name in names], dtype=np.int64)
    for split, images in splits.items():
        labels = new_labels[images.labels]
        for index in np.flatnonzero(labels < 0)[:1]:
            class_name = shown(names[images.labels[index]])
            raise UserError(
                f"--dataset {name}: class {class_name} of its {split} split "
                f"({images.name(index)}) is not in {where}"
            )
        splits[split] = Images(images.source, images.rows, labels)
    return splits, class_names, left_out


def _open(name, seed, columns, class_names):
    """Splits with labels of their own, the names of these, and what was left out."""
    if name in local.COUNTS:
        return *local.draw_splits(seed, name), LeftOut()
    path = local_path(name, ALTERNATIVES)
    if path and path.is_file() and path.suffix.lower() == ".npz":
        return *local.find_arrays(name, path, class_names), LeftOut()
    if path and path.is_file() and path.suffix.lower() not in local.TABLES:
        suffixes = ", ".join([*local.TABLES, ".npz"])
        raise UserError(
            f"--dataset {name} is a file that does not end in {suffixes}; {ALTERNATIVES}"
        )
    images = local.find_in_folder(path.resolve(), ALTERNATIVES) if path and path.is_dir() else None
    if images:
        return images
    from utils.images import tables  # here, because it imports `datasets`, which takes a second

    return tables.find(name, path, columns, ALTERNATIVES)


def described(splits, class_names, left_out, copies=()):
    """These splits as `ImageSplits`; `copies` are lines about equal images."""
    splits = {split: splits[split] for split in (*SPLITS, "all") if split in splits}
    details = [*count_classes(splits, class_names), *left_out.lines(), *_look_alikes(class_names)]
    counts = [f"{len(images):,} {split}".removesuffix(" all") for split, images in splits.items()]
    listed = " and ".join([", ".join(counts[:-1]), counts[-1]] if len(counts) > 1 else counts)
    digest = hashlib.sha256(repr(class_names).encode("utf-8", "surrogateescape"))
    for images in splits.values():
        digest.update(images.fingerprint().encode())
    short = digest.hexdigest()[:12]
    description = f"{listed} images of {len(class_names)} classes (fingerprint {short})"
    return ImageSplits(splits, class_names, description, [*details, *copies])


def count_classes(splits, class_names):
    """A line for each split: how many images it has, and how many of the first ten classes."""
    lines, width = [], max(map(len, splits))
    names = [shown(name) if name != name.strip() else one_line(name) for name in class_names]
    for split, images in splits.items():
        counts = np.bincount(images.labels, minlength=len(class_names)).tolist()
        pairs = zip(names[:CLASSES_SHOWN], counts, strict=False)
        listed = ", ".join(f"{name} {count:,}" for name, count in pairs)
        more = len(class_names) - CLASSES_SHOWN
        others = f", and {more} more classes" if more > 0 else ""
        lines.append(f"{split:{width}} {len(images):,}: {listed}{others}")
    return lines


def _look_alikes(class_names):
    """Lines about classes whose names a person takes for the same."""
    forms = defaultdict(list)
    for name in class_names:
        form = unicodedata.normalize("NFKC", name).casefold()
        forms["".join(form.split())].append(shown(name))
    return [
        f"classes whose names differ only in case or space: {', '.join(names)}"
        for names in forms.values()
        if len(names) > 1
    ]


def split_off(images, class_names, seed, fraction, first):
    """Chooses an equal share of every class: those that come first by a hash of name and seed.

    Equal images stay on one side; if they are of different classes, they are not held out.

    Args:
        fraction (float): the share of each class.
        first: int64 array [samples], the index of the first equal sample.

    Returns:
        tuple: the indices of the samples that stay, and those of the others; int64 arrays, sorted.

    Raises:
        UserError: a class has fewer than two samples.
    """
    held_out = np.zeros(len(images), dtype=bool)
    ambiguous = first[images.labels != images.labels[first]]
    for label, class_name in enumerate(class_names):
        members = np.flatnonzero(images.labels == label)
        if len(members) < 2:
            raise UserError(
                f"class {class_name} has {plural(len(members), 'image')}: at least 2 are needed to "
                "split off a val split"
            )
        certain = members[~np.isin(first[members], ambiguous)]
        members = certain if len(certain) > 1 else members
        keys = [f"{seed}/{images.portable_name(index)}" for index in first[members]]
        keys = [hashlib.blake2b(key.encode("utf-8", "surrogateescape")).digest() for key in keys]
        held_out[members[hold_out(keys, fraction)]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def find_duplicates(splits):
    """Finds equal images, within and across splits: among those of the same size, by a checksum.

    If too many have the same size, those are compared whose size the fewest others have.

    Returns:
        tuple: int64 array [training images], the number of the first of these with the same bytes;
        lines for the report about the data set.
    """
    by_size = defaultdict(list)
    for split, images in splits.items():
        for index, size in enumerate(images.source.sizes[images.rows].tolist()):
            by_size[size].append((split, index))
    groups = [group for size, group in by_size.items() if size > 0 and len(group) > 1]
    alike = [place for group in sorted(groups, key=len) for place in group]
    most = max(COMPARED, sum(map(len, splits.values())) // 100)
    first, seen, kinds = np.arange(len(splits["train"])), {}, LeftOut()
    for split, index in alike[:most]:
        images, place = splits[split], (split, index)
        other_split, other = seen.setdefault(_checksum(images, index), place)
        if (other_split, other) == place:
            continue
        if split == "train":
            first[index] = other
        where = f"in {split}" if split == other_split else f"in {other_split} and {split}"
        same_class = images.labels[index] == splits[other_split].labels[other]
        classes = "" if same_class else ", with different classes"
        kinds.add(f"twice {where}{classes}", images.name(index))
    lines = kinds.lines("equal images")
    if len(alike) > most:
        count = len(alike) - most
        lines.append(f"{count:,} images of the same size were not compared with others")
    return first, lines


def _checksum(images, index):
    """A checksum of the bytes of an image; of one that cannot be read, its name."""
    try:
        return hashlib.sha256(images.source.read(images.rows[index])).digest()
    except (OSError, ValueError):
        return images.name(index)
