"""Finds the column with images and the one with classes in a table, and reads them."""

import datasets
import numpy as np

from utils.data.images import Rows
from utils.run.failures import UserError

# Names of the label column in tables that do not say what their columns mean.
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
        raise UserError(
            f"--image_column {column}: --dataset {name} has no images there, but {kind}"
        )
    return column


def find_label_column(name, features, wanted, image_column):
    """Finds the column that has classes; the arguments and errors are those of `find_image_column`.

    Without `wanted`, it is the only column of type `datasets.ClassLabel`, or else the only one with
    a well-known name.
    """
    typed = [column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    named = [column for column in LABEL_NAMES if column in features and column != image_column]
    column = _choose(name, features, "label", wanted, typed or named)
    kind = features[column]
    if not isinstance(kind, datasets.ClassLabel | datasets.Value):
        raise UserError(
            f"--label_column {column}: --dataset {name} has no classes there, but {kind}"
        )
    return column


def read_labels(name, tables, column):
    """Reads the labels of all splits.

    Args:
        name (str): the data set, for messages.
        tables (dict[str, datasets.Dataset]): by split, `train` among them.
        column (str): of type ClassLabel, or with numbers or strings, of which each different one in
            `train` is a class.

    Returns:
        tuple[dict[str, np.ndarray], list[str]]: labels, int64 [rows], -1 where there is none or one
        that `train` does not have; class names.

    Raises:
        UserError: `train` has no labels.
    """
    values = {split: _values(table, column) for split, table in tables.items()}
    kind = tables["train"].features[column]
    if isinstance(kind, datasets.ClassLabel):
        class_names = list(kind.names)
        position = {label: label for label in range(len(class_names))}
    else:
        kinds = sorted({value for value in values["train"] if value is not None})
        class_names = [str(kind) for kind in kinds]
        position = {kind: label for label, kind in enumerate(kinds)}
    if not class_names:
        raise UserError(f"--dataset {name} has no labels in its column {column}")
    labels = {
        split: np.array([position.get(value, -1) for value in column_values], dtype=np.int64)
        for split, column_values in values.items()
    }
    return labels, class_names


def image_rows(table, column, place, folder):
    """The images in a column of a `datasets.Dataset`.

    Args:
        place (str): names the table in messages.
        folder (Path | None): relative paths start here.

    Returns:
        Rows.
    """
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
    return Rows(rows, place, version, folder, in_files)


def _choose(name, features, kind, wanted, candidates):
    """The column that is wanted, or the only candidate."""
    if wanted is not None:
        if wanted not in features:
            listed = ", ".join(features)
            raise UserError(f"--{kind}_column {wanted}: --dataset {name} has the columns {listed}")
        return wanted
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise UserError(
            f"--dataset {name} has several {kind} columns, {', '.join(candidates)}: give "
            f"--{kind}_column"
        )
    raise UserError(
        f"--dataset {name} has no {kind} column that is recognized, only {', '.join(features)}: "
        f"give --{kind}_column"
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
    # -1 says that a label is unknown; NaN, the only value that differs from itself, is an empty
    # cell.
    return [None if value == -1 or value != value else value for value in values]
