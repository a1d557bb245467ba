"""Finds a data set: the one place that decides what its rows, splits, classes and labels are.

A new kind of source is one more function here, which returns splits of `Images` and class names;
every script, and evaluate.py, then takes it.
"""

import contextlib
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from utils.data import image_folder, synthetic
from utils.data.image_folder import TEST, VAL
from utils.data.images import Images, Rows
from utils.run.failures import UserError
from utils.run.process import is_main

# The reader of the `datasets` library for each kind of file.
READERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": "text",
}
IMAGE_TABLES = [suffix for suffix in READERS if suffix != ".txt"]
ALTERNATIVES = (
    "use a folder with one sub-folder per class (or train/ and val/ with such sub-folders), a Hub "
    "id such as uoft-cs/cifar10 or a folder in the Hub's layout, a Parquet file, or "
    "--dataset synthetic"
)


# ----------------------------------------------------------------------------------------- tables


def local_path(name, alternatives):
    """Finds out whether `name` is on this machine.

    Returns:
        Path | None: None: it may be a Hub id.

    Raises:
        UserError: it can only be a path, and there is nothing; the message ends with
            `alternatives`.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.startswith((".", "/", "~")) or path.suffix.lower() in READERS:
        raise UserError(f"--dataset {name}: there is no such file or folder; {alternatives}")
    return None


def load_table(name, *, files=None, streaming=False, alternatives=ALTERNATIVES):
    """Loads rows with the `datasets` library: the one way, for images and for text.

    Args:
        name (str): a Hub id, a folder in the Hub's layout, or a file with one of the suffixes in
            `READERS`; files with any other suffix are read as text.
        files (list[Path] | None): load these instead; all are of one kind.
        streaming (bool): read rows as they are needed, instead of all of them now.
        alternatives (str): what else the user can give; an error message ends with it.

    Returns:
        datasets.DatasetDict | datasets.IterableDatasetDict: by split; files are `train`.

    Raises:
        UserError: it cannot be loaded.
    """
    import datasets  # here, because it takes a second, and folders of images do not need it

    datasets.disable_progress_bars()
    path = local_path(name, alternatives)
    if files is None and path and path.is_file():
        files = [path]
    if files:
        reader = READERS.get(files[0].suffix.lower(), "text")
        source = dict(path=reader, data_files={"train": [str(file) for file in files]})
    else:
        source = dict(path=str(path or name))
    with loading(name, alternatives):
        return datasets.load_dataset(**source, streaming=streaming)


@contextlib.contextmanager
def loading(name, alternatives=ALTERNATIVES):
    """Raises UserError, with one line, instead of any error in the block."""
    try:
        yield
    except Exception as error:  # errors of datasets, fsspec, pyarrow or the network
        reason = first_line(error)
        raise UserError(f"cannot load --dataset {name} ({reason}); {alternatives}") from None


def first_line(error):
    """The first line of what caused an error, without a period."""
    text = str(error.__cause__ or error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


# ----------------------------------------------------------------------------------------- images


@dataclass
class ImageSplits:
    """A data set of labeled images.

    `splits` has `train`, and `val`, `test` or both. `class_names` are in the order of the labels.
    `description` is one line with a checksum, which differs if an image was added, removed or
    renamed.
    """

    splits: dict[str, Images]
    class_names: list[str]
    description: str


def find_images(name, *, seed=0, val_fraction=0.1, image_column=None, label_column=None):
    """Finds the images of a data set and their classes; decodes none of them.

    A data set without a `val` split gets one, from `train`: an equal share of every class. So no
    script has to choose by results on test data.

    Args:
        name (str): a folder with one sub-folder per class, with or without splits; a Hub id or a
            folder in the Hub's layout; a single file with a table; or `synthetic`.
        seed (int): seed of the split and of `synthetic`.
        val_fraction (float): share of each class for the split; 0: none. Which images is a
            deterministic function of the seed and their names.
        image_column, label_column (str | None): columns of a table; None: the only ones that have
            images and classes.

    Returns:
        ImageSplits.

    Raises:
        UserError: there is no such data set, it has another layout, or nothing is held out.
    """
    path = None if name == "synthetic" else local_path(name, ALTERNATIVES)
    found = None
    if name == "synthetic":
        found = _draw(seed)
    elif path and path.is_dir():
        found = image_folder.find(path.resolve(), ALTERNATIVES)
    splits, class_names = found or _from_table(name, path, image_column, label_column)
    if len(class_names) < 2:
        raise UserError(
            f"--dataset {name} has only one class, {class_names[0]}: a classifier needs at least "
            "two"
        )
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
    splits = {split: splits[split] for split in ("train", "val", "test") if split in splits}
    for split, images in splits.items():
        counts = np.bincount(images.labels, minlength=len(class_names))
        missing = [class_names[label] for label in np.flatnonzero(counts == 0)]
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(
                f"--dataset {name}: its {split} split has no image of class {missing[0]}{others}"
            )
    fingerprints = {split: images.fingerprint() for split, images in splits.items()}
    return ImageSplits(splits, class_names, describe(splits, class_names, fingerprints))


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
        order = sorted(range(len(members)), key=keys.__getitem__)
        count = min(max(1, round(len(members) * fraction)), len(members) - 1)
        held_out[members[order[:count]]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def describe(splits, class_names, fingerprints):
    """One line about a data set.

    Args:
        splits (dict): of anything that has a length.
        fingerprints (dict[str, str]): a checksum of each split.
    """
    counts = [f"{len(samples):,} {split}" for split, samples in splits.items()]
    listed = " and ".join([", ".join(counts[:-1]), counts[-1]] if len(counts) > 1 else counts)
    digest = hashlib.sha256(repr(class_names).encode())
    for fingerprint in fingerprints.values():
        digest.update(fingerprint.encode())
    short = digest.hexdigest()[:12]
    return f"{listed} images of {len(class_names)} classes (fingerprint {short})"


def _from_table(name, path, image_column, label_column):
    """The splits and class names of a Hub id, a folder in the Hub's layout, or a file."""
    if path and path.is_file() and path.suffix.lower() not in IMAGE_TABLES:
        known = ", ".join(IMAGE_TABLES)
        raise UserError(f"--dataset {name} is a file that does not end in {known}; {ALTERNATIVES}")
    tables = load_table(name)
    used = _named_splits(tables)
    if "train" not in used:
        raise UserError(
            f"--dataset {name} has no train split, only {', '.join(tables)}; {ALTERNATIVES}"
        )
    from utils.data import columns  # here, because it imports `datasets`

    features = used["train"].features
    image_column = columns.find_image_column(name, features, image_column)
    label_column = columns.find_label_column(name, features, label_column, image_column)
    labels, class_names = columns.read_labels(name, used, label_column)
    # Paths in a file start at its folder, as in a list of files that lies next to them.
    folder = path.parent if path and path.is_file() else None
    splits = {}
    for split, values in labels.items():
        missing = np.flatnonzero(values < 0)
        if len(missing) == len(values) and split == "test":  # as in data sets of competitions
            if is_main():
                print(f"the test split of {name} has no labels: it is not used")
            continue
        if len(missing):
            raise UserError(
                f"{len(missing):,} of {len(values):,} rows of the {split} split of {name} have no "
                "label or one that the train split does not have (the first is row "
                f"{missing[0]}): filter them out"
            )
        source = columns.image_rows(used[split], image_column, f"{name}, {split} split", folder)
        splits[split] = Images(source, np.arange(len(values)), values)
    return splits, class_names


def _named_splits(tables):
    """The tables that are used, by split; a single one is `train`, whatever its name."""
    if len(tables) == 1:
        return {"train": next(iter(tables.values()))}
    named = {}
    for split, aliases in (("train", ("train",)), ("val", VAL), ("test", TEST)):
        found = [tables[alias] for alias in aliases if alias in tables]
        named |= {split: found[0]} if found else {}
    return named


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
    return splits, list(synthetic.CLASSES)
