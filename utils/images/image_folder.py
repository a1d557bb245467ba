"""Finds the images, splits and classes in a folder that has one sub-folder per class."""

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import features

from utils.data import splits as split_names
from utils.data.report import LeftOut
from utils.data.scan import UNREADABLE, Scanner
from utils.images import pixels
from utils.images.decoding import Files, Images
from utils.run.failures import UserError

EXTENSIONS = {
    *".jpg .jpeg .jpe .jfif .mpo .png .apng .webp .bmp .dib .gif .tif .tiff .tga".split(),
    *".ppm .pgm .pbm .pnm .jp2 .j2k".split(),
    # Since Pillow 11.2, if built with it; `check` would warn about a name that it does not know.
    *([".avif"] if "avif" in features.modules and features.check("avif") else []),
}
# Files in which a data set in the Hub's layout keeps its rows.
TABLES = {*".parquet .arrow .jsonl .ndjson .json .csv .tsv .tar .zip".split()}
# What a folder of images without classes is often called: test/unknown/1.jpg.
WITHOUT_CLASSES = {"unknown", "unlabeled", "unlabelled", "images", "imgs", "all"}


class Found(NamedTuple):
    """A folder of labeled images: splits (dict of `Images`), class names, what was left out."""

    splits: dict
    class_names: list
    left_out: LeftOut


class _Folder(NamedTuple):
    """A folder at the top, and how many images are in it and in its sub-folders."""

    path: str
    direct: int
    nested: int


def find(root, layouts, class_names=None):
    """Finds the splits and classes of a folder. Decodes nothing.

    Folders at the top are splits if `splits.assign` says so by their names, and if the train folder
    has sub-folders with images.

    Args:
        root (Path): with one sub-folder per class, or folders for the splits with such sub-folders.
        layouts (str): what is accepted; error messages end with it.
        class_names (list[str] | None): the classes, of which some may have no image, and the train
            split may be absent: a data set to evaluate. None: those in `train`.

    Returns:
        Found | None: without split folders all is `train`. None: the folder has tables instead, as
        a data set of the Hub has.

    Raises:
        UserError: there is no class folder; a class is not in `train` or in `class_names`; a class
            has files, but no images; or it cannot be decided which folders are splits.
    """
    scanner = Scanner(root, EXTENSIONS, TABLES)
    loose, folders = scanner.list()
    by_split = _find_splits(scanner, folders)
    if by_split:
        found = _read_splits(scanner, by_split, folders, layouts)
    else:
        found = {"train": _classes(scanner, "")}
        _refuse_splits_in_classes(scanner, found["train"])
    found = {split: classes for split, classes in found.items() if classes}
    if not found and scanner.tables:
        return None
    if not found:
        where = "no sub-folder has images"
        if loose:
            where = f"{len(loose)} image{'s are' if len(loose) > 1 else ' is'} directly in it"
        raise UserError(f"--dataset {root} has no class folder ({where}); {layouts}")
    if loose:
        scanner.left_out.add("images that are in no class folder", loose[0], len(loose))
    if class_names is None and "train" not in found:
        raise UserError(f"--dataset {root} has no train split, only {', '.join(found)}; {layouts}")
    names = class_names or sorted(found["train"])
    for split, classes in found.items():
        unknown = sorted(classes.keys() - set(names))
        if unknown:
            those = "its train split" if class_names is None else f"those of the model: {names}"
            raise UserError(
                f"--dataset {root}: class {unknown[0]} of its {split} split is not in {those}"
            )
    images = {split: _labeled(root, classes, names) for split, classes in found.items()}
    return Found(images, names, scanner.left_out)


