"""Finds a data set: the one place that decides what its rows, splits, classes and labels are.

A new kind of source is one more function here, which returns splits of `Images` and class names;
every script, and evaluate.py, then takes it.
"""

import hashlib
import io
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from utils.data.report import LeftOut, count_classes, describe_images
from utils.data.scan import Scanner
from utils.data.splits import hold_out
from utils.data.tables import (
    LISTS,
    METADATA,
    READERS,
    describes_itself,
    files_by_split,
    local_path,
    name_splits,
)
from utils.images import array_files, image_folder, metadata, pixels, synthetic
from utils.images.decoding import Images
from utils.images.storage import Files, Rows
from utils.run.failures import UserError

ALTERNATIVES = (
    "use a folder with one sub-folder per class (or train/ and val/ with such sub-folders), a Hub "
    "id such as uoft-cs/cifar10 or a folder in the Hub's layout, a Parquet file, an .npz or "
    ".safetensors file with arrays, or --dataset synthetic"
)


@dataclass
class ImageSplits:
    """A data set of labeled images.

    `splits` has `train`, and `val`, `test` or both. `class_names` are in the order of the labels.
    `description` is one line with a checksum, which differs if an image was added, removed, renamed
    or changed (`Images.fingerprint` says what it does not see of a thousand files). `details` are
    more lines: the classes, how values are scaled, what was left out. `scaling` is that of pixel
    values other than 8 bits, see `pixels`.
    """

    splits: dict[str, Images]
    class_names: list[str]
    description: str
    details: list[str] = field(default_factory=list)
    scaling: dict = field(default_factory=dict)


def find_images(
    name, *, seed=0, val_fraction=0.1, image_column=None, label_column=None, scaling=None
):
    """Finds the images of a data set and their classes; decodes none but a sample.

    A data set without a `val` split gets one, from `train`: an equal share of every class. So no
    script has to choose by results on test data.

    Args:
        name (str): a folder with one sub-folder per class, with or without splits, or with
            `metadata.csv` (see `metadata`); a Hub id or a folder in the Hub's layout; a single file
            with a table, or with arrays (see `array_files`); or `synthetic`.
        seed (int): seed of the split and of `synthetic`.
        val_fraction (float | None): share of each class for the split; 0: none. None: 0.1 if there
            is no `test` split either, else 0. Which images is a deterministic function of the seed
            and their names.
        image_column, label_column (str | None): columns of a table; None: the only ones that have
            images and classes.
        scaling (dict | None): that of other images, see `pixels`; without one, it is decided by
            these images.

    Returns:
        ImageSplits.

    Raises:
        UserError: there is no such data set, it has another layout, or nothing is held out.
    """
    splits, class_names, left_out = _find(name, seed, image_column, label_column)
    if len(class_names) < 2:
        raise UserError(
            f"--dataset {name} has only one class, {class_names[0]}: a classifier needs at least "
            "two"
        )
    if val_fraction is None:
        val_fraction = 0.1 if len(splits) == 1 else 0
    if "val" not in splits and val_fraction > 0:
        train = splits["train"]
        kept, held_out = split_off(
            train.labels, train.portable_name, class_names, seed, val_fraction
        )
        splits |= {"train": train.select(kept), "val": train.select(held_out)}
    if len(splits) == 1:
        raise UserError(
            f"--dataset {name} has no test split and no val split: give --val_fraction 0.1, say, "
            "to hold out a part of train"
        )
    for split, images in splits.items():
        counts = np.bincount(images.labels, minlength=len(class_names))
        missing = [class_names[label] for label in np.flatnonzero(counts == 0)]
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(
                f"--dataset {name}: its {split} split has no image of class {missing[0]}{others}"
            )
    return _described(name, splits, class_names, left_out, scaling)


