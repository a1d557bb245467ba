"""Reads the classes in a column of a table: whatever its type, each value is a class, exactly."""

import math
from decimal import Decimal

import datasets
import numpy as np

from utils.run.failures import UserError


def read_labels(name, tables, column, class_names=None):
    """Reads the labels of all splits.

    Args:
        name (str): the data set, for messages.
        tables (dict[str, datasets.Dataset]): by split.
        column (str): of type ClassLabel, or with numbers or strings, of which each different one in
            `train` is a class. Whole floats are integers. -1 says that a label is unknown, unless
            all labels are -1 and 1.
        class_names (list[str] | None): the classes; None: those in `train`.

    Returns:
        tuple[dict[str, np.ndarray], list[str]]: labels, int64 [rows], -1 where there is none; class
        names.

    Raises:
        UserError: `train` has no labels; they are numbers with fractions, or float32 that are too
            large to be told apart; or a split has a class that is not in `train`.
    """
    values = {split: _values(table, column) for split, table in tables.items()}
    first = "train" if "train" in values else next(iter(values))
    kind = tables[first].features[column]
    for split_values in values.values():
        _refuse_fractions(name, split_values, column, kind)
    if isinstance(kind, datasets.ClassLabel):
        known = dict(enumerate(kind.names))
    else:
        kinds = {value for value in values[first] if value is not None}
        signs = not isinstance(kind, datasets.ClassLabel) and kinds == {-1, 1}
        known = {value: _class_name(value) for value in sorted(kinds)}
        if not signs:
            known.pop(-1, None)
    if not known:
        raise UserError(f"--dataset {name} has no labels in its column {column}")
    names = class_names or list(known.values())
    position = {class_name: label for label, class_name in enumerate(names)}
    labels = {}
    for split, split_values in values.items():
        for row, value in enumerate(split_values):
            unknown = value is not None and value not in known and value != -1
            if unknown or (value in known and known[value] not in position):
                where = "the train split" if class_names is None else "those of the model"
                shown = known.get(value, value)
                raise UserError(
                    f"--dataset {name}: class {shown} of its {split} split (row {row}) is not in "
                    f"{where}"
                )
        labels[split] = np.array(
            [position.get(known.get(value), -1) for value in split_values], dtype=np.int64
        )
    return labels, names


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
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _refuse_fractions(name, values, column, kind):
    """Raises UserError for floats that are no classes."""
    floats = [value for value in values if isinstance(value, float | Decimal)]
    fraction = next((v for v in floats if not math.isfinite(v) or v != int(v)), None)
    if fraction is not None:
        raise UserError(
            f"the column {column} of --dataset {name} has numbers such as {fraction:g}, "
            "which look like measurements: if they are classes, store them as text or integers"
        )
    bits = {"float32": 24, "float16": 11}.get(getattr(kind, "dtype", None), 53)
    large = next((v for v in floats if isinstance(v, float) and abs(v) > 2**bits), None)
    if large is not None:
        raise UserError(
            f"the column {column} of --dataset {name} has {kind.dtype} values such as {large:.0f}"
            ", which are too large to be exact: store them as integers or text"
        )
