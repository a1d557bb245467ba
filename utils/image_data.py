"""Loads images (from a Hub id, a local folder or `synthetic`) as uint8 tensors in memory, and returns batches by index."""

import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from utils.exits import UserError

SIZE = 32  # pixels, square
ALTERNATIVES = "use a Hub id such as uoft-cs/cifar10, a local folder with the same layout, or --dataset synthetic"


@dataclass
class Split:
    """images: uint8 [samples, 3, 32, 32]; labels: int64 [samples]."""

    images: torch.Tensor
    labels: torch.Tensor

    def first(self, count):
        """The first `count` samples."""
        return Split(self.images[:count], self.labels[:count])

    def mean_and_std(self):
        """Per-channel mean and standard deviation of the first 10,000 images, float32 [3] each, in uint8 units."""
        # Counts how often each of the 256 levels occurs: exact, and faster than a copy in float32.
        counts = [torch.bincount(channel.flatten(), minlength=256) for channel in self.images[:10_000].unbind(1)]
        share, levels = torch.stack(counts).double(), torch.arange(256.0, dtype=torch.float64)
        share /= share.sum(1, keepdim=True)
        mean = share @ levels
        variance = (share * (levels - mean[:, None]).square()).sum(1)
        return mean.float(), variance.sqrt().float()


@dataclass
class ImageData:
    """A data set: two splits, and the names of the classes in the order of their labels."""

    train: Split
    test: Split
    class_names: list[str]


class BatchedImages(torch.utils.data.Dataset):
    """Returns whole batches to a `DataLoader`: one index operation instead of one call per sample.

    A batch is a dict: `images` uint8 [batch, 3, 32, 32], `labels` int64 [batch], `ids` int64 [batch].
    """

    def __init__(self, split):
        self.labels = split.labels
        # View each image as int64, not uint8: indexing then copies 8 bytes at a time.
        self.rows = split.images.flatten(1).view(torch.int64)
        self.shape = split.images.shape[1:]

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        ids = torch.tensor(indices)
        images = self.rows.index_select(0, ids).view(torch.uint8).view(-1, *self.shape)
        return {"images": images, "labels": self.labels[ids], "ids": ids}


def as_is(batch):
    """For `DataLoader(collate_fn=...)`: returns the batch unchanged, because the data set returns whole batches."""
    return batch


def load_images(name, seed=0):
    """Loads an image classification data set with a train and a test split of 32x32 images.

    Images are decoded once, and cached by the `datasets` library (`HF_DATASETS_CACHE`).

    Args:
        name (str): a Hub id, a local folder that `datasets.load_dataset` understands, or `synthetic`.
        seed (int): seed of `synthetic`.

    Raises:
        UserError: the data set cannot be found or has another layout, or an image is corrupt (the message names the row).
    """
    if name == "synthetic":
        return synthetic_images(seed)
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
        raise UserError(f"--dataset {name}: there is no such folder; {ALTERNATIVES}")
    import datasets  # here, because it takes a second, and synthetic data does not need it

    loaded = load_splits(name, ALTERNATIVES)
    held_out = next((split for split in ("test", "validation", "valid", "val") if split in loaded), None)
    missing = [split for split, key in (("test", held_out), ("train", "train" in loaded or None)) if key is None]
    if missing:
        raise UserError(f"--dataset {name} has no {' and no '.join(missing)} split; {ALTERNATIVES}")
    features = loaded["train"].features
    image_column = next((c for c, f in features.items() if isinstance(f, datasets.Image)), None)
    label_column = next((c for c, f in features.items() if isinstance(f, datasets.ClassLabel)), None)
    if image_column is None or label_column is None:
        raise UserError(
            f"--dataset {name} needs a column of images and one of class labels, it has {', '.join(features)}; {ALTERNATIVES}"
        )
    splits = {}
    for split, key in (("train", "train"), ("test", held_out)):
        columns = (
            loaded[key].select_columns([image_column, label_column]).cast_column(image_column, datasets.Image(decode=False))
        )
        try:
            decoded = columns.map(
                _decode,
                with_indices=True,
                batched=True,
                remove_columns=[image_column, label_column],
                fn_kwargs={"image_column": image_column, "label_column": label_column, "where": f"{name}, {key} split"},
                features=datasets.Features({"pixels": datasets.Value("binary"), "label": datasets.Value("int64")}),
            )
        except OSError as error:
            raise UserError(f"cannot write the decoded images to the cache of `datasets`: {error}") from None
        table = decoded.with_format("arrow")[:]
        pixels = np.frombuffer(b"".join(table["pixels"].to_pylist()), dtype=np.uint8)
        images = torch.from_numpy(pixels.reshape(-1, SIZE, SIZE, 3).transpose(0, 3, 1, 2).copy())
        splits[split] = Split(images, torch.from_numpy(table["label"].to_numpy().copy()))
    return ImageData(**splits, class_names=list(features[label_column].names))


