"""The columns of a table with images: which one has the images, and which one the classes.

Labels are text, integers, or of the type `datasets.ClassLabel`: each different value is a class,
exactly.
"""

import unicodedata

import datasets
import numpy as np

from utils.run.domains import shown
from utils.run.failures import UserError

GIVE = "give --columns IMAGE LABEL"
UNKNOWN = (None, -1, "-1", "")  # instead of a label
# Names of the label column in tables that do not say what their columns mean.
LABEL_NAMES = ("label", "labels", "class", "cls", "target", "fine_label")


def find_columns(name, features, image_column, label_column):
    """Finds the columns that have images and classes.

    Args:
        name (str): the data set, for messages.
        features (datasets.Features): of the table.
        image_column (str | None): take this column. It may also have paths. None: the only one of
            type `datasets.Image`, or else the only one with bytes.
        label_column (str | None): take this column. None: the only one of type
            `datasets.ClassLabel`, or else the only one with a well-known name.

    Returns:
        tuple[str, str].

    Raises:
        UserError: there is no such column, or more than one, or it has values of another type.
    """
    typed = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
    binary = [column for column, kind in features.items() if has_bytes(kind)]
    image_column = _choose(name, features, "image", image_column, typed or binary)
    kind = features[image_column]
    if not (isinstance(kind, datasets.Image) or has_bytes(kind) or is_text(kind)):
        raise UserError(f"the column {image_column} of --dataset {name} has no images, but {kind}")
    typed = [column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    named = [column for column in LABEL_NAMES if column in features]
    label_column = _choose(name, features, "label", label_column, typed or named)
    kind = features[label_column]
    is_value = isinstance(kind, datasets.Value) and kind.dtype.startswith(("int", "uint", "bool"))
    if not (isinstance(kind, datasets.ClassLabel) or is_value or is_text(kind)):
        raise UserError(
            f"the column {label_column} of --dataset {name} has {kind}, and not one class for each "
            f"image, as text or an integer: convert it, or {GIVE} to take another one"
        )
    return image_column, label_column


def _choose(name, features, kind, wanted, candidates):
    """The column that is wanted, or the only candidate."""
    if wanted is not None:
        if wanted not in features:
            listed = ", ".join(features)
            raise UserError(f"--columns {wanted}: --dataset {name} has the columns {listed}")
        return wanted
    if len(candidates) == 1:
        return candidates[0]
    listed = ", ".join(candidates or features)
    found = f"several {kind} columns" if candidates else f"no known {kind} column, only"
    raise UserError(f"--dataset {name} has {found} {listed}: {GIVE}")


def has_bytes(kind):
    """Whether a type is binary, or a struct with the fields in which `datasets` stores images."""
    if isinstance(kind, dict):
        return kind.keys() == {"bytes", "path"}
    return isinstance(kind, datasets.Value) and "binary" in kind.dtype


def is_text(kind):
    """Whether a type is text."""
    return isinstance(kind, datasets.Value) and kind.dtype in ("string", "large_string")


def read_labels(name, tables, column, class_names=None):
    """Reads the labels of all splits.

    Args:
        name (str): the data set, for messages.
        tables (dict[str, datasets.Dataset]): by split; one without the column has no labels.
        column (str): each different value in `train` is a class; those in `UNKNOWN` say that there
            is no label.
        class_names (list[str] | None): the classes; None: those in `train`.

    Returns:
        tuple[dict[str, np.ndarray], list[str]]: labels, int64 [rows], -1 where there is none; class
        names.

    Raises:
        UserError: `train` has no labels, or a split has a class that is not in `train`.
    """
    first = tables["train"] if "train" in tables else next(iter(tables.values()))
    declared = dict(enumerate(getattr(first.features[column], "names", ())))

    def read(table):
        if column not in table.features:  # as in the test split of a competition
            return [None] * len(table)
        values = table.select_columns([column]).with_format("arrow")[:].column(0).to_pylist()
        values = [value.strip() and value if isinstance(value, str) else value for value in values]
        return [None if value in UNKNOWN else value for value in values]

    def class_name(value):
        return unicodedata.normalize("NFC", str(declared.get(value, value)))

    where = "those of the model"
    if class_names is None:
        where = "the train split"
        class_names = list(dict.fromkeys(map(class_name, sorted({*read(first)} - {None}))))
    if not class_names:
        raise UserError(f"--dataset {name} has no labels in its column {column}")
    position, labels = {known: label for label, known in enumerate(class_names)}, {}
    for split, table in tables.items():
        labels[split] = np.full(len(table), -1, dtype=np.int64)
        for row, value in enumerate(read(table)):
            if value is None:
                continue
            if class_name(value) not in position:
                raise UserError(
                    f"--dataset {name}: class {shown(class_name(value))} of its {split} split (row "
                    f"{row}) is not in {where}"
                )
            labels[split][row] = position[class_name(value)]
    return labels, class_names
