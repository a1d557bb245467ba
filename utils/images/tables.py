"""Images in the rows of a table: a file, a folder in the Hub's layout, or a data set of the Hub."""

import os

import datasets
import numpy as np
from huggingface_hub import constants

from utils.data.report import LeftOut
from utils.data.scan import scan
from utils.data.splits import split_of
from utils.data.tables import (
    LISTS,
    METADATA,
    READERS,
    describes_itself,
    files_by_split,
    load_table,
    name_splits,
)
from utils.images import columns, image_folder
from utils.images.decoding import Images
from utils.images.storage import Files, Rows
from utils.run.failures import UserError


def find(name, path, image_column, label_column, alternatives, class_names=None):
    """Finds the images, splits and classes of tables; decodes nothing.

    Args:
        name (str): the value of `--dataset`.
        path (Path | None): a file or a folder; None: `name` is a Hub id.
        image_column, label_column (str | None): as for `sources.find_images`.
        alternatives (str): what else the user can give; error messages end with it.
        class_names (list[str] | None): those of a trained model; None: those in `train`.

    Returns:
        tuple: the splits (dict of `Images`), class names, and what was left out.

    Raises:
        UserError: there is no such table, or no such column; a class is not in `train`; a label is
            no class; or a path leads out of the folder of the table.
    """
    left_out, one_file = LeftOut(), path is not None and path.is_file()
    files = _files(path) if path and not one_file else None
    files = {"train": [path]} if one_file else files
    tables = load_table(name, files=files, alternatives=alternatives)
    used = name_splits(name, tables, left_out)
    if one_file and "split" in used["train"].features:
        used = _by_column(name, used["train"])
    if "train" not in used and class_names is None:
        listed = ", ".join(used or tables)
        raise UserError(f"--dataset {name} has no train split, only {listed}; {alternatives}")
    features = next(iter(used.values())).features
    image_column, label_column = columns.find_columns(name, features, image_column, label_column)
    labels, names = columns.read_labels(name, used, label_column, class_names)
    unused = [known for known in getattr(features[label_column], "names", ()) if known not in names]
    if unused and class_names is None:
        left_out.add("classes without images to train with", unused[0], len(unused))
    # In a list that a person wrote, paths may lead anywhere.
    is_list = one_file and path.suffix.lower() in LISTS and path.name not in image_folder.LISTS
    folder = path.parent if one_file else path
    splits, seen = {}, {}
    for split, values in labels.items():
        place = f"{name}, {split} split"
        missing = np.flatnonzero(values < 0)
        if len(missing) == len(values) and split == "test":  # as in data sets of competitions
            left_out.add("images of a test split without classes", place, len(values))
            continue
        if len(missing):
            raise UserError(
                f"{len(missing):,} of {len(values):,} rows of the {split} split of {name} have no "
                f"label, or -1, in the column {label_column} (the first is row {missing[0]}): "
                "filter them out, or give a class another name than -1"
            )
        source = _source(used[split], image_column, place, folder, is_list)
        images = Images(source, np.arange(len(values)), values)
        if isinstance(source, Files):
            images = _once(name, split, images, seen, left_out)
        splits[split] = images
    return splits, names, left_out


def _files(folder):
    """The files with rows in a folder, by split; None: the `datasets` library decides.

    Its search for words such as test in the names of files would also find test_tube.parquet, and
    drop the others.
    """
    files, others, _ = scan(folder, READERS)
    tables = [file for file in files if os.path.basename(file) not in METADATA]
    suffixes = {os.path.splitext(file)[1].lower() for file in tables}
    has_images = image_folder.EXTENSIONS & {os.path.splitext(file)[1].lower() for file in others}
    if len(suffixes) != 1 or has_images or describes_itself(folder):
        return None
    return files_by_split(folder, tables)


def _by_column(name, table):
    """The rows of each split, as the column `split` says."""
    rows = {}
    for row, value in enumerate(table["split"]):
        split = split_of(str(value))
        if split is None:
            raise UserError(
                f"--dataset {name}: the split of row {row} is {value}: it must be train, val or "
                "test"
            )
        rows.setdefault(split, []).append(row)
    return {split: table.select(rows[split]) for split in ("train", "val", "test") if split in rows}


def _source(table, column, place, folder, anywhere):
    """Where the images in a column of a `datasets.Dataset` are: `Files`, or `Rows` with bytes.

    Args:
        place (str): names the table in messages.
        folder (Path | None): relative paths start here, and none leads out of it. None: no file is
            read, but those in the cache of the Hub. The rows of somebody else's table must not name
            any file of this machine, whose image could end up in a published plot.
        anywhere (bool): paths may lead anywhere.
    """
    rows = table.select_columns([column])
    kind = rows.features[column]
    if isinstance(kind, datasets.Image):
        rows = rows.cast_column(column, datasets.Image(decode=False))
    # The version differs if a file of the data set was changed.
    in_rows = Rows(rows, place, version=f"{table._fingerprint} {column}")
    if not columns.is_text(kind) and (in_rows.sizes >= 0).any():
        return in_rows
    start = os.path.abspath(folder or ".")
    allowed = [datasets.config.HF_CACHE_HOME, datasets.config.HF_DATASETS_CACHE]
    allowed += [constants.HF_HUB_CACHE, *([start] if folder else [])]
    allowed += [os.path.realpath(path) for path in allowed]
    allowed = tuple(os.path.join(os.path.abspath(path), "") for path in allowed)
    files = []
    for row, value in enumerate(rows.with_format("arrow")[:].column(0).to_pylist()):
        path = value["path"] if isinstance(value, dict) else value
        if not path:
            raise UserError(f"row {row} of {place} has no image: remove it")
        # Also if Windows wrote it.
        file = os.path.normpath(os.path.join(start, path.replace("\\", "/")))
        if not anywhere and not file.startswith(allowed):
            raise UserError(f"row {row} of {place}: {path} is not in the folder of the table")
        files.append(file)
    root = os.path.commonpath(list(map(os.path.dirname, files)))
    return Files(root, [file.removeprefix(root).lstrip("/") for file in files])


def _once(name, split, images, seen, left_out):
    """The images of a split without the rows that name a file again.

    Args:
        seen (dict): path -> (split, label), of earlier splits, too; this adds to it.

    Raises:
        UserError: a file has two labels, or is in two splits.
    """
    rows = []
    for row, label in enumerate(images.labels.tolist()):
        path = images.name(row)
        if path not in seen:
            seen[path] = split, label
            rows.append(row)
            continue
        other_split, other_label = seen[path]
        if other_split != split:
            raise UserError(
                f"--dataset {name} names {path} in its {other_split} split and in its {split} "
                "split: remove it from one of them"
            )
        if other_label != label:
            raise UserError(f"--dataset {name} names {path} with two labels: remove one of them")
        left_out.add("rows that name a file again", path)
    return images.select(np.array(rows, dtype=np.int64))
