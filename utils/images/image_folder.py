"""Finds the images, splits and classes in a folder that has one sub-folder per class."""

import os
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np

from utils.data.report import LeftOut
from utils.data.scan import UNREADABLE, Scanner
from utils.data.splits import one_each, refuse_almost_splits, split_of
from utils.data.tables import describes_itself
from utils.images.decoding import HAS_AVIF, Images
from utils.images.storage import Files
from utils.run.domains import shown
from utils.run.failures import UserError

EXTENSIONS = {
    *".jpg .jpeg .jpe .jfif .mpo .png .apng .webp .bmp .dib .gif .tif .tiff .tga".split(),
    *".ppm .pgm .pbm .pnm .jp2 .j2k".split(),
    *([".avif"] if HAS_AVIF else []),
}
# Files in which a data set in the Hub's layout keeps its rows.
TABLES = {*".parquet .arrow .jsonl .ndjson .json .csv .tsv .tar .zip".split()}
# A list of the images in a folder, with a column `file_name`.
LISTS = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def list_in(folder):
    """The file that lists the images of a folder and their classes; None: there is none.

    Raises:
        UserError: there are two.
    """
    files = [folder / name for name in LISTS if (folder / name).is_file()]
    if len(files) > 1:
        raise UserError(
            f"{folder} has {files[0].name} and {files[1].name}: remove or rename one of them"
        )
    return files[0] if files and not describes_itself(folder) else None


def find(root, layouts, class_names=None):
    """Finds the splits and classes of a folder. Decodes nothing.

    Folders at the top are splits if one of them is called like a split (see `splits`), else
    classes.

    Args:
        root (Path): with one sub-folder per class, or folders for the splits with such sub-folders.
        layouts (str): what is accepted; error messages end with it.
        class_names (list[str] | None): the classes, of which some may have no image, and the train
            split may be absent: a data set to evaluate. None: those in `train`.

    Returns:
        tuple | None: the splits (dict of `Images`; without split folders all is `train`), class
        names, and what was left out. None: the folder has tables instead, as a data set of the Hub
        has.

    Raises:
        UserError: there is no class folder; a class is not in `train` or in `class_names`; a class
            has files, but no images; or it cannot be decided which folders are splits.
    """
    scanner = Scanner(root, EXTENSIONS)
    loose, folders = scanner.list()
    by_split = _find_splits(scanner, folders)
    if by_split:
        found = _read_splits(scanner, by_split, layouts)
    else:
        found = {"train": _classes(scanner, "")}
        _refuse_splits_in_classes(scanner, found["train"])
    found = {split: classes for split, classes in found.items() if classes}
    if not found and TABLES & scanner.others_below("").keys():
        return None
    if not found:
        where = "no sub-folder has images"
        if loose:
            where = f"{len(loose)} image{'s are' if len(loose) > 1 else ' is'} directly in it"
        raise UserError(f"--dataset {root} has no class folder ({where}); {layouts}")
    if loose:
        scanner.left_out.add("images in no class folder", loose[0], len(loose))
    if class_names is None and "train" not in found:
        raise UserError(
            f"--dataset {root} has no train split, only {', '.join(found)}: add it, or rename a "
            f"class that is called so; {layouts}"
        )
    names = class_names or sorted(found["train"])
    for split, classes in found.items():
        unknown = sorted(classes.keys() - set(names))
        if unknown:
            those = "its train split" if class_names is None else f"those of the model: {names}"
            class_name = shown(unknown[0])
            raise UserError(
                f"--dataset {root}: class {class_name} of its {split} split is not in {those}"
            )
    images = {split: _labeled(root, classes, names) for split, classes in found.items()}
    return images, names, scanner.left_out


def unlabeled(path):
    """Finds the images in a folder and below it, or takes a single file; all labels are 0.

    Returns:
        tuple[Images, list[str]]: images, sorted by name; lines about what else is in the folder.

    Raises:
        UserError: there are none.
    """
    root, left_out = Path(path).expanduser(), LeftOut()
    if root.is_file():
        files, root = [root.name], root.parent
    elif root.is_dir():
        scanner = Scanner(root, EXTENSIONS)
        files, left_out = scanner.below(), scanner.left_out
    else:
        raise UserError(f"--images {path}: there is no such folder or file")
    if not files:
        seen = "; ".join(left_out.lines())
        raise UserError(f"--images {path}: it has no images{f' ({seen})' if seen else ''}")
    labels = np.zeros(len(files), dtype=np.int64)
    images = Images(Files(root, sorted(files)), np.arange(len(files)), labels)
    return images, left_out.lines()


