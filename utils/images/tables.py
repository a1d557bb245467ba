"""Images in the rows of a table: a file, a folder in the Hub's layout, or a data set of the Hub."""

import numpy as np

from utils.data.report import LeftOut
from utils.data.scan import Scanner
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
        UserError: there is no such table, or no such column; a class is not in `train`; or a label
            is no class.
    """
    left_out, files = LeftOut(), None
    if path and path.is_file():
        files = {"train": [path]}
    elif path:
        files = _files(path)
    tables = load_table(name, files=files, alternatives=alternatives)
    used = name_splits(name, tables, left_out)
    if path and path.is_file() and "split" in used["train"].features:
        used = _by_column(name, used["train"])
    if "train" not in used and class_names is None:
        listed = ", ".join(used or tables)
        raise UserError(f"--dataset {name} has no train split, only {listed}; {alternatives}")
    features = next(iter(used.values())).features
    image_column = columns.find_image_column(name, features, image_column)
    label_column = columns.find_label_column(name, features, label_column, image_column)
    # Paths in a file start at its folder, as in a list of files that lies next to them.
    folder = path.parent if path and path.is_file() else path
    first = files["train"][0] if files else None
    anywhere = first and first.suffix.lower() in LISTS and first.name not in image_folder.LISTS
    labels, names = columns.read_labels(name, used, label_column, class_names)
    kind = next(iter(used.values())).features[label_column]
    unused = [known for known in getattr(kind, "names", ()) if known not in names]
    if unused and class_names is None:
        left_out.add("classes without images to train with", unused[0], len(unused))
    others = columns.label_candidates(features, image_column) - {label_column}
    if others and class_names is None:
        kind = f"columns that could be labels, beside {label_column}"
        left_out.add(kind, min(others), len(others))
    splits, files_seen = {}, {}
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
                "filter them out"
            )
        source = columns.image_rows(used[split], image_column, place, folder, anywhere)
        images = Images(source, np.arange(len(values)), values)
        splits[split] = _once(name, split, images, files_seen, left_out)
    return splits, names, left_out


def _once(name, split, images, files_seen, left_out):
    """The images of a split without the rows that name a file again.

    Args:
        files_seen (dict): path -> (split, label), of earlier splits, too; this adds to it.

    Raises:
        UserError: a file has two labels, or is in two splits.
    """
    paths, sizes = images.source.paths(), images.source.sizes
    if paths is None:
        return images
    rows = []
    for row, path in enumerate(paths):
        label = int(images.labels[row])
        if sizes[row] <= 0 or path not in files_seen:  # reading says what is wrong with no file
            files_seen[path] = split, label
            rows.append(row)
            continue
        other_split, other_label = files_seen[path]
        if other_split != split:
            raise UserError(
                f"--dataset {name} names {path} in its {other_split} split and in its {split} "
                "split: remove it from one of them"
            )
        if other_label != label:
            raise UserError(f"--dataset {name} names {path} with two labels: remove one of them")
        left_out.add("rows that name a file again", path)
    return images.select(np.array(rows, dtype=np.int64))


def _files(folder):
    """The files with rows in a folder, by split; None: the `datasets` library decides.

    Its search for words such as test in the names of files would also find test_tube.parquet, and
    drop the others.
    """
    scanner = Scanner(folder, READERS)
    tables = [file for file in scanner.below() if file.rpartition("/")[2] not in METADATA]
    suffixes = {file[file.rindex(".") :].lower() for file in tables}
    has_images = bool(Scanner(folder, image_folder.EXTENSIONS).below())
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
