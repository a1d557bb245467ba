"""Keeps decoded images of a split in one file, which all processes of a machine map into memory.

It holds the pixels of one image after the other, uint8 [height, width, 3], and then the height and
width of each, int32 [samples, 2]; both are 0 if it cannot be read.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from utils.data.sharing import cached, local_main_first, path_in_cache
from utils.images.decoding import BadImage, Images, Source
from utils.images.transforms import shrink
from utils.run.devices import cores_per_process
from utils.run.failures import UserError

CHUNK = 256  # images
KIND = "scaled images"


class Scaled:
    """An image in the cache, uint8 [3, height, width]: used like `Encoded`."""

    def __init__(self, pixels):
        self._pixels = pixels
        self.height, self.width = pixels.shape[1:]

    def pixels(self, reduction=1):
        """Returns uint8 [3, height, width], channels last: there is nothing to decode."""
        return self._pixels


@dataclass
class Cache(Source):
    """The images of a split in a file.

    `images` are the encoded ones, and `pixels` the file, uint8 [bytes]. `starts` (int64 [samples])
    and `shapes` (int32 [samples, 2], height and width) say where each is in it.
    """

    images: Images
    pixels: torch.Tensor
    starts: np.ndarray
    shapes: np.ndarray

    def name(self, row):
        """The path of an image, as for `Images`."""
        return self.images.name(row)

    def open(self, row):
        """An image as `Scaled`. Raises BadImage if it could not be read when the file was made."""
        height, width = self.shapes[row].tolist()
        if not height:
            return self.images.open(row)  # says what is wrong, or has been repaired
        start = int(self.starts[row])
        pixels = self.pixels[start : start + 3 * height * width]
        return Scaled(pixels.view(height, width, 3).permute(2, 0, 1))


def cache_images(accelerator, images, split, side, interpolation="bilinear"):
    """Returns the images (`Images`) of a split, scaled; call it on every process.

    If they are not there, one process per machine decodes and writes them first. `side` (int) is
    that of the shorter side, in pixels. Raises UserError if the cache cannot be written, or is
    damaged.
    """

    def scaled(index):
        try:
            return shrink(images.open(index), side, interpolation)
        except BadImage:
            return torch.zeros(3, 0, 0, dtype=torch.uint8)

    def parts():
        print(f"scaling {len(images):,} {split} images for the cache", flush=True)
        shapes = []
        for pixels in in_threads(scaled, range(len(images))):
            shapes.append(pixels.shape[1:])
            yield pixels.permute(1, 2, 0).contiguous().numpy()
        yield np.array(shapes, dtype=np.int32)

    def find_or_write():
        rows = hashlib.sha256(images.rows.tobytes()).hexdigest()
        version = side, interpolation, images.source.version, rows
        cache = cached(KIND, parts(), version)
        end = len(cache) - 8 * len(images)
        if end >= 0:
            shapes = cache[end:].clone().view(torch.int32).view(-1, 2).numpy()
            sizes = 3 * shapes.astype(np.int64).prod(1)
            if sizes.sum() == end:
                source = Cache(images, cache, np.cumsum(sizes) - sizes, shapes)
                return Images(source, np.arange(len(images)), images.labels)
        file = path_in_cache(KIND, version)
        raise UserError(f"{file} is damaged: delete it, and it is made again")

    return local_main_first(accelerator, find_or_write)


def in_threads(function, indices):
    """Yields `function(index)` for each index, in order: this process' share of the machine works.

    Decoding runs outside Python's lock. Each thread computes with one thread of torch, because
    there are as many as cores.
    """
    before = torch.get_num_threads()
    one_each = dict(initializer=torch.set_num_threads, initargs=(1,))
    try:
        with ThreadPoolExecutor(cores_per_process(), **one_each) as pool:
            # A pool takes all the work that it is given at once, and keeps all results.
            for first in range(0, len(indices), CHUNK):
                yield from pool.map(function, indices[first : first + CHUNK])
    finally:
        torch.set_num_threads(before)
