"""Reads a data set of images from arrays in one .npz file.

    train_images, train_labels   uint8 [images, height, width, 3] or [images, 3, height, width], or
                                 gray [images, height, width], also with 1 in place of 3;
                                 integers [images] or [images, 1]
    val_images, val_labels,      likewise; either split may be absent
    test_images, test_labels
    class_names                  strings [classes], in the order of the labels; without it, the
                                 classes are called 0, 1, ...

Nothing in such a file is executed: NumPy would have to be asked to load pickles.
"""

import os
import zipfile
import zlib

import numpy as np

from utils.images.decoding import Images
from utils.images.storage import Pixels
from utils.run.failures import UserError
from utils.run.files import regular_file

SPLITS = ("train", "val", "test")
SHOWN = 10  # names of arrays in a message
# What NumPy raises for a file that is damaged or of another kind.
DAMAGE = (
    *(OSError, ValueError, KeyError, EOFError, RuntimeError, MemoryError, NotImplementedError),
    *(TypeError, zipfile.BadZipFile, zlib.error),
)


def find(name, path, class_names=None):
    """Reads the splits of a file.

    Args:
        name (str): the value of `--dataset`, for messages.
        path (Path): the file.
        class_names (list[str] | None): those of a trained model, of which it may lack some.

    Returns:
        tuple[dict[str, Images], list[str]]: the splits; the names of the classes.

    Raises:
        UserError: it is damaged, or does not hold such arrays.
    """
    try:
        keys, arrays, own_names = _read(regular_file(path))
    except DAMAGE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"--dataset {name} cannot be read: {reason}") from None
    used = [split for split in SPLITS if f"{split}_images" in arrays]
    if not used or (class_names is None and "train" not in used):
        found = f"only {', '.join(sorted(keys)[:SHOWN])}" if keys else "nothing"
        raise UserError(
            f"--dataset {name} has no array train_images, {found}: save its arrays as "
            "train_images, train_labels, test_images, test_labels"
        )
    labels = {split: _labels(name, split, arrays) for split in used}
    count = 1 + max(int(values.max()) for values in labels.values())
    names = _names(name, own_names, class_names, count)
    position = {class_name: label for label, class_name in enumerate(class_names or names)}
    unknown = [known for known in names if known not in position]
    if unknown:
        raise UserError(f"--dataset {name}: class {unknown[0]} is not among those of the model")
    new_labels = np.array([position[known] for known in names], dtype=np.int64)
    status = os.stat(path)
    stamp = f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}"
    splits = {}
    for split, values in labels.items():
        pixels = Pixels(_images(name, split, arrays), f"{name}, {split} split", f"{stamp} {split}")
        if len(pixels) != len(values):
            raise UserError(
                f"--dataset {name} has {len(pixels):,} {split}_images and {len(values):,} "
                f"{split}_labels"
            )
        splits[split] = Images(pixels, np.arange(len(values)), new_labels[values])
    return splits, class_names or names


def _read(file):
    """The names of all arrays of a file, the arrays that are used, its classes or None."""
    with np.load(file, allow_pickle=False) as opened:
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise ValueError("it is not an .npz file")
        keys = opened.files
        arrays = {key: opened[key] for key in _wanted(keys)}
        names = opened["class_names"] if "class_names" in keys else None
    if names is not None and (names.ndim != 1 or names.dtype.kind != "U"):
        raise ValueError("class_names is not a list of strings")
    return keys, arrays, None if names is None else names.tolist()


def _wanted(keys):
    known = [f"{split}_{part}" for split in SPLITS for part in ("images", "labels")]
    return [key for key in known if key in keys]


def _images(name, split, arrays):
    """The images of a split, uint8 [images, height, width, 3]."""
    images = arrays[f"{split}_images"]
    found = images[..., None] if images.ndim == 3 else images
    if found.dtype == np.uint8 and found.ndim == 4 and found.size:
        for channels in (3, 1):
            if channels not in (found.shape[1], found.shape[3]):
                continue
            if found.shape[3] != channels:
                found = found.transpose(0, 2, 3, 1)
            return np.ascontiguousarray(np.broadcast_to(found, (*found.shape[:3], 3)))
    raise UserError(
        f"--dataset {name}: {split}_images is {images.dtype} {list(images.shape)}, not uint8 "
        "[images, height, width, 3], [images, 3, height, width] or [images, height, width] (the "
        "recipe eight_bits of scripts/recipes/README.md converts other values)"
    )


def _labels(name, split, arrays):
    """The labels of a split, int64 [images]."""
    labels = arrays.get(f"{split}_labels")
    if labels is None:
        raise UserError(f"--dataset {name} has {split}_images, but no {split}_labels")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or not labels.size or labels.min() < 0:
        raise UserError(
            f"--dataset {name}: {split}_labels is {labels.dtype} {list(labels.shape)}, not "
            "integers [images] from 0 on"
        )
    return labels.astype(np.int64)


def _names(name, own, of_model, count):
    """The names of the classes of a file, whose largest label is `count` - 1."""
    names = own or of_model or [str(label) for label in range(min(count, 1 << 20))]
    if len(set(names)) < len(names):
        raise UserError(f"--dataset {name}: class_names has a name twice")
    if len(names) < count:
        raise UserError(
            f"--dataset {name} has a label {count - 1}, but {len(names)} class names: the first is "
            "that of label 0"
        )
    return names
