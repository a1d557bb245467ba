"""Finds the images, splits and classes in a folder that has one sub-folder per class."""

import os
import unicodedata

import numpy as np

from utils.data.scan import scan
from utils.data.tables import READERS, describes_itself, one_each, refuse_almost_splits, split_of
from utils.images.decoding import HAS_AVIF, Files, Images
from utils.run.arguments import shown
from utils.run.failures import UserError

EXTENSIONS = {
    *".jpg .jpeg .jpe .jfif .mpo .png .apng .webp .bmp .dib .gif .tif .tiff .tga".split(),
    *".ppm .pgm .pbm .pnm .jp2 .j2k".split(),
    *([".avif"] if HAS_AVIF else []),
}
# Files in which a data set in the Hub's layout keeps its rows.
TABLES = {*READERS, ".tar", ".zip"}
# A list of the images in a folder, with a column `file_name`. The first counts.
LISTS = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def list_in(folder):
    """The file that lists the images of a folder and their classes; None: there is none."""
    files = [folder / name for name in LISTS if (folder / name).is_file()]
    return files[0] if files and not describes_itself(folder) else None


def find(root, layouts):
    """Finds the splits and classes of a folder (Path). Decodes nothing.

    Folders at the top are splits if one of them is called like a split (see `data.tables`), else
    classes. Error messages end with `layouts` (str), what is accepted.

    Returns:
        tuple | None: the splits (dict of `Images`; without split folders all is `train`), the names
        of all classes, and what was left out. None: the folder has tables instead, as a data set of
        the Hub has.

    Raises:
        UserError: there is no class folder, or it cannot be decided which folders are splits.
    """
    files, others, left_out = scan(root, EXTENSIONS)
    loose, folders = _divide(files, 0)
    by_split = _find_splits(root, folders)
    found = {} if by_split or not folders else {"train": folders}
    for split, folder in by_split.items():
        direct, classes = _divide(folders[folder], 1)
        if classes:
            found[split] = classes
        elif split != "test":
            raise UserError(
                f"--dataset {root}: its {split} split has no class folder with images; {layouts}"
            )
        if direct:
            where = "in no class folder" if classes else "of a test split without classes"
            left_out.add(f"images {where}", direct[0], len(direct))
    if not found and any(os.path.splitext(file)[1].lower() in TABLES for file in others):
        return None
    if loose:
        left_out.add("images in no class folder", loose[0], len(loose))
    if not found:
        seen = "; ".join(left_out.lines())
        raise UserError(f"--dataset {root} has no class folder with images ({seen}); {layouts}")
    names = sorted(set().union(*found.values()))
    return {split: _labeled(root, some, names) for split, some in found.items()}, names, left_out


def _divide(files, depth):
    """The files that are directly in a folder, and those below it by sub-folder, as a dict.

    Args: depth (int): number of folders above.
    """
    direct, folders = [], {}
    for file in files:
        # In one form of Unicode: macOS writes accents as letters of their own.
        parts = unicodedata.normalize("NFC", file).split("/")
        if len(parts) == depth + 1:
            direct.append(file)
        else:
            folders.setdefault(parts[depth], []).append(file)
    return direct, folders


def _find_splits(root, folders):
    """The folder of each split: split -> folder; {}: the folders are classes.

    Raises UserError if both kinds are there, or splits have other names or are in a class.
    """
    refuse_almost_splits(root, {folder: split_of(folder) for folder in folders})
    by_split, others = one_each(root, folders)
    if by_split and others:
        folder = next(iter(by_split.values()))
        raise UserError(
            f"--dataset {root}: by its name {folder} is a split, but beside it are images in "
            f"{shown(others[0])}: rename that if it is a split (train, val or test), move all "
            "classes into a folder train, or remove what is neither"
        )
    inside = {folder: [*_divide(files, 1)[1]] for folder, files in folders.items()}
    for folder, names in () if by_split else inside.items():
        split = next(filter(split_of, names), None)
        if split:  # as in cat/train and cat/test: all would be images of one split
            raise UserError(
                f"--dataset {root} has a split in a class, {folder}/{split}: give --dataset "
                f"{root / folder}, or put the classes into the splits, as {split}/{folder}"
            )
    names = inside[others[0]] if len(others) > 1 else []
    if len(names) > 1 and all(some == names for some in inside.values()):
        raise UserError(
            f"--dataset {root}: {', '.join(map(shown, folders))} have the same sub-folders, so "
            f"they are no classes: rename {shown(others[0])}, since a split is called train, val "
            "or test"
        )
    return by_split


def _labeled(root, classes, names):
    """The images of one split, sorted by class."""
    files = [file for name in names for file in classes.get(name, ())]
    counts = [len(classes.get(name, ())) for name in names]
    labels = np.repeat(np.arange(len(names), dtype=np.int64), counts)
    return Images(Files(root, files), np.arange(len(files)), labels)
