"""Finds the column with images and the one with classes in a table."""

import datasets
from huggingface_hub import constants

from utils.images.decoding import Rows
from utils.run.failures import UserError

GIVE = "give --columns IMAGE LABEL"
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
        raise UserError(f"the column {column} of --dataset {name} has no images, but {kind}")
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
    # The files of a data set of the Hub are in its cache.
    config = datasets.config
    allowed = (config.HF_CACHE_HOME, config.HF_DATASETS_CACHE, constants.HF_HUB_CACHE)
    return Rows(rows, place, version, folder, in_files, allowed, anywhere)


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