def find_to_evaluate(name, class_names, *, image_column=None, label_column=None, scaling=None):
    """Finds labeled images that a trained model has not seen.

    Args:
        class_names (list[str]): those of the model, of which the data set may lack some.
        image_column, label_column, scaling: as for `find_images`.

    Returns:
        ImageSplits: with one split, `test` or else `val`, if the data set has it; else `all`.

    Raises:
        UserError: there is no such data set, or it has other classes.
    """
    splits, _, left_out = _find(name, 0, image_column, label_column, class_names)
    split = next(split for split in ("test", "val", "train") if split in splits)
    used = {"all" if split == "train" else split: splits[split]}
    for other in splits.keys() - {split}:
        left_out.add(f"images of the {other} split", splits[other].name(0), len(splits[other]))
    return _described(name, used, class_names, left_out, scaling)


def _find(name, seed, image_column, label_column, class_names=None):
    """Splits, class names and what was left out of any data set."""
    if name == "synthetic":
        return _draw(seed)
    path, found = local_path(name, ALTERNATIVES), None
    if path and path.is_file() and path.suffix.lower() in array_files.SUFFIXES:
        return *array_files.find(name, path, class_names), LeftOut()
    if path and path.is_dir():
        found = _from_metadata(name, path.resolve(), image_column, label_column, class_names)
        found = found or image_folder.find(path.resolve(), ALTERNATIVES, class_names)
    return found or _from_table(name, path, image_column, label_column, class_names)


def _described(name, splits, class_names, left_out, scaling):
    splits = {s: splits[s] for s in ("train", "val", "test", "all") if s in splits}
    said = pixels.describe(scaling or {}, "as in training")
    if not scaling:
        sample = next(iter(splits.values())).subsample(pixels.SAMPLE)
        scaling, said = pixels.find_scaling(name, sample.headers())
    for images in splits.values():
        images.scaling = scaling
    fingerprints = {split: images.fingerprint() for split, images in splits.items()}
    description = describe_images(splits, class_names, fingerprints)
    details = [*count_classes(splits, class_names), *said, *left_out.lines()]
    return ImageSplits(splits, class_names, description, details, scaling)


