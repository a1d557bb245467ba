"""Keeps the pictures of a split, decoded and scaled once, in one file that is memory-mapped by all processes of a machine.

The file is complete or absent: it gets its name when all of it is on disk. It holds the pixels of one picture after the
other, uint8 [height, width, 3], and then the height and width of each, int32 [samples, 2]; both are 0 if it cannot be read.
"""

import hashlib
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch

from utils import topology
from utils.exits import UserError
from utils.image_files import BadPicture, shrink

CHUNK = 256  # pictures


class Scaled:
    """A picture in the cache: used like `Encoded`."""

    def __init__(self, pixels):
        self._pixels = pixels
        self.height, self.width = pixels.shape[1:]

    def pixels(self, reduction=1):
        """uint8 [3, height, width], channels last; there is nothing to decode, so `reduction` changes nothing."""
        return self._pixels


class CachedPictures:
    """The pictures of a split in the cache `file`; used like `Pictures`."""

    def __init__(self, pictures, file):
        self._pictures, self._file, self._pixels = pictures, file, None
        self.labels = pictures.labels
        shapes = np.fromfile(file, np.int32, offset=max(0, os.path.getsize(file) - 8 * len(pictures))).reshape(-1, 2)
        self._shapes, sizes = shapes, 3 * shapes.astype(np.int64).prod(1)
        self._starts = np.cumsum(sizes) - sizes
        if len(shapes) != len(pictures) or sizes.sum() + shapes.nbytes != os.path.getsize(file):
            raise UserError(f"{file} is damaged: delete it, and it is made again")

    def __len__(self):
        return len(self._pictures)

    def __getstate__(self):
        return {**self.__dict__, "_pixels": None}  # a process that gets this object maps the file itself

    def name(self, index):
        """The path of a picture, as for `Pictures`."""
        return self._pictures.name(index)

    def open(self, index):
        """A picture as `Scaled`. Raises BadPicture if it could not be read when the cache was made."""
        height, width = self._shapes[index].tolist()
        if not height:
            return self._pictures.open(index)  # says what is wrong, or has been repaired
        if self._pixels is None:
            # Not shared: changes would stay in this process. Read-only in effect, and without a copy.
            self._pixels = torch.from_file(str(self._file), False, os.path.getsize(self._file), dtype=torch.uint8)
        start = int(self._starts[index])
        pixels = self._pixels[start : start + 3 * height * width]
        return Scaled(pixels.view(height, width, 3).permute(2, 0, 1))


def cached(accelerator, pictures, split, side, folder, interpolation="bilinear"):
    """Returns the pictures of a split from the cache, which is made first if it is not there; call it on every process.

    Args:
        split (str): its name, for messages.
        side (int): pixels of the shorter side to which pictures are scaled.
        folder (Path): on a disk of each machine.

    Raises:
        UserError: the cache cannot be written.
    """

    def find_or_make():
        file = _path(pictures, side, folder, interpolation)
        if not file.exists():
            _make(pictures, split, side, file, interpolation)
        return CachedPictures(pictures, file)

    return topology.local_main_first(accelerator, find_or_make)


def threads():
    """A pool with the threads of this process' share of the machine; decoding runs outside Python's lock."""
    # One thread each for torch: the pool has as many threads as there are cores.
    return ThreadPoolExecutor(cores_per_process(), initializer=torch.set_num_threads, initargs=(1,))


def cores_per_process():
    """The cores of this machine divided by its training processes, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def check(accelerator, pictures, split, on_bad):
    """Decodes every picture of a split once, this process' share of it, and names those that cannot be read.

    Raises:
        UserError: there are any, and `on_bad` is `stop`.
    """

    def broken(index):
        try:
            pictures.open(index).pixels(8)
            return None
        except BadPicture as error:
            return f"{pictures.name(index)} ({error})"

    def check_share():
        share = range(accelerator.process_index, len(pictures), accelerator.num_processes)
        with threads() as pool:
            return [line for chunk in chunks(share) for line in pool.map(broken, chunk) if line]

    own = topology.run_on_all(accelerator, check_share)
    everywhere = sorted(line for part in topology.gather(accelerator, own) for line in part)
    if everywhere:
        listed = ", ".join(everywhere[:10]) + (f" and {len(everywhere) - 10} more" if len(everywhere) > 10 else "")
        line = f"{len(everywhere)} of {len(pictures):,} pictures of the {split} split cannot be read: {listed}"
        if on_bad == "stop":
            raise UserError(f"{line}; replace or remove them, or leave them out with --on_bad_image skip")
        if accelerator.is_main_process:
            print(f"warning: left out: {line}")
    elif accelerator.is_main_process:
        print(f"{split}: all {len(pictures):,} pictures can be read")


def chunks(indices):
    """Parts of a range: a pool takes all the work that it is given at once, and keeps all results."""
    return (indices[first : first + CHUNK] for first in range(0, len(indices), CHUNK))


def _path(pictures, side, folder, interpolation):
    digest = hashlib.sha256(f"1 {side} {interpolation} {pictures.fingerprint(stamps=True)}".encode()).hexdigest()
    return Path(folder) / f"pixels_{digest[:24]}.bin"


def _make(pictures, split, side, file, interpolation):
    start_time, torch_threads = time.perf_counter(), torch.get_num_threads()
    temporary, shapes = file.with_suffix(f".writing.{os.getpid()}"), []

    def scaled(index):
        try:
            return shrink(pictures.open(index), side, interpolation).permute(1, 2, 0).contiguous().numpy()
        except BadPicture:
            return np.zeros((0, 0, 3), np.uint8)

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for left_over in file.parent.glob(f"{file.stem}.writing.*"):
            if not psutil.pid_exists(int(left_over.suffix[1:])):  # of a process that was killed
                left_over.unlink(missing_ok=True)
        with threads() as pool, temporary.open("wb") as out:
            for chunk in chunks(range(len(pictures))):
                for pixels in pool.map(scaled, chunk):
                    shapes.append(pixels.shape[:2])
                    out.write(pixels)
            out.write(np.array(shapes, dtype=np.int32))
            out.flush()
            os.fsync(out.fileno())
            written = out.tell()
        os.replace(temporary, file)
    except OSError as error:
        share = len(shapes) / len(pictures)
        needed = f"about {temporary.stat().st_size / share / 2**30:.1f} GiB" if share and temporary.exists() else "space"
        free = shutil.disk_usage(file.parent).free / 2**30 if file.parent.exists() else 0
        raise UserError(
            f"cannot write the cache to --cache_dir {file.parent} ({error.strerror}; {free:.1f} GiB free): it needs {needed}"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
        torch.set_num_threads(torch_threads)
    seconds = time.perf_counter() - start_time
    print(f"cached {len(pictures):,} {split} pictures in {file}: {written / 2**30:.2f} GiB, {seconds:.0f} s")