# ----------------------------------------------------------------------------------------- splits


def _find_splits(scanner, folders):
    """The folder of each split: split -> folder; {}: the folders are classes."""
    folders = [folder for folder in folders if scanner.below(folder)]
    refuse_almost_splits(scanner.root, {folder: split_of(folder) for folder in folders})
    by_split, others = one_each(scanner.root, folders)
    if len(by_split) < 2:
        _refuse_other_splits(scanner, folders, others)
    if len(by_split) == 1 and others:
        (folder,) = by_split.values()
        raise UserError(
            f"--dataset {scanner.root}: by its name {folder} is a split, but beside it are images "
            f"in {others[0]}: move all classes into a folder train, or rename {folder}"
        )
    if by_split:
        for folder in others:
            files = scanner.below(folder)
            scanner.left_out.add("images in folders beside the splits", files[0], len(files))
    return by_split


def _refuse_other_splits(scanner, folders, others):
    """Raises UserError for fold1 and fold2, or fit and holdout: with the same classes in each."""
    inside = {tuple(map(os.path.basename, scanner.list(folder)[1])) for folder in folders}
    same = inside.pop() if len(inside) == 1 and len(folders) > 1 else ()
    if others and len(same) > 1 and not any(map(split_of, same)):
        raise UserError(
            f"--dataset {scanner.root}: {', '.join(map(shown, folders))} have the same "
            f"sub-folders, so they are no classes: rename {shown(others[0])}, since a split is "
            "called train, val or test"
        )


def _read_splits(scanner, by_split, layouts):
    """The classes of each split: split -> class -> files."""
    found = {}
    for split, folder in by_split.items():
        direct, classes = scanner.list(folder)[0], _classes(scanner, folder)
        if not classes and split != "test":
            raise UserError(
                f"--dataset {scanner.root}: its {split} split has no class folder with images; "
                f"{layouts}"
            )
        found[split] = classes
        if direct:
            where = "in no class folder" if classes else "of a test split without classes"
            scanner.left_out.add(f"images {where}", direct[0], len(direct))
    return found


# ---------------------------------------------------------------------------------------- classes


def _classes(scanner, folder):
    """The images of each class folder in a folder, by the name of the class."""
    found = {}
    for inside in scanner.list(folder)[1]:
        files = scanner.below(inside)
        if files:
            # One form of Unicode: macOS writes accents as letters of their own.
            name = unicodedata.normalize("NFC", os.path.basename(inside))
            found.setdefault(name, []).extend(files)
            continue
        others = scanner.others_below(inside)
        images = [suffix for suffix in others if suffix in UNREADABLE or not suffix]
        if images or (folder and others):
            raise UserError(
                f"--dataset {scanner.root}: {inside} has no image that can be read, only"
                f" {_listed(others)}: convert them to JPEG or PNG, with such a suffix, or remove it"
            )
        scanner.left_out.add("folders without images", inside)
    return found


def _refuse_splits_in_classes(scanner, classes):
    """Raises UserError for cat/train and cat/test: all would be images of one split."""
    for name in classes:
        for inside in scanner.list(name)[1]:
            split = os.path.basename(inside)
            if split_of(split):
                raise UserError(
                    f"--dataset {scanner.root} has a split in a class, {inside}: give --dataset "
                    f"{scanner.root / name}, or put the classes into the splits, as {split}/{name}"
                )


def _labeled(root, classes, names):
    """The images of one split, sorted by class."""
    files = [file for name in names for file in classes.get(name, ())]
    counts = [len(classes.get(name, ())) for name in names]
    labels = np.repeat(np.arange(len(names), dtype=np.int64), counts)
    return Images(Files(root, files), np.arange(len(files)), labels)


def _listed(others):
    counts = Counter(others).most_common(3)
    return ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in counts)
