"""Images on this machine: in a folder, in an .npz file, or patterns for runs without a data set.

A folder has one sub-folder per class. The arrays of a file are:

    train_images, train_labels   uint8 [images, height, width, 3], or gray [images, height, width];
                                 integers [images]
    val_images, val_labels,      likewise; either split may be absent
    test_images, test_labels
    class_names                  strings [classes], in the order of the labels; without it, the
                                 classes are called 0, 1, ...

Nothing in such a file is executed: NumPy would have to be asked to load pickles.
"""

import math
import unicodedata

import numpy as np
import torch

from utils.data.scan import scan, stamp
from utils.data.tables import SPLITS, one_each, refuse_almost_splits, split_of
from utils.images.decoding import Files, Images, Pixels
from utils.run.arguments import shown
from utils.run.failures import UserError
from utils.run.files import regular_file

EXTENSIONS = {
    *".jpg .jpeg .jpe .jfif .mpo .png .apng .webp .bmp .dib .gif .tif .tiff .tga".split(),
    *".ppm .pgm .pbm .pnm .jp2 .j2k".split(),
}
TABLES = (".parquet", ".arrow")  # files with rows that can hold images
ARCHIVES = (".tar", ".zip")  # in which a data set in the Hub's layout may keep them
# Lists of images and their classes, which the `datasets` library reads, and this module does not.
LISTS = {"metadata.csv", "metadata.jsonl", "metadata.parquet"}
SHOWN = 10  # names of arrays in a message
# The names of synthetic data sets -> how many images their splits have.
COUNTS = {
    "synthetic": {"train": 1000, "val": 200},
    "synthetic in memory": {"train": 5000, "test": 1000},
}
SIZE = 32  # pixels, square
# Arguments: offset (a, b) of a pixel from the center (right, down), angular frequency p, phase q,
# radius r, line width w.
CLASSES = {
    "rows": lambda a, b, p, q, r, w: torch.sin(b * p + q).expand(-1, -1, SIZE),
    "columns": lambda a, b, p, q, r, w: torch.sin(a * p + q).expand(-1, SIZE, -1),
    "checks": lambda a, b, p, q, r, w: torch.sin(a * p + q) * torch.sin(b * p + q),
    "rings": lambda a, b, p, q, r, w: torch.sin((a * a + b * b).sqrt() * p + q),
    "squares": lambda a, b, p, q, r, w: torch.sin(_square(a, b) * p + q),
    "diamonds": lambda a, b, p, q, r, w: torch.sin((a.abs() + b.abs()) * p / 2**0.5 + q),
    "disk": lambda a, b, p, q, r, w: r - (a * a + b * b).sqrt(),
    "block": lambda a, b, p, q, r, w: r * 0.9 - _square(a, b),
    "plus": lambda a, b, p, q, r, w: w - torch.minimum(a.abs(), b.abs()) - 4 * (_square(a, b) > r),
    "cross": lambda a, b, p, q, r, w: (
        w - ((a - b).abs().minimum((a + b).abs())) / 2**0.5 - 4 * (_square(a, b) > r)
    ),
}


# ------------------------------------------------------------------------------------------ folders


def find_in_folder(root, layouts):
    """Finds the splits and classes of a folder (Path). Decodes nothing.

    Folders at the top are splits if one of them is called like a split (see `data.tables`), else
    classes. Error messages end with `layouts` (str), what is accepted.

    Returns:
        tuple | None: the splits (dict of `Images`; without split folders all is `train`), the names
        of all classes, and what was left out. None: the folder has tables instead, as a data set of
        the Hub has.

    Raises:
        UserError: there is no class folder, it cannot be decided which folders are splits, or
            there is a list such as metadata.csv, which is not read.
    """
    files, others, left_out = scan(root, EXTENSIONS)
    if files and (lists := LISTS.intersection(others)):
        raise UserError(
            f"--dataset {root}: its {min(lists)} is not read: make a folder for each class, as "
            "scripts/README.md shows, and remove it"
        )
    loose, folders = _divide(files, 0)
    by_split = _find_splits(root, folders)
    splits = {} if by_split or not folders else {"train": folders}
    for split, folder in by_split.items():
        direct, classes = _divide(folders[folder], 1)
        if classes:
            splits[split] = classes
        elif split != "test":
            raise UserError(
                f"--dataset {root}: its {split} split has no class folder with images; {layouts}"
            )
        if direct:
            where = "in no class folder" if classes else "of a test split without classes"
            left_out.add(f"images {where}", direct[0], len(direct))
    if not splits and any(file.lower().endswith(TABLES + ARCHIVES) for file in others):
        return None
    if loose:
        left_out.add("images in no class folder", loose[0], len(loose))
    if not splits:
        seen = "; ".join(left_out.lines())
        raise UserError(f"--dataset {root} has no class folder with images ({seen}); {layouts}")
    names = sorted(set().union(*splits.values()))
    return (
        {split: _labeled(root, classes, names) for split, classes in splits.items()},
        names,
        left_out,
    )


