"""The columns of a table with images: which one has the images, and which one the classes.

Whatever the type of the column, each different value is a class, exactly.
"""

import math
import unicodedata
from decimal import Decimal

import datasets
import numpy as np
from huggingface_hub import constants

from utils.images.storage import Rows
from utils.run.domains import shown
from utils.run.failures import UserError

GIVE = "give --columns IMAGE LABEL"
# Names of the label column in tables that do not say what their columns mean.
UNKNOWN = (-1, "-1")  # instead of a label
LABEL_NAMES = ("label", "labels", "class", "cls", "target", "fine_label")


def find_image_column(name, features, wanted):
    """Finds the column that has images.

    Args:
        name (str): the data set, for messages.
        features (datasets.Features): of the table.
        wanted (str | None): take this column. It may also have paths. None: the only column of
            type `datasets.Image`, or else the only one with bytes.

    Returns:
        str.

    Raises:
        UserError: there is no such column, or more than one.
    """
    typed = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
    binary = [column for column, kind in features.items() if _has_bytes(kind)]
    column = _choose(name, features, "image", wanted, typed or binary)
    kind = features[column]
    if not (isinstance(kind, datasets.Image) or _has_bytes(kind) or _is_text(kind)):
        raise UserError(f"the column {column} of --dataset {name} has no images, but {kind}")
    return column


def label_candidates(features, image_column):
    """The names (set) of the columns that could be labels, by their type or their name."""
    typed = {column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)}
    return (typed | {column for column in LABEL_NAMES if column in features}) - {image_column}


