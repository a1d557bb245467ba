"""A folder of images with a table of their classes, as the `imagefolder` of `datasets` defines it.

    photos/metadata.csv    file_name,label,split    paths start at the folder of the table
    photos/a/1.jpg

The split is optional. Instead, folders of splits may have a table each: `train/metadata.csv`.
"""

import os

from utils.data.scan import Scanner
from utils.data.splits import split_of
from utils.images.image_folder import EXTENSIONS
from utils.run.failures import UserError

NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def find(root):
    """Finds the tables of a folder.

    Returns:
        dict[str | None, Path]: split -> file; None: a table of the whole folder. {}: there is none.

    Raises:
        UserError: a folder has two.
    """
    whole = _in(root)
    if whole:
        return {None: whole}
    found = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        split, file = split_of(folder.name), _in(folder)
        if split and file:
            found[split] = file
    return found if "train" in found else {}


def _in(folder):
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    if len(found) > 1:
        raise UserError(
            f"{folder} has {found[0].name} and {found[1].name}: remove or rename one of them"
        )
    return found[0] if found else None


def read(name, root, files, column, left_out):
    """Reads the rows whose images exist.

    Args:
        name (str): the data set, for messages.
        root (Path): its folder.
        files (dict): what `find` returned.
        column (str): the one with paths.
        left_out (LeftOut): gets rows without a file, and images without a row.

    Returns:
        tuple[dict, dict]: by split, `datasets.Dataset`; and the paths of its images, relative to
        the root. ({}, {}): a table has no such column.

    Raises:
        UserError: a path leaves the folder, a split is none, or no row has an image.
    """
    from utils.images.labels import load_rows  # here, because it imports `datasets`

    images, tables, paths = set(Scanner(root, EXTENSIONS).below()), {}, {}
    for split, file in files.items():
        table = load_rows(str(file), {"train": [file]})["train"]
        if column not in table.features:
            return {}, {}
        place = os.path.relpath(file.parent, root)
        own = [_path(name, file, place, value) for value in table[column]]
        there = [row for row, path in enumerate(own) if path in images]
        absent = [path for path in own if path not in images]
        if absent:
            left_out.add(f"rows of {file.name} without an image", absent[0], len(absent))
        if not there:
            raise UserError(f"--dataset {name}: no row of {file} names an image in its folder")
        table, own = table.select(there), [own[row] for row in there]
        for part, rows in _by_split(name, table, file, split).items():
            tables[part], paths[part] = table.select(rows), [own[row] for row in rows]
    without = sorted(images.difference(*paths.values()))
    if without:
        left_out.add("images without a row of metadata", without[0], len(without))
    return tables, paths


def _path(name, file, place, value):
    """A path as the root sees it."""
    path = os.path.normpath(os.path.join(place, str(value)))
    if os.path.isabs(path) or path.split(os.sep)[0] == os.pardir:
        raise UserError(f"--dataset {name}: {file} names {value}, which is not in the folder")
    return path


def _by_split(name, table, file, split):
    """The rows of each split: by the folder of the table, or by its column `split`."""
    if split or "split" not in table.features:
        return {split or "train": range(len(table))}
    found = {}
    for row, value in enumerate(table["split"]):
        part = split_of(str(value))
        if part is None:
            raise UserError(
                f"--dataset {name}: the split of {table[row]} in {file} is {value}: it must be "
                "train, val or test"
            )
        found.setdefault(part, []).append(row)
    return {part: found[part] for part in ("train", "val", "test") if part in found}