def _divide(files, depth):
    """The files that are directly in a folder, and those below it by sub-folder, as a dict.

    Args: depth (int): number of folders above.
    """
    direct, folders = [], {}
    for file in files:
        # In one form of Unicode: macOS writes accents as letters of their own.
        parts = unicodedata.normalize("NFC", file).split("/")
        if len(parts) == depth + 1:
            direct.append(file)
        else:
            folders.setdefault(parts[depth], []).append(file)
    return direct, folders


def _find_splits(root, folders):
    """The folder of each split: split -> folder; {}: the folders are classes.

    Raises UserError if both kinds are there, or splits have other names or are in a class.
    """
    refuse_almost_splits(root, {folder: split_of(folder) for folder in folders})
    by_split, others = one_each(root, folders)
    if by_split and others:
        folder = next(iter(by_split.values()))
        raise UserError(
            f"--dataset {root}: by its name {folder} is a split, but beside it are images in "
            f"{shown(others[0])}: rename that if it is a split (train, val or test), move all "
            "classes into a folder train, or remove what is neither"
        )
    inside = {folder: [*_divide(files, 1)[1]] for folder, files in folders.items()}
    for folder, names in () if by_split else inside.items():
        split = next(filter(split_of, names), None)
        if split:  # as in cat/train and cat/test: all would be images of one split
            raise UserError(
                f"--dataset {root} has a split in a class, {folder}/{split}: give --dataset "
                f"{root / folder}, or put the classes into the splits, as {split}/{folder}"
            )
    names = inside[others[0]] if len(others) > 1 else []
    if len(names) > 1 and all(subfolders == names for subfolders in inside.values()):
        raise UserError(
            f"--dataset {root}: {', '.join(map(shown, folders))} have the same sub-folders, so "
            f"they are no classes: rename {shown(others[0])}, since a split is called train, val "
            "or test"
        )
    return by_split


def _labeled(root, classes, names):
    """The images of one split, sorted by class."""
    files = [file for name in names for file in classes.get(name, ())]
    counts = [len(classes.get(name, ())) for name in names]
    labels = np.repeat(np.arange(len(names), dtype=np.int64), counts)
    return Images(Files(root, files), np.arange(len(files)), labels)


# ------------------------------------------------------------------------------------------- arrays


