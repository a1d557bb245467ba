"""Reads a data set of images from arrays in one .npz file.

    train_images, train_labels   uint8 [images, height, width, 3], or gray [images, height, width];
                                 integers [images]
    val_images, val_labels,      likewise; either split may be absent
    test_images, test_labels
    class_names                  strings [classes], in the order of the labels; without it, the
                                 classes are called 0, 1, ...

Nothing in such a file is executed: NumPy would have to be asked to load pickles.
"""

import numpy as np

from utils.data.scan import stamp
from utils.data.splits import SPLITS
from utils.images.decoding import Images
from utils.images.storage import Pixels
from utils.run.failures import UserError
from utils.run.files import regular_file

SHOWN = 10  # names of arrays in a message


def find(name, path, class_names=None):
    """Reads the splits of a file (Path).

    Args:
        name (str): the value of `--dataset`, for messages.
        class_names (list[str] | None): what the classes are called, if the file does not say it.

    Returns:
        tuple[dict[str, Images], list[str]]: the splits; the names of the classes.

    Raises:
        UserError: it is damaged, or does not hold such arrays.
    """
    wanted = {f"{split}_{part}" for split in SPLITS for part in ("images", "labels")}
    try:
        with np.load(regular_file(path), allow_pickle=False) as file:
            keys = file.files
            arrays = {key: file[key] for key in keys if key in {*wanted, "class_names"}}
    except Exception as error:  # whatever NumPy stumbles over in a file that is damaged
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"--dataset {name} cannot be read: {reason}") from None
    version, splits = stamp(path), {}
    for split in SPLITS:
        if f"{split}_images" in arrays:
            images, labels = _images(name, split, arrays), _labels(name, split, arrays)
            pixels = Pixels(images, f"{name}, {split} split", f"{version} {split}")
            if len(pixels) != len(labels):
                raise UserError(
                    f"--dataset {name} has {len(pixels):,} {split}_images and {len(labels):,} "
                    f"{split}_labels"
                )
            splits[split] = Images(pixels, np.arange(len(labels)), labels)
    if not splits:
        found = f"only {', '.join(sorted(keys)[:SHOWN])}" if keys else "nothing"
        raise UserError(
            f"--dataset {name} has no array train_images, {found}: save its arrays as "
            "train_images, train_labels, test_images, test_labels"
        )
    count = 1 + max(int(images.labels.max()) for images in splits.values())
    names = class_names or [str(label) for label in range(min(count, 1 << 20))]
    if "class_names" in arrays:
        names = arrays["class_names"].astype(str).ravel().tolist()
    if len(names) < count:
        raise UserError(
            f"--dataset {name} has a label {count - 1}, but {len(names)} class names: the first is "
            "that of label 0"
        )
    return splits, names


def _images(name, split, arrays):
    """The images of a split, uint8 [images, height, width, 3]."""
    images = arrays[f"{split}_images"]
    if images.dtype == np.uint8 and images.size:
        if images.ndim == 3:
            return np.repeat(images[..., None], 3, axis=3)
        if images.ndim == 4 and images.shape[3] == 3:
            return images
    raise UserError(
        f"--dataset {name}: {split}_images is {images.dtype} {list(images.shape)}, not uint8 "
        "[images, height, width, 3] or [images, height, width]: transpose it (the recipe "
        "eight_bits of scripts/recipes/README.md converts other values)"
    )


def _labels(name, split, arrays):
    """The labels of a split, int64 [images]."""
    labels = arrays.get(f"{split}_labels")
    if labels is None:
        raise UserError(f"--dataset {name} has {split}_images, but no {split}_labels")
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or not labels.size or labels.min() < 0:
        raise UserError(
            f"--dataset {name}: {split}_labels is {labels.dtype} {list(labels.shape)}, not "
            "integers [images] from 0 on"
        )
    return labels.astype(np.int64)
