"""Keeps decoded images of a split in one file, which all processes of a machine map into memory.

The file is complete or absent: it gets its name when all of it is on disk. It holds the pixels of
one image after the other, uint8 [height, width, 3], and then the height and width of each, int32
[samples, 2]; both are 0 if it cannot be read.
"""

import copy
import functools
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from utils.data.cache_files import local_main_first, map_bytes, write
from utils.images.decoding import BadImage
from utils.run.collectives import gather, run_on_all
from utils.run.devices import cores_per_process
from utils.run.failures import UserError

CHUNK = 256  # images

map_once = functools.cache(map_bytes)  # in each process


class Scaled:
    """An image in the cache: used like `Encoded`."""

    def __init__(self, pixels):
        """Args: pixels: uint8 [3, height, width]."""
        self._pixels = pixels
        self.height, self.width = pixels.shape[1:]

    def pixels(self, reduction=1):
        """Returns uint8 [3, height, width], in channels-last memory format.

        There is nothing to decode, so `reduction` changes nothing.
        """
        return self._pixels


class CachedImages:
    """The images of a split in the cache `file`; used like `Images`."""

    def __init__(self, images, file):
        self._images, self._file, self.labels = images, file, images.labels
        self._shapes = read_shapes(file, len(images))
        sizes = 3 * self._shapes.astype(np.int64).prod(1)
        self._starts = np.cumsum(sizes) - sizes

    def __len__(self):
        return len(self._images)

    def select(self, indices):
        """As for `Images`."""
        some = copy.copy(self)
        some._images, some.labels = self._images.select(indices), self.labels[indices]
        some._shapes, some._starts = self._shapes[indices], self._starts[indices]
        return some

    def name(self, index):
        """The path of an image, as for `Images`."""
        return self._images.name(index)

    def open(self, index):
        """An image as `Scaled`. Raises BadImage if it could not be read when the file was made."""
        height, width = self._shapes[index].tolist()
        if not height:
            return self._images.open(index)  # says what is wrong, or has been repaired
        start = int(self._starts[index])
        pixels = map_once(self._file)[start : start + 3 * height * width]
        return Scaled(pixels.view(height, width, 3).permute(2, 0, 1))


def cached(accelerator, images, split, side, folder, interpolation="bilinear"):
    """Returns the scaled images of a split from the cache; call it on every process.

    If they are not there, one process per machine decodes and writes them first.

    Args:
        images (Images): the split.
        split (str): its name, for messages.
        side (int): pixels of the shorter side to which images are scaled.
        folder (Path): on a disk of each machine.

    Returns:
        CachedImages.

    Raises:
        UserError: the cache cannot be written, or is damaged.
    """
    from utils.images.transforms import shrink  # here, because importing torchvision takes a second

    def decode(index):
        try:
            return shrink(images.open(index), side, interpolation)
        except BadImage:
            return torch.zeros(3, 0, 0, dtype=torch.uint8)

    def parts():
        shapes = []
        with threads() as pool:
            for chunk in chunks(range(len(images))):
                for pixels in pool.map(decode, chunk):
                    shapes.append(pixels.shape[1:])
                    yield pixels.permute(1, 2, 0).contiguous().numpy()
        yield np.array(shapes, dtype=np.int32)

    def find_or_write():
        file = cache_file(images, side, folder, interpolation)
        if not file.exists():
            start_time, torch_threads = time.perf_counter(), torch.get_num_threads()
            try:
                write(file, parts(), f"the cache to {folder}")
            finally:
                torch.set_num_threads(torch_threads)
            seconds, size = time.perf_counter() - start_time, file.stat().st_size / 2**30
            count = f"{len(images):,} {split} images"
            print(f"cached {count} in {file}: {size:.2f} GiB, {seconds:.0f} s")
        return CachedImages(images, file)

    return local_main_first(accelerator, find_or_write)


def cache_file(images, side, folder, interpolation):
    """The path of the cache of `images`: another one if a file or the table was changed."""
    version = images.fingerprint(stamps=True)
    digest = hashlib.sha256(f"1 {side} {interpolation} {version}".encode()).hexdigest()
    return Path(folder) / f"pixels_{digest[:24]}.bin"


def read_shapes(file, count):
    """Reads height and width of the images in a cache, int32 [count, 2].

    Raises:
        UserError: the file is damaged.
    """
    start = os.path.getsize(file) - 8 * count
    if start >= 0:
        shapes = np.fromfile(file, np.int32, offset=start).reshape(-1, 2)
        if 3 * shapes.astype(np.int64).prod(1).sum() == start:
            return shapes
    raise UserError(f"{file} is damaged: delete it, and it is made again")


def threads():
    """A pool with the threads of this process' share of the machine.

    Decoding runs outside Python's lock. Each thread computes with one thread of torch, because the
    pool has as many as there are cores.
    """
    one_each = dict(initializer=torch.set_num_threads, initargs=(1,))
    return ThreadPoolExecutor(cores_per_process(), **one_each)


def chunks(indices):
    """Splits a range: a pool takes all the work that it is given at once, and keeps all results."""
    return (indices[first : first + CHUNK] for first in range(0, len(indices), CHUNK))


def check(accelerator, images, split, on_bad):
    """Decodes every image of a split once, in all processes, and names those that cannot be read.

    Raises:
        UserError: there are any, and `on_bad` is `stop`.
    """

    def broken(index):
        try:
            images.open(index).pixels(8)
            return None
        except BadImage as error:
            return f"{images.name(index)} ({error})"

    def check_share():
        share = range(accelerator.process_index, len(images), accelerator.num_processes)
        with threads() as pool:
            return [line for chunk in chunks(share) for line in pool.map(broken, chunk) if line]

    own = run_on_all(accelerator, check_share)
    everywhere = sorted(line for part in gather(accelerator, own) for line in part)
    if everywhere:
        more = f" and {len(everywhere) - 10} more" if len(everywhere) > 10 else ""
        count = f"{len(everywhere)} of {len(images):,} images of the {split} split"
        line = f"{count} cannot be read: {', '.join(everywhere[:10])}{more}"
        if on_bad == "stop":
            raise UserError(
                f"{line}; replace or remove them, or leave them out with --on_bad_image skip"
            )
        if accelerator.is_main_process:
            print(f"warning: left out: {line}")
    elif accelerator.is_main_process:
        print(f"{split}: all {len(images):,} images can be read")
