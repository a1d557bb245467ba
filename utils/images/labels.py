"""Reads the classes in a column of a table: whatever its type, each value is a class, exactly."""

import csv
import math
import re
from decimal import Decimal

import datasets
import numpy as np

from utils.data.tables import READERS, load_table, loading
from utils.run.failures import UserError

# 007 and 1E5 are codes, but 2.0 and 1e-05 are numbers, as programs write them.
NUMBER = re.compile(r"\s*[+-]?(0|[1-9]\d*)(\.\d*)?(e-\d+)?\s*", re.ASCII)


def load_rows(name, files=None, alternatives=""):
    """As `load_table`, but all values of CSV files are strings, exactly as they are written.

    Raises:
        UserError: they cannot be loaded, or a row has more values than there are columns.
    """
    some = [file for part in (files or {}).values() for file in part if is_csv(file)]
    options = {}
    for file in some:
        with loading(name, alternatives):
            columns, line = _columns_and_longer_line(file)
        if line:
            raise UserError(
                f"line {line} of {file} has more values than the {columns} columns in its header: "
                "quote a value that has the separator in it"
            )
        # By number, as names may be empty or there twice. With a comma at the end of each row,
        # pandas would take the first value for an index, and shift the others.
        used = list(range(columns))
        options = dict(converters=dict.fromkeys(used, str), keep_default_na=False)
        options |= dict(usecols=used, index_col=False)
    return load_table(name, files=files, alternatives=alternatives, **options)


def is_csv(file):
    """Whether a file is a table that does not say the types of its values."""
    return READERS.get(file.suffix.lower()) == "csv"


def _columns_and_longer_line(file):
    """How many columns a CSV file has; the first line with more values that are not empty."""
    separator = "\t" if file.suffix.lower() == ".tsv" else ","
    with open(file, encoding="utf-8-sig", newline="") as opened:
        rows = csv.reader(opened, delimiter=separator)
        columns = len(next(filter(None, rows), []))
        return columns, next((rows.line_num for row in rows if any(row[columns:])), None)


def read_labels(name, tables, column, class_names=None, from_csv=False):
    """Reads the labels of all splits.

    Args:
        name (str): the data set, for messages.
        tables (dict[str, datasets.Dataset]): by split.
        column (str): of type ClassLabel, or with numbers or strings: each different value in
            `train` is a class. Whole floats are integers. -1 says that a label is unknown, unless
            all labels are -1 and 1.
        class_names (list[str] | None): the classes; None: those in `train`.
        from_csv (bool): the values are strings, but numbers if all of them look like numbers.

    Returns:
        tuple[dict[str, np.ndarray], list[str]]: labels, int64 [rows], -1 where there is none; class
        names.

    Raises:
        UserError: `train` has no labels; they are numbers with fractions, or float32 that are too
            large to be told apart; or a split has a class that is not in `train`.
    """
    values = {split: _values(table, column) for split, table in tables.items()}
    if from_csv:
        values = _numbers(values)
    first = "train" if "train" in values else next(iter(values))
    kind = tables[first].features[column]
    for split_values in values.values():
        _refuse_fractions(name, split_values, column, kind)
    kinds = {value for value in values[first] if value is not None}
    if isinstance(kind, datasets.ClassLabel):
        declared = known = dict(enumerate(kind.names))
        if class_names is None:
            known = {value: declared[value] for value in declared if value in kinds}
    else:
        declared = known = {value: _class_name(value) for value in sorted(kinds)}
        if kinds != {-1, 1}:
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
                shown = declared.get(value, value)
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


def _numbers(values):
    """The strings of all splits as numbers, if each of them is one."""
    strings = [value for some in values.values() for value in some if isinstance(value, str)]
    if not all(map(NUMBER.fullmatch, strings)):
        unknown = ("-1", "-1.0")
        return {k: [None if v in unknown else v for v in some] for k, some in values.items()}
    return {
        split: [Decimal(value) if isinstance(value, str) else value for value in some]
        for split, some in values.items()
    }


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