def unlabeled(path, scaling=None):
    """Finds the images in a folder and below it, or takes a single file; all labels are 0.

    Args:
        scaling (dict | None): that of the training images, see `pixels`; without one, it is decided
            by these images.

    Returns:
        tuple[Images, list[str]]: images, sorted by name; lines about how their values are scaled
        and what else is in the folder.

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
    said = pixels.describe(scaling or {}, "as in training")
    if not scaling:
        scaling, said = pixels.find_scaling(path, images.subsample(pixels.SAMPLE).headers())
    images.scaling = scaling
    return images, [*said, *left_out.lines()]


# ----------------------------------------------------------------------------------------- splits


def _find_splits(scanner, folders):
    """The folder of each split: split -> `_Folder`; {} if the folders are classes."""
    said = split_names.assign([os.path.basename(folder) for folder in folders])
    seen = [_look(scanner, folder, said) for folder in folders]
    seen = [folder for folder in seen if folder.direct or folder.nested or _top(folder) in said]
    named = [folder for folder in seen if _top(folder) in said]
    others = [folder for folder in seen if _top(folder) not in said]
    by_split = {}
    for folder in named:
        by_split.setdefault(said[_top(folder)], []).append(folder)
    is_split = [folder for folder in named if folder.nested > folder.direct]
    flat = [folder for folder in named if folder.direct and folder not in is_split]
    train = [folder for folder in by_split.get("train", ()) if folder in is_split]
    if not train:
        return _without_train(scanner, by_split, is_split, flat, others)
    if len(named) == 1 and others:
        raise UserError(
            f"--dataset {scanner.root}: is {_top(train[0])} a split or a class? Beside it are "
            f"images in {_top(others[0])}: move all classes into {_top(train[0])}, or rename it"
        )
    return _one_each(scanner, by_split)


def _without_train(scanner, by_split, is_split, flat, others):
    """What `_find_splits` returns if no folder has the classes of the train split."""
    if len(flat) > 1 or (flat and not others):
        names = " and ".join(_top(folder) for folder in flat)
        raise UserError(
            f"--dataset {scanner.root} has images directly in {names}: to be splits, they need one "
            f"sub-folder per class, as {_top(flat[0])}/cat/1.jpg; if they are classes, rename them"
        )
    held_out = [folder for folder in flat if folder not in by_split.get("train", ())]
    if held_out:  # while a class may well be called train
        name = _top(held_out[0])
        raise UserError(
            f"--dataset {scanner.root}: is {name} a class, or a split without classes? If it is a "
            "class, rename it; if not, move it away, and the classes into a folder train"
        )
    if is_split and not others:
        return _one_each(scanner, by_split)
    classes = {os.path.basename(folder.path) for folder in others}
    for folder in is_split:
        inside = {os.path.basename(inner) for inner in scanner.list(folder.path)[1]}
        if inside & classes:
            raise UserError(
                f"--dataset {scanner.root}: is {_top(folder)} a split or a class? It has "
                f"{sorted(inside & classes)[0]} in it, and so has the folder above: move the "
                "other classes into a folder train, or rename it"
            )
    return {}


def _one_each(scanner, by_split):
    """The only folder of each split. Raises UserError if there are two."""
    for split, several in by_split.items():
        if len(several) > 1:
            raise UserError(
                f"--dataset {scanner.root}: {_top(several[0])} and {_top(several[1])} both look "
                f"like its {split} split: rename or move one of them"
            )
    return {split: several[0] for split, several in by_split.items()}


def _look(scanner, folder, said):
    """A folder at the top; of a split in a folder of the same split (train/train), the inner one.

    Of folders that cannot be splits, the images are not told apart.
    """
    split = said.get(os.path.basename(folder))
    if split is None:
        return _Folder(folder, len(scanner.below(folder)), 0)
    files, inside = scanner.list(folder)
    names = [os.path.basename(folder) for folder in inside]
    if not files and len(names) == 1 and split_names.split_of(names[0]) == split:
        return _look(scanner, inside[0], {names[0]: split})
    return _Folder(folder, len(files), len(scanner.below(folder)) - len(files))


def _top(folder):
    return folder.path.split("/")[0]


def _read_splits(scanner, by_split, folders, layouts):
    """The classes of each split: split -> class -> files."""
    found, used = {}, {_top(folder) for folder in by_split.values()}
    for split in ("train", "val", "test"):
        folder = by_split.get(split)
        if folder is None:
            continue
        if split == "test" and _has_no_classes(scanner, folder):
            files = scanner.below(folder.path)
            example = files[0] if files else folder.path
            kind = "images of a test split without classes"
            scanner.left_out.add(kind, example, len(files))
            continue
        if not folder.nested:
            raise UserError(
                f"--dataset {scanner.root}: its {split} split has no class folder with images; "
                f"{layouts}"
            )
        direct = scanner.list(folder.path)[0]
        if direct:
            scanner.left_out.add("images that are in no class folder", direct[0], len(direct))
        found[split] = _classes(scanner, folder.path)
    for folder in folders:
        files = [] if folder in used else scanner.below(folder)
        if files:
            scanner.left_out.add("images in folders beside the splits", files[0], len(files))
    return found


def _has_no_classes(scanner, folder):
    inside = [os.path.basename(inner).lower() for inner in scanner.list(folder.path)[1]]
    return not folder.nested or (len(inside) == 1 and inside[0] in WITHOUT_CLASSES)


# ---------------------------------------------------------------------------------------- classes


def _classes(scanner, folder):
    """The images of each class folder in a folder, by the name of the class."""
    found = {}
    for inside in scanner.list(folder)[1]:
        files = scanner.below(inside)
        if files:
            found[os.path.basename(inside)] = files
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
        inside = [os.path.basename(inner) for inner in scanner.list(name)[1]]
        said = split_names.assign(inside)
        if len(set(said.values())) > 1:
            first, second = list(said)[:2]
            if len(classes) == 1:
                raise UserError(
                    f"--dataset {scanner.root} has {first} and {second} in its folder {name}: give "
                    f"--dataset {scanner.root / name}"
                )
            raise UserError(
                f"--dataset {scanner.root} has splits in its classes, {name}/{first} and "
                f"{name}/{second}: put the classes into the splits, as {first}/{name}"
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
