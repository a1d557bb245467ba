"""Images in arrays: of one .npz file, or patterns for runs without a data set.

    train_images, train_labels   uint8 [images, height, width, 3], or gray [images, height, width];
                                 integers [images]
    val_images, val_labels,      likewise; either split may be absent
    test_images, test_labels
    class_names                  strings [classes], in the order of the labels; without it, the
                                 classes are called 0, 1, ...

Nothing in such a file is executed: NumPy would have to be asked to load pickles.
"""

import math

import numpy as np
import torch

from utils.data.scan import stamp
from utils.data.tables import SPLITS
from utils.images.decoding import Images, Rows
from utils.run.failures import UserError
from utils.run.files import regular_file

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


class Pixels(Rows):
    """Images in an array, `images`: uint8 [images, height, width, 3]."""

    def __init__(self, images, place, version):
        super().__init__(images, place, version)
        self.images = images

    def read(self, row, most=None):
        """An image as a PPM file, which has its values as they are; or the first `most` bytes."""
        _, height, width, _ = self.images.shape
        data = b"P6 %d %d 255\n" % (width, height) + self.images[int(row)].tobytes()
        return data[:most]

    @property
    def sizes(self):
        """The size of each image in bytes, int64."""
        return np.full(len(self), self.images[0].nbytes)


# ------------------------------------------------------------------------------------------- files


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
    try:
        with np.load(regular_file(path), allow_pickle=False) as file:
            keys = file.files
            wanted = [key for key in keys if key.split("_")[0] in (*SPLITS, "class")]
            arrays = {key: file[key] for key in wanted}
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
        found = f"only {', '.join(sorted(keys)[:SHOWN])}" if keys else "nothing"
        raise UserError(
            f"--dataset {name} has no array train_images, {found}: "
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


# --------------------------------------------------------------------------------------- synthetic


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
