"""Data sets of 32x32 images in memory, of the host or of a GPU, and their batches."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from utils.data.sharing import cached
from utils.images.augment import to_device
from utils.images.decoding import BadImage, Images, Pixels
from utils.images.local import SIZE
from utils.images.sources import find_images
from utils.run.failures import UserError


@dataclass
class Split:
    """Samples in memory.

    images: uint8 [samples, 3, 32, 32]. labels: int64 [samples]; -1: the image cannot be read.
    source: what they are from; None: they have no names.
    """

    images: torch.Tensor
    labels: torch.Tensor
    source: Images | None = None

    def __len__(self):
        return len(self.labels)

    def name(self, index):
        """The path of an image, or the row in which it is."""
        return self.source.name(index)

    def first(self, count):
        """The first `count` samples."""
        return Split(self.images[:count], self.labels[:count], self.source)

    def batch(self, ids):
        """The samples `ids`, int64 [batch] on the CPU, as a batch.

        A dict: `images` uint8 [batch, 3, 32, 32], `labels` int64 [batch], and `ids` as given.
        """
        at_hand = to_device(ids, self.labels.device)
        # View each image as int64, not uint8: indexing then copies 8 bytes at a time.
        rows = self.images.flatten(1).view(torch.int64).index_select(0, at_hand)
        images = rows.view(torch.uint8).view(-1, *self.images.shape[1:])
        return {"images": images, "labels": self.labels.index_select(0, at_hand), "ids": ids}

    def __getitems__(self, ids):
        """A batch, for a `DataLoader`."""
        return self.batch(torch.tensor(ids))

    def mean_and_std(self):
        """Mean and standard deviation, float32 [3], of uint8 values in the first 10,000 images."""
        values = self.images[:10_000].int()  # whose sums are exact
        count = values[:, 0].numel()
        mean = values.sum((0, 2, 3)).double() / count
        variance = values.square().sum((0, 2, 3)).double() / count - mean.square()
        return mean.float(), variance.clamp(min=1).sqrt().float()  # a channel may be constant


def on_device(accelerator, splits):
    """The same splits (dict) in the memory of this process's device: one kernel makes a batch."""
    device = accelerator.device
    return {
        name: Split(split.images.to(device), split.labels.to(device), split.source)
        for name, split in splits.items()
    }


def load_arrays(name, *, seed=0, val_fraction=None, columns=None):
    """Loads a data set into memory as images of 32x32 pixels.

    Of an image of another size, the shorter side is scaled to 32 pixels and the center is used.
    Images are decoded once. Later starts, and the other processes of a machine, read the pixels
    from a file.

    Returns:
        ImageSplits: as of `sources.find_images`, which takes the same arguments; its splits are of
        the class `Split`.

    Raises:
        UserError: as there; an image is corrupt; or the file cannot be written.
    """
    name = "synthetic in memory" if name == "synthetic" else name
    return in_memory(find_images(name, seed=seed, val_fraction=val_fraction, columns=columns))


def in_memory(data, skip=False):
    """The same `ImageSplits`, loaded; `skip`: an image that cannot be read has the label -1."""
    decoded, splits = {}, {}
    for split, images in data.splits.items():
        # All images of a source: other choices of the val split then use the same file.
        source = images.source
        if source not in decoded:
            decoded[source] = _decoded(source)
        pixels, readable = decoded[source]
        if len(images) < len(source):
            pixels = pixels[torch.from_numpy(images.rows)]
        labels = np.where(readable[images.rows], images.labels, -1)
        for index in () if skip else np.flatnonzero(labels < 0):
            try:
                _decode(images, index)
            except BadImage as error:
                raise UserError(f"corrupt image in {images.name(index)}: {error}") from None
        splits[split] = Split(pixels, torch.from_numpy(labels), images)
    detail = (
        f"images are used at {SIZE}x{SIZE} pixels: the center of others, after their shorter side "
        f"is scaled to {SIZE}"
    )
    return replace(data, splits=splits, details=[*data.details, detail])


def _decoded(source):
    """All images of a source, uint8 [rows, 3, 32, 32], and which can be read, bool array [rows].

    They are from a file that is made if it is absent.
    """
    count, size = len(source), 3 * SIZE * SIZE
    if isinstance(source, Pixels) and source.images.shape[1:3] == (SIZE, SIZE):
        pixels = torch.from_numpy(source.images.transpose(0, 3, 1, 2).copy())
        return pixels, np.ones(count, dtype=bool)
    images = Images(source, np.arange(count), np.zeros(count, dtype=np.int64))

    def parts():
        readable = np.ones(count, dtype=bool)
        for index in range(count):
            try:
                yield _decode(images, index).numpy().tobytes()
            except BadImage:
                readable[index] = False
                yield bytes(size)
        yield readable.tobytes()

    stored = cached("decoded images", parts(), source.version)
    readable = stored[count * size :].numpy().astype(bool)
    return stored[: count * size].view(count, 3, SIZE, SIZE), readable


def _decode(images, index):
    """An image, uint8 [3, 32, 32]. Raises BadImage if it cannot be read."""
    pixels = images.open(index).pixels()
    if pixels.shape[1:] == (SIZE, SIZE):
        return pixels
    shorter = min(pixels.shape[1:])
    size = [int(length * SIZE / shorter) for length in pixels.shape[1:]]
    scaled = F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
    top, left = (round((length - SIZE) / 2) for length in size)
    return scaled[:, top : top + SIZE, left : left + SIZE].contiguous()
