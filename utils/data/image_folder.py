"""Finds the images and classes in a folder that has one sub-folder per class."""

import os
from collections import Counter
from pathlib import Path

import numpy as np

from utils.data.images import Files, Images
from utils.run.failures import UserError
from utils.run.process import is_main

EXTENSIONS = {*".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm".split()}
# Files in which a data set in the Hub's layout keeps its rows.
TABLES = {*".parquet .arrow .jsonl .json .csv .tar .zip".split()}
VAL, TEST = ("val", "valid", "validation"), ("test",)  # names of the splits that are held out


def find(root, layouts):
    """Finds the splits and classes of a folder. Decodes nothing.

    Args:
        root (Path): with one sub-folder per class, or train/, val/ and test/ with such sub-folders.
        layouts (str): what is accepted; error messages end with it.

    Returns:
        tuple[dict[str, Images], list[str]] | None: splits and class names; without split folders
        all is `train`. None: the folder has tables instead, as a data set of the Hub has.

    Raises:
        UserError: there is no class folder, or a class of another split is not in `train`.
    """
    scanner = _Scanner(root)
    loose, folders = scanner.list(root)
    found = _scan_splits(scanner, folders, layouts) or {"train": scanner.classes(folders)}
    found = {split: classes for split, classes in found.items() if classes}
    if not found and scanner.has_tables:
        return None
    if is_main():
        scanner.report_ignored()
    if not found:
        where = "no sub-folder has images"
        if loose:
            where = f"{len(loose)} image{'s are' if len(loose) > 1 else ' is'} directly in it"
        raise UserError(f"--dataset {root} has no class folder ({where}); {layouts}")
    if "train" not in found:
        raise UserError(f"--dataset {root} has no train split, only {', '.join(found)}; {layouts}")
    names = sorted(found["train"])
    for split, classes in found.items():
        unknown = sorted(classes.keys() - found["train"].keys())
        if unknown:
            raise UserError(
                f"--dataset {root}: class {unknown[0]} of its {split} split is not in its "
                "train split"
            )
    return {split: _labeled(root, classes, names) for split, classes in found.items()}, names


def unlabeled(path):
    """Finds the images in a folder and below it, or takes a single file; all labels are 0.

    Returns:
        Images: sorted by name.

    Raises:
        UserError: there are none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        files, root = [root.name], root.parent
    else:
        files = [
            os.path.relpath(os.path.join(folder, name), root)
            for folder, _, names in os.walk(root)
            for name in names
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS
        ]
    if not files:
        reason = "it has no images" if root.is_dir() else "there is no such folder or file"
        raise UserError(f"--images {path}: {reason}")
    labels = np.zeros(len(files), dtype=np.int64)
    return Images(Files(root, sorted(files)), np.arange(len(files)), labels)


class _Scanner:
    """Lists images, and remembers which other files it saw."""

    def __init__(self, root):
        self.root, self.ignored, self.has_tables = root, Counter(), False

    def list(self, folder):
        """The images directly in a folder, as paths relative to the root, and its sub-folders."""
        files, folders = [], []
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
        for entry in entries:
            if entry.name.startswith((".", "__MACOSX")):
                continue
            suffix = os.path.splitext(entry.name)[1].lower()
            if entry.is_dir():
                folders.append(entry.path)
            elif suffix in EXTENSIONS:
                files.append(os.path.relpath(entry.path, self.root))
            elif suffix in TABLES:
                self.has_tables = True
            else:
                self.ignored[suffix] += 1
        return files, folders

    def below(self, folder):
        """All images in a folder and in its sub-folders."""
        files, folders = self.list(folder)
        return files + [file for inner in folders for file in self.below(inner)]

    def classes(self, folders):
        """The images of each folder that has any, by the name of the folder."""
        found = {os.path.basename(folder): self.below(folder) for folder in folders}
        return {name: files for name, files in found.items() if files}

    def report_ignored(self):
        """Prints what was not taken for an image, by suffix."""
        if self.ignored:
            counts = [
                f"{count:,} {suffix or 'without suffix'}"
                for suffix, count in sorted(self.ignored.items())
            ]
            listed = ", ".join(counts)
            print(f"{self.root}: ignored files that are not images by their names: {listed}")


def _scan_splits(scanner, folders, layouts):
    """The classes of each split: split -> class -> files; None if the folders are not splits."""
    by_name = {os.path.basename(folder).lower(): folder for folder in folders}
    if "train" not in by_name:
        return None
    images, class_folders = _Scanner(scanner.root).list(by_name["train"])
    if images or not class_folders:
        return None  # a class that is called train
    splits = {}
    for split, aliases in (("train", ("train",)), ("val", VAL), ("test", TEST)):
        alias = next((alias for alias in aliases if alias in by_name), None)
        if alias:
            splits[split] = scanner.classes(scanner.list(by_name[alias])[1])
    empty = [split for split, classes in splits.items() if not classes]
    if empty and not scanner.has_tables:
        raise UserError(
            f"--dataset {scanner.root}: its {empty[0]} split has no class folder with images; "
            f"{layouts}"
        )
    return splits


def _labeled(root, classes, names):
    """The images of one split, sorted by class."""
    files = [file for name in names for file in classes.get(name, ())]
    counts = [len(classes.get(name, ())) for name in names]
    labels = np.repeat(np.arange(len(names), dtype=np.int64), counts)
    return Images(Files(root, files), np.arange(len(files)), labels)
