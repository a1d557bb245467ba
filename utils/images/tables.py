"""Images in the rows of a table: a file, a folder in the Hub's layout, or a data set of the Hub.

Labels are text, integers, or of the type `datasets.ClassLabel`: each different value is a class,
exactly. The images are in the table, or are files of a data set of the Hub: a list of paths is not
read.
"""

import os
import unicodedata

import datasets
import numpy as np
from huggingface_hub import constants

from utils.data.scan import LeftOut, scan
from utils.data.tables import describes_itself, files_by_split, load_table, name_splits
from utils.images import local
from utils.images.decoding import Files, Images, Rows
from utils.run.failures import UserError

GIVE = "give --columns IMAGE LABEL"
UNKNOWN = (None, -1, "-1", "")  # instead of a label
# Names of the label column in tables that do not say what their columns mean.
LABEL_NAMES = ("label", "labels", "class", "cls", "target", "fine_label")


def find(name, path, columns, alternatives):
    """Finds the images, splits and classes of tables; decodes nothing.

    Args:
        name (str): the value of `--dataset`.
        path (Path | None): a file or a folder; None: `name` is a Hub id.
        columns (tuple): the columns of the images and of their labels, or None for those that
            `find_columns` finds.
        alternatives (str): what else the user can give; error messages end with it.

    Returns:
        tuple: the splits (dict of `Images`), the names of all classes, and what was left out.

    Raises:
        UserError: there is no such table or column, or a row has no label or no image.
    """
    left_out = LeftOut()
    files = _files(path) if path and path.is_dir() else None
    tables = load_table(name, files=files, alternatives=alternatives)
    used = name_splits(name, tables, left_out)
    if not used:
        raise UserError(
            f"--dataset {name} has no train split, only {', '.join(tables)}; {alternatives}"
        )
    image_column, label_column = find_columns(name, next(iter(used.values())).features, *columns)
    labels, names = _read_labels(used, label_column)
    splits = {}
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
        source = _source(used[split], image_column, place)
        splits[split] = Images(source, np.arange(len(values)), values)
    return splits, names, left_out


def _files(folder):
    """The files with rows in a folder, by split; None: the `datasets` library decides.

    Its search for words such as test in the names of files would also find test_tube.parquet, and
    drop the others.
    """
    files, _, _ = scan(folder, local.TABLES)
    suffixes = {os.path.splitext(file)[1].lower() for file in files}
    if len(suffixes) != 1 or describes_itself(folder):
        return None
    return files_by_split(folder, files)


# ---------------------------------------------------------------------------------------- columns


def find_columns(name, features, image_column, label_column):
    """Finds the columns (two str) that have images and classes: the given ones, if not None.

    Or else the only ones of the types `datasets.Image` and `datasets.ClassLabel`; or else the only
    one with bytes, and the only one with a well-known name.

    Args: name (str): the data set, for messages. features (datasets.Features): of the table.

    Raises:
        UserError: there is no such column, or more than one, or it has values of another type.
    """
    typed = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
    binary = [column for column, kind in features.items() if _has_bytes(kind)]
    image_column = _choose(name, features, "image", image_column, typed or binary)
    kind = features[image_column]
    if not (isinstance(kind, datasets.Image) or _has_bytes(kind)):
        raise UserError(f"the column {image_column} of --dataset {name} has no images, but {kind}")
    typed = [column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    named = [column for column in LABEL_NAMES if column in features]
    label_column = _choose(name, features, "label", label_column, typed or named)
    kind = features[label_column]
    dtypes = ("int", "uint", "bool", "string", "large_string")
    is_value = isinstance(kind, datasets.Value) and kind.dtype.startswith(dtypes)
    if not (isinstance(kind, datasets.ClassLabel) or is_value):
        raise UserError(
            f"the column {label_column} of --dataset {name} has {kind}, and not one class for each "
            f"image, as text or an integer: convert it, or {GIVE} to take another one"
        )
    return image_column, label_column


def _choose(name, features, kind, column, candidates):
    """`column`, or else the only candidate."""
    if column in features:
        return column
    if column is not None:
        listed = ", ".join(features)
        raise UserError(f"--columns {column}: --dataset {name} has the columns {listed}")
    if len(candidates) == 1:
        return candidates[0]
    listed = ", ".join(candidates or features)
    problem = f"several {kind} columns" if candidates else f"no known {kind} column, only"
    raise UserError(f"--dataset {name} has {problem} {listed}: {GIVE}")


def _has_bytes(kind):
    """Whether a type is binary, or a struct with the fields in which `datasets` stores images."""
    if isinstance(kind, dict):
        return kind.keys() == {"bytes", "path"}
    return isinstance(kind, datasets.Value) and "binary" in kind.dtype


def _values(table, column):
    """The values of a column (list); of one that is not there, as in competitions, None."""
    if column not in table.features:
        return [None] * len(table)
    return table.select_columns([column]).with_format("arrow")[:].column(0).to_pylist()


def _read_labels(tables, column):
    """Reads the labels of all splits.

    Returns:
        tuple: split -> int64 [rows], -1 where there is no label; the names of the classes.
    """
    features, values = next(iter(tables.values())).features, {}
    declared = dict(enumerate(getattr(features[column], "names", ())))
    for split, table in tables.items():
        read = [_in_one_form(value) for value in _values(table, column)]
        values[split] = [None if value in UNKNOWN else value for value in read]
    classes = sorted({*declared}.union(*values.values()) - {None})
    position = {value: number for number, value in enumerate(classes)} | {None: -1}
    labels = {
        split: np.array([position[value] for value in rows], dtype=np.int64)
        for split, rows in values.items()
    }
    return labels, [_in_one_form(str(declared.get(value, value))) for value in classes]


def _in_one_form(value):
    """A label; of a text the form NFC of Unicode, and nothing of one that is blank."""
    if not isinstance(value, str):
        return value
    return unicodedata.normalize("NFC", value) if value.strip() else ""


# ----------------------------------------------------------------------------------------- images


def _source(table, column, place):
    """Where the images in a column of a `datasets.Dataset` are: `Rows` with bytes, or `Files`.

    Files are those in the caches of the Hub only. The rows of somebody else's table must not name
    any file of this machine, whose image could end up in a published plot.

    Args: place (str): names the table in messages.
    """
    rows = table.select_columns([column])
    if isinstance(rows.features[column], datasets.Image):
        rows = rows.cast_column(column, datasets.Image(decode=False))
    # The version differs if a file of the data set was changed.
    in_rows = Rows(rows, place, version=f"{table._fingerprint} {column}")
    if (in_rows.sizes >= 0).any():
        return in_rows
    config, files = datasets.config, []
    caches = (config.HF_CACHE_HOME, config.HF_DATASETS_CACHE, constants.HF_HUB_CACHE)
    forms = (os.path.abspath, os.path.realpath)
    caches = tuple(os.path.join(form(path), "") for path in caches for form in forms)
    for row, value in enumerate(_values(rows, column)):
        file = os.path.abspath(value["path"] or "") if value else ""
        if not file.startswith(caches):
            raise UserError(f"{place}, row {row} has no image, only {value}: remove it")
        files.append(file)
    root = os.path.commonpath(list(map(os.path.dirname, files)))
    return Files(root, [file.removeprefix(root).lstrip("/") for file in files])