# Arguments: offset (a, b) of a pixel from the center (right, down), angular frequency p, phase q, radius r, line width w.
SYNTHETIC_CLASSES = {
    "rows": lambda a, b, p, q, r, w: torch.sin(b * p + q).expand(-1, -1, SIZE),
    "columns": lambda a, b, p, q, r, w: torch.sin(a * p + q).expand(-1, SIZE, -1),
    "checks": lambda a, b, p, q, r, w: torch.sin(a * p + q) * torch.sin(b * p + q),
    "rings": lambda a, b, p, q, r, w: torch.sin((a * a + b * b).sqrt() * p + q),
    "squares": lambda a, b, p, q, r, w: torch.sin(torch.maximum(a.abs(), b.abs()) * p + q),
    "diamonds": lambda a, b, p, q, r, w: torch.sin((a.abs() + b.abs()) * p / 2**0.5 + q),
    "disk": lambda a, b, p, q, r, w: r - (a * a + b * b).sqrt(),
    "block": lambda a, b, p, q, r, w: r * 0.9 - torch.maximum(a.abs(), b.abs()),
    "plus": lambda a, b, p, q, r, w: w - torch.minimum(a.abs(), b.abs()) - 4 * (torch.maximum(a.abs(), b.abs()) > r),
    "cross": lambda a, b, p, q, r, w: (
        w - ((a - b).abs().minimum((a + b).abs())) / 2**0.5 - 4 * (torch.maximum(a.abs(), b.abs()) > r)
    ),
}


def load_splits(name, alternatives):
    """Loads a Hub id or a local folder in the layout of the Hub with `datasets`. Returns its splits.

    Raises:
        UserError: it cannot be loaded; the message ends with `alternatives`.
    """
    import datasets  # here, because it takes a second

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(str(Path(name).expanduser()) if Path(name).expanduser().exists() else name)
    except Exception as error:  # errors of datasets, fsspec, pyarrow or the network
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"cannot load --dataset {name} ({first.rstrip('.')}); {alternatives}") from None


def synthetic_images(seed, train=5000, test=1000):
    """Creates images of ten kinds of patterns with random position, scale and phase, in two random colors, with noise.

    Train and test images are drawn from the same distribution by one generator, so they have no image in common. Because of
    the random phases and colors, a linear model has a low accuracy; a small convolutional network learns all ten classes.

    Args:
        seed (int): the same seed gives the same images on every machine.
        train, test (int): number of images.
    """
    generator = torch.Generator().manual_seed(seed)
    count = train + test

    def uniform(low, high, *shape):
        return torch.rand(count, *shape, generator=generator) * (high - low) + low

    labels = torch.randint(10, (count,), generator=generator)
    coordinate = torch.arange(SIZE, dtype=torch.float32)
    u = coordinate.view(1, 1, -1) - uniform(11, 21, 1, 1)
    v = coordinate.view(1, -1, 1) - uniform(11, 21, 1, 1)
    frequency, phase = uniform(2 * math.pi / 10, 2 * math.pi / 6, 1, 1), uniform(0, 2 * math.pi, 1, 1)
    radius, width = uniform(5, 10, 1, 1), uniform(1.2, 2.4, 1, 1)
    pattern = torch.empty(count, SIZE, SIZE)
    for label, draw in enumerate(SYNTHETIC_CLASSES.values()):
        selected = labels == label
        pattern[selected] = draw(*(values[selected] for values in (u, v, frequency, phase, radius, width)))
    blend = torch.sigmoid(3 * pattern)[:, None]
    background = uniform(20, 235, 3, 1, 1)
    # Brighter or darker than the background by 60 to 120 levels, and then changed by up to 30 in each channel.
    foreground = (
        background
        + torch.where(background.mean(1, keepdim=True) > 127, -1, 1) * uniform(60, 120, 1, 1, 1)
        + uniform(-30, 30, 3, 1, 1)
    ).clamp(0, 255)
    images = (foreground - background) * blend
    images += background
    images += torch.randn(images.shape, generator=generator).mul_(18)
    images = images.clamp_(0, 255).to(torch.uint8)
    return ImageData(Split(images[:train], labels[:train]), Split(images[train:], labels[train:]), list(SYNTHETIC_CLASSES))


def _decode(columns, indices, image_column, label_column, where):
    pixels = []
    for row, image, label in zip(indices, columns[image_column], columns[label_column], strict=True):
        try:
            opened = Image.open(io.BytesIO(image["bytes"]) if image["bytes"] is not None else image["path"])
            decoded = opened.convert("RGB")
        except (UnidentifiedImageError, OSError, SyntaxError, TypeError, ValueError) as error:
            raise UserError(f"corrupt image in row {row} of {where}: {str(error).splitlines()[0]}") from None
        if decoded.size != (SIZE, SIZE):
            raise UserError(
                f"image in row {row} of {where} is {decoded.width}x{decoded.height}: this script needs {SIZE}x{SIZE}"
            )
        if label is None or label < 0:
            raise UserError(f"row {row} of {where} has no label")
        pixels.append(decoded.tobytes())
    return {"pixels": pixels, "label": columns[label_column]}
