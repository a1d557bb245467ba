"""Finds a data set: the one place that decides what its rows, splits, classes and labels are.

A new kind of source is one more module like `array_files`, whose `find` returns splits of `Images`
and class names; every script, and evaluate.py, then takes it.
"""

import hashlib
import unicodedata
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from utils.data.report import LeftOut, count_classes, describe_images
from utils.data.splits import hold_out
from utils.data.tables import READERS, local_path
from utils.images import array_files, image_folder, synthetic
from utils.images.decoding import Images
from utils.images.duplicates import find_duplicates
from utils.run.domains import shown
from utils.run.failures import UserError

SPLITS = ("train", "val", "test", "all")
ALTERNATIVES = (
    "use a folder with one sub-folder per class (or train/ and val/ with such sub-folders), a Hub "
    "id such as uoft-cs/cifar10 or a folder in the Hub's layout, a Parquet file, an .npz file "
    "with arrays, or --dataset synthetic"
)


@dataclass
class ImageSplits:
    """A data set of labeled images.

    `splits` has `train`, and `val`, `test` or both. `class_names` are in the order of the labels.
    `description` is one line with a checksum, which differs if an image was added, removed, renamed
    or changed (`Images.fingerprint` says what it does not see of a thousand files). `details` are
    more lines: the classes, and what was left out.
    """

    splits: dict[str, Images]
    class_names: list[str]
    description: str
    details: list[str] = field(default_factory=list)


def find_images(name, *, seed=0, val_fraction=0.1, image_column=None, label_column=None):
    """Finds the images of a data set and their classes; decodes none.

    A data set without a `val` split gets one, from `train`: an equal share of every class. So no
    script has to choose by results on test data.

    Args:
        name (str): a folder with one sub-folder per class, with or without splits, or with
            a list `metadata.csv` (file_name, label, perhaps split); a Hub id or a folder in the
            Hub's layout; a single file with a table, or with arrays (see `array_files`); or
            `synthetic`.
        seed (int): seed of the split and of `synthetic`.
        val_fraction (float | None): share of each class for the split; 0: none. None: 0.1 if there
            is no `test` split either, else 0. Which images is a deterministic function of the seed
            and their names.
        image_column, label_column (str | None): columns of a table; None: the only ones that have
            images and classes.

    Returns:
        ImageSplits.

    Raises:
        UserError: there is no such data set, it has another layout, or nothing is held out.
    """
    splits, class_names, left_out = _find(name, seed, image_column, label_column)
    splits = {split: splits[split] for split in SPLITS if split in splits}
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
        kept, held_out = split_off(
            train.labels, train.portable_name, class_names, seed, val_fraction, first["train"]
        )
        splits |= {"train": train.select(kept), "val": train.select(held_out)}
    if len(splits) == 1:
        raise UserError(
            f"--dataset {name} has no test split and no val split: give --val_fraction 0.1, say, "
            "to hold out a part of train"
        )
    for split, images in splits.items():
        counts = np.bincount(images.labels, minlength=len(class_names))
        missing = [class_names[label] for label in np.flatnonzero(counts == 0)]
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            class_name = shown(missing[0])
            raise UserError(
                f"--dataset {name}: its {split} split has no image of class {class_name}{others}"
            )
    data = _described(splits, class_names, left_out)
    data.details += copies
    return data


def find_to_evaluate(name, class_names, *, image_column=None, label_column=None):
    """Finds labeled images that a trained model has not seen.

    Args:
        class_names (list[str]): those of the model, of which the data set may lack some.
        image_column, label_column: as for `find_images`.

    Returns:
        ImageSplits: with one split, `test` or else `val`, if the data set has it; else `all`.

    Raises:
        UserError: there is no such data set, or it has other classes.
    """
    splits, _, left_out = _find(name, 0, image_column, label_column, class_names)
    split = next(split for split in ("test", "val", "train") if split in splits)
    used = {"all" if split == "train" else split: splits[split]}
    for other in splits.keys() - {split}:
        left_out.add(f"images of the {other} split", splits[other].name(0), len(splits[other]))
    return _described(used, class_names, left_out)


def _find(name, seed, image_column, label_column, class_names=None):
    """Splits, class names and what was left out of any data set."""
    if name == "synthetic":
        return synthetic.find(seed)
    path = local_path(name, ALTERNATIVES)
    if path and path.is_file() and path.suffix.lower() == ".npz":
        return *array_files.find(name, path, class_names), LeftOut()
    if path and path.is_file() and path.suffix.lower() not in READERS:
        known = ", ".join([*READERS, ".npz"])
        raise UserError(f"--dataset {name} is a file that does not end in {known}; {ALTERNATIVES}")
    if path and path.is_dir():
        file = image_folder.list_in(path)
        found = None if file else image_folder.find(path.resolve(), ALTERNATIVES, class_names)
        if found:
            return found
        if file:
            path, image_column = file, image_column or "file_name"
    from utils.images import tables  # here, because it imports `datasets`, which takes a second

    return tables.find(name, path, image_column, label_column, ALTERNATIVES, class_names)


def _described(splits, class_names, left_out):
    splits = {split: splits[split] for split in SPLITS if split in splits}
    fingerprints = {split: images.fingerprint() for split, images in splits.items()}
    description = describe_images(splits, class_names, fingerprints)
    details = [*count_classes(splits, class_names), *left_out.lines(), *_look_alikes(class_names)]
    return ImageSplits(splits, class_names, description, details)


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


def split_off(labels, name_of, class_names, seed, fraction, first=None):
    """Chooses an equal share of every class: those that come first by a hash of name and seed.

    Equal images stay on one side; if they are of different classes, they are not held out.

    Args:
        labels: int64 array [samples].
        name_of: a function that returns the name of a sample, the same on every machine.
        class_names (list[str]): in the order of the labels.
        fraction (float): share of each class.
        first: int64 array [samples], the index of the first equal sample; None: all differ.

    Returns:
        tuple: the indices of the samples that stay, and those of the others; int64 arrays, sorted.

    Raises:
        UserError: a class has fewer than two samples.
    """
    held_out = np.zeros(len(labels), dtype=bool)
    first = np.arange(len(labels)) if first is None else first
    ambiguous = first[labels != labels[first]]
    for label, class_name in enumerate(class_names):
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            plural = "" if len(members) == 1 else "s"
            raise UserError(
                f"class {class_name} has {len(members)} image{plural}: at least 2 are needed to "
                "split off a val split"
            )
        certain = members[~np.isin(first[members], ambiguous)]
        members = certain if len(certain) > 1 else members
        keys = [
            hashlib.blake2b(f"{seed}/{name_of(i)}".encode("utf-8", "surrogateescape")).digest()
            for i in first[members]
        ]
        held_out[members[hold_out(keys, fraction)]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