def split_off(labels, name_of, class_names, seed, fraction):
    """Chooses an equal share of every class: those that come first by a hash of name and seed.

    Args:
        labels: int64 array [samples].
        name_of: a function that returns the name of a sample, the same on every machine.
        class_names (list[str]): in the order of the labels.
        fraction (float): share of each class.

    Returns:
        tuple: the indices of the samples that stay, and those of the others; int64 arrays, sorted.

    Raises:
        UserError: a class has fewer than two samples.
    """
    held_out = np.zeros(len(labels), dtype=bool)
    for label, class_name in enumerate(class_names):
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            plural = "" if len(members) == 1 else "s"
            raise UserError(
                f"class {class_name} has {len(members)} image{plural}: at least 2 are needed to "
                "split off a val split"
            )
        keys = [
            hashlib.blake2b(f"{seed}/{name_of(i)}".encode("utf-8", "surrogateescape")).digest()
            for i in members
        ]
        held_out[members[hold_out(keys, fraction)]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _from_table(name, path, image_column, label_column, class_names):
    """What `_find` returns, for a Hub id, a folder in the Hub's layout, or a file."""
    if path and path.is_file() and path.suffix.lower() not in READERS:
        known = ", ".join([*READERS, *array_files.SUFFIXES])
        raise UserError(f"--dataset {name} is a file that does not end in {known}; {ALTERNATIVES}")
    from utils.images import columns, labels  # here, because they import `datasets`

    left_out, files = LeftOut(), None
    if path and path.is_dir():
        files = _table_files(path)
    elif path and path.is_file():
        files = {"train": [path]}
    tables = labels.load_rows(name, files, ALTERNATIVES)
    used = name_splits(name, tables, left_out)
    if "train" not in used and class_names is None:
        raise UserError(
            f"--dataset {name} has no train split, only {', '.join(tables)}; {ALTERNATIVES}"
        )
    features = next(iter(used.values())).features
    image_column = columns.find_image_column(name, features, image_column)
    label_column = columns.find_label_column(name, features, label_column, image_column)
    # Paths in a file start at its folder, as in a list of files that lies next to them.
    folder = path.parent if path and path.is_file() else path
    suffix = files["train"][0].suffix.lower() if files else ""

    def source_of(split):
        place = f"{name}, {split} split"
        return columns.image_rows(used[split], image_column, place, folder, suffix in LISTS)

    from_csv = READERS.get(suffix) == "csv"
    return _labeled(name, used, label_column, class_names, source_of, left_out, from_csv)


def _from_metadata(name, root, image_column, label_column, class_names):
    """What `_find` returns, for a folder whose metadata has a column of classes; None: another."""
    files = {} if describes_itself(root) else metadata.find(root)
    if not files:
        return None
    left_out = LeftOut()
    tables, paths = metadata.read(name, root, files, image_column or "file_name", left_out)
    if not tables:
        return None
    if "train" not in tables and class_names is None:
        raise UserError(f"--dataset {name} has no train split, only {', '.join(tables)}")
    from utils.images import columns, labels  # here, because they import `datasets`

    features = next(iter(tables.values())).features
    if label_column is None and not any(label in features for label in columns.LABEL_NAMES):
        return None  # the classes are the folders
    label_column = columns.find_label_column(name, features, label_column, image_column)

    def source_of(split):
        return Files(root, paths[split])

    from_csv = any(map(labels.is_csv, files.values()))
    return _labeled(name, tables, label_column, class_names, source_of, left_out, from_csv)


def _labeled(name, tables, label_column, class_names, source_of, left_out, from_csv):
    """What `_find` returns, for tables by split; `source_of(split)` reads the images of one."""
    from utils.images import labels  # here, because it imports `datasets`

    read, names = labels.read_labels(name, tables, label_column, class_names, from_csv)
    kind = next(iter(tables.values())).features[label_column]
    unused = [known for known in getattr(kind, "names", ()) if known not in names]
    if unused and class_names is None:
        left_out.add("classes without images to train with", unused[0], len(unused))
    splits = {}
    for split, values in read.items():
        missing = np.flatnonzero(values < 0)
        if len(missing) == len(values) and split == "test":  # as in data sets of competitions
            place = f"the test split of {name} has no labels"
            left_out.add("images of a test split without classes", place, len(values))
            continue
        if len(missing):
            raise UserError(
                f"{len(missing):,} of {len(values):,} rows of the {split} split of {name} have no "
                f"label, or -1, in the column {label_column} (the first is row {missing[0]}): "
                "filter them out"
            )
        splits[split] = Images(source_of(split), np.arange(len(values)), values)
    return splits, names, left_out


def _table_files(folder):
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


def _draw(seed, train=1000, val=200):
    """Patterns as encoded images of 40 to 160 pixels a side; every tenth is gray, or a PNG."""
    drawn, labels = synthetic.draw_patterns(seed, train + val)
    sizes = np.random.default_rng(seed).integers(40, 161, (train + val, 2))
    splits = {}
    for split, first, count in (("train", 0, train), ("val", train, val)):
        encoded = []
        for index in range(count):
            pixels = drawn[first + index].permute(1, 2, 0).numpy()
            size = sizes[first + index].tolist()
            image = Image.fromarray(pixels).resize(size, Image.BICUBIC)
            image = image.convert("L") if index % 10 == 3 else image
            buffer = io.BytesIO()
            image.save(buffer, "PNG" if index % 10 == 7 else "JPEG")
            encoded.append(buffer.getvalue())
        source = Rows(encoded, f"synthetic, {split} split", version=f"synthetic {seed}")
        own_labels = labels[first : first + count].numpy()
        splits[split] = Images(source, np.arange(count), own_labels)
    return splits, list(synthetic.CLASSES), LeftOut()