def find_arrays(name, path, class_names=None):
    """Reads the splits of a file (Path).

    Args:
        name (str): the value of `--dataset`, for messages.
        class_names (list[str] | None): what the classes are called, if the file does not say it.

    Returns:
        tuple[dict[str, Images], list[str]]: the splits; the names of the classes.

    Raises:
        UserError: it is damaged, or does not hold such arrays.
    """
    try:
        with np.load(regular_file(path)) as file:
            keys = file.files
            array_names = [key for key in keys if key.split("_")[0] in (*SPLITS, "class")]
            arrays = {key: file[key] for key in array_names}
    except Exception as error:  # whatever NumPy stumbles over in a file that is damaged
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"--dataset {name} cannot be read: {reason}") from None
    version, splits = stamp(path), {}
    for split in SPLITS:
        if f"{split}_images" in arrays:
            images, labels = _check(name, split, arrays)
            pixels = Pixels(images, f"{name}, {split} split", f"{version} {split}")
            splits[split] = Images(pixels, np.arange(len(labels)), labels)
    if not splits:
        contents = f"only {', '.join(sorted(keys)[:SHOWN])}" if keys else "nothing"
        raise UserError(
            f"--dataset {name} has no array train_images, {contents}: "
            "save its arrays as train_images, train_labels, test_images, test_labels"
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


def _check(name, split, arrays):
    """The images of a split, uint8 [images, height, width, 3], and its labels, int64 [images]."""
    images, labels = arrays[f"{split}_images"], arrays.get(f"{split}_labels")
    if images.ndim == 3:
        images = np.repeat(images[..., None], 3, axis=3)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size:
        raise UserError(
            f"--dataset {name}: {split}_images is {images.dtype} {list(images.shape)}, not uint8 "
            "[images, height, width, 3] or [images, height, width]: transpose it (the recipe "
            "eight_bits of scripts/recipes/README.md converts other values)"
        )
    if labels is None:
        raise UserError(f"--dataset {name} has {split}_images, but no {split}_labels")
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or labels.min() < 0:
        raise UserError(
            f"--dataset {name}: {split}_labels is {labels.dtype} {list(labels.shape)}, not "
            f"integers from 0 on, one for each of the {len(images):,} {split}_images"
        )
    return images, labels.astype(np.int64)


# ---------------------------------------------------------------------------------------- synthetic


def _square(a, b):
    """The distance from the center for which all points at the same distance form a square."""
    return torch.maximum(a.abs(), b.abs())


def draw_patterns(seed, count):
    """Draws ten kinds of patterns with random position, scale, phase and two colors, with noise.

    Because of the random phases and colors, a linear model has a low accuracy; a small
    convolutional network learns all ten classes. The same seed gives the same images on every
    machine, all different.

    Returns:
        tuple: images, uint8 [count, 3, 32, 32]; labels, int64 [count], in the order of `CLASSES`.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return torch.rand(count, *shape, generator=generator) * (high - low) + low

    labels = torch.randint(10, (count,), generator=generator)
    coordinate = torch.arange(SIZE, dtype=torch.float32)
    u = coordinate.view(1, 1, -1) - uniform(11, 21, 1, 1)
    v = coordinate.view(1, -1, 1) - uniform(11, 21, 1, 1)
    frequency = uniform(2 * math.pi / 10, 2 * math.pi / 6, 1, 1)
    phase = uniform(0, 2 * math.pi, 1, 1)
    radius, width = uniform(5, 10, 1, 1), uniform(1.2, 2.4, 1, 1)
    pattern = torch.empty(count, SIZE, SIZE)
    for label, draw in enumerate(CLASSES.values()):
        chosen = labels == label
        values = (u, v, frequency, phase, radius, width)
        pattern[chosen] = draw(*(value[chosen] for value in values))
    blend = torch.sigmoid(3 * pattern)[:, None]
    background = uniform(20, 235, 3, 1, 1)
    # Brighter or darker than the background by 60 to 120 levels, and then changed by up to 30 in
    # each channel.
    direction = torch.where(background.mean(1, keepdim=True) > 127, -1, 1)
    foreground = background + direction * uniform(60, 120, 1, 1, 1) + uniform(-30, 30, 3, 1, 1)
    images = (foreground.clamp(0, 255) - background) * blend
    images += background
    images += torch.randn(images.shape, generator=generator).mul_(18)
    return images.clamp_(0, 255).to(torch.uint8), labels


def draw_splits(seed, name):
    """Patterns for a data set in `COUNTS`: the splits (dict of `Images`), and class names."""
    drawn, labels = draw_patterns(seed, sum(COUNTS[name].values()))
    pixels, labels, splits = drawn.permute(0, 2, 3, 1).contiguous().numpy(), labels.numpy(), {}
    for split, count in COUNTS[name].items():
        source = Pixels(pixels[:count], f"synthetic, {split} split", f"{seed} {name}")
        splits[split] = Images(source, np.arange(count), labels[:count])
        pixels, labels = pixels[count:], labels[count:]
    return splits, list(CLASSES)