def find_label_column(name, features, wanted, image_column):
    """Finds the column that has classes; the arguments and errors are those of `find_image_column`.

    Without `wanted`, it is the only column of type `datasets.ClassLabel`, or else the only one with
    a well-known name.
    """
    typed = [column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    named = [column for column in LABEL_NAMES if column in features and column != image_column]
    column = _choose(name, features, "label", wanted, typed or named)
    kind = features[column]
    if isinstance(kind, datasets.List | datasets.LargeList):
        raise UserError(
            f"the column {column} of --dataset {name} has lists, several labels for an image: "
            f"these scripts need one class for each; {GIVE} to take another one"
        )
    if not isinstance(kind, datasets.ClassLabel | datasets.Value):
        raise UserError(f"the column {column} of --dataset {name} has no classes, but {kind}")
    return column


def image_rows(table, column, place, folder, anywhere=False):
    """The images in a column of a `datasets.Dataset`.

    Args:
        place (str): names the table in messages.
        folder (Path | None): relative paths start here.
        anywhere (bool): absolute paths may name files outside of `folder`.

    Returns:
        Rows.
    """
    # The files of a data set of the Hub are in its cache.
    caches = (datasets.config.HF_CACHE_HOME, datasets.config.HF_DATASETS_CACHE)
    allowed = None if anywhere else (*caches, constants.HF_HUB_CACHE)
    version = f"{table._fingerprint} {column}"  # differs if a file of the data set was changed
    rows = table.select_columns([column])
    kind = rows.features[column]
    if isinstance(kind, datasets.Image):
        rows = rows.cast_column(column, datasets.Image(decode=False))
    in_files = _is_text(kind)
    if isinstance(kind, datasets.Image) or (isinstance(kind, dict) and "path" in kind):
        data = rows.with_format("arrow")[:].column(0)
        nulls = sum(chunk.field("bytes").null_count for chunk in data.chunks)
        in_files = nulls == len(rows)
    return Rows(rows, place, version, folder, in_files, allowed)


def read_labels(name, tables, column, class_names=None):
    """Reads the labels of all splits.

    Args:
        name (str): the data set, for messages.
        tables (dict[str, datasets.Dataset]): by split.
        column (str): of type ClassLabel, or with numbers or strings: each different value in
            `train` is a class. Whole floats are integers. -1 says that a label is unknown, unless
            all labels are -1 and 1.
        class_names (list[str] | None): the classes; None: those in `train`.

    Returns:
        tuple[dict[str, np.ndarray], list[str]]: labels, int64 [rows], -1 where there is none; class
        names.

    Raises:
        UserError: `train` has no labels; they are numbers with fractions, or floats that are too
            large to be told apart; or a split has a class that is not in `train`.
    """
    values = {split: _values(table, column) for split, table in tables.items()}
    first = "train" if "train" in values else next(iter(values))
    kind = tables[first].features[column]
    for split_values in values.values():
        _refuse_measurements(name, split_values, column, kind)
    kinds = {value for value in values[first] if value is not None}
    if isinstance(kind, datasets.ClassLabel):
        declared = known = dict(enumerate(map(_class_name, kind.names)))
        if class_names is None:
            known = {value: declared[value] for value in declared if value in kinds}
    else:
        declared = known = {value: _class_name(value) for value in sorted(kinds)}
        if kinds not in ({-1, 1}, {"-1", "1"}):
            known = {value: known[value] for value in known if value not in UNKNOWN}
    if not known:
        raise UserError(f"--dataset {name} has no labels in its column {column}")
    names = class_names or list(dict.fromkeys(known.values()))
    position = {class_name: label for label, class_name in enumerate(names)}
    labels = {}
    for split, split_values in values.items():
        for row, value in enumerate(split_values):
            unknown = value is not None and value not in known and value not in UNKNOWN
            if unknown or (value in known and known[value] not in position):
                where = "the train split" if class_names is None else "those of the model"
                unknown_name = shown(declared.get(value, value))
                raise UserError(
                    f"--dataset {name}: class {unknown_name} of its {split} split (row {row}) is "
                    f"not in {where}"
                )
        labels[split] = np.array(
            [position.get(known.get(value), -1) for value in split_values], dtype=np.int64
        )
    return labels, names


def _choose(name, features, kind, wanted, candidates):
    """The column that is wanted, or the only candidate."""
    if wanted is not None:
        if wanted not in features:
            listed = ", ".join(features)
            raise UserError(f"--columns {wanted}: --dataset {name} has the columns {listed}")
        return wanted
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise UserError(
            f"--dataset {name} has several {kind} columns, {', '.join(candidates)}: {GIVE}"
        )
    raise UserError(
        f"--dataset {name} has no {kind} column that is recognized, only {', '.join(features)}: "
        + GIVE
    )


def _has_bytes(kind):
    """Whether a type is binary, or a struct with the fields in which `datasets` stores images."""
    if isinstance(kind, dict):
        return "bytes" in kind and kind.keys() <= {"bytes", "path"}
    return isinstance(kind, datasets.Value) and "binary" in kind.dtype


def _is_text(kind):
    return isinstance(kind, datasets.Value) and kind.dtype in ("string", "large_string")


def _values(table, column):
    """The values of a column as Python objects; None where there is no label."""
    if column not in table.features:  # as in the test split of a competition
        return [None] * len(table)
    values = table.select_columns([column]).with_format("arrow")[:].column(0).to_pylist()
    # NaN, the only value that differs from itself, is an empty cell.
    return [None if value != value or _is_blank(value) else value for value in values]


def _is_blank(value):
    return isinstance(value, str) and not value.strip()


def _class_name(value):
    if isinstance(value, float | Decimal):
        return str(int(value))
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return unicodedata.normalize("NFC", text)


def _refuse_measurements(name, values, column, kind):
    """Raises UserError for floats with a fraction, or too large for their type to be exact."""
    exact = 2 ** {"float32": 24, "float16": 11}.get(getattr(kind, "dtype", None), 53)
    for value in values:
        if not isinstance(value, float | Decimal):
            continue
        if not math.isfinite(value) or value != int(value) or abs(value) > exact:
            raise UserError(
                f"the column {column} of --dataset {name} has {kind.dtype} values such as "
                f"{value:g}, which are no exact classes: store classes as text or integers"
            )
