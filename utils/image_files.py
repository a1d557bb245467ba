"""Decodes pictures of any format, and transforms each one with random numbers of its own.

What happens to a picture depends only on the seed, the epoch and its id. The epoch reaches the data set together with the id
(`EpochSampler`), because workers that live for several epochs never see a change of the data set.
"""

import contextlib
import hashlib
import io
import struct
import sys

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import Dataset, Sampler, get_worker_info
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from utils.exits import UserError
from utils.shared_batches import SharedBatch

try:
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:  # deprecated since torchvision 0.29: without it, Pillow decodes everything
    decode_jpeg = None

ORIENTATION = 0x0112  # the EXIF tag; 5 to 8 exchange width and height
REDUCTIONS = (8, 4, 2)  # by which the decoder of JPEG can divide the size, at less work


class BadPicture(Exception):
    """The data is not a picture, or a damaged one."""


class Encoded:
    """An encoded picture, of which only the header has been read. `width`, `height`: in pixels, as it is to be looked at."""

    def __init__(self, data):
        """Args: data (bytes): a file in any format that Pillow reads. Raises BadPicture."""
        self._data = data
        self._image = _readable(lambda: Image.open(io.BytesIO(data)))
        self._orientation = _readable(lambda: self._image.getexif().get(ORIENTATION, 1))
        width, height = self._image.size
        self.width, self.height = (height, width) if self._orientation in (5, 6, 7, 8) else (width, height)

    def pixels(self, reduction=1):
        """Decodes the picture to RGB.

        Args:
            reduction (int): 1, 2, 4 or 8: decode to 1/reduction of the size, if the format is JPEG.

        Returns:
            uint8 [3, height, width], in channels-last memory format.

        Raises:
            BadPicture: the data is damaged.
        """
        return _readable(lambda: self._pixels(reduction))

    def _pixels(self, reduction):
        image, jpeg = self._image, self._image.format in ("JPEG", "MPO")
        if decode_jpeg and jpeg and reduction == 1 and image.mode in ("RGB", "L") and self._orientation == 1:
            # The same pixels as from Pillow, in two thirds of the time. Damaged data: Pillow, below, says what is wrong.
            with contextlib.suppress(RuntimeError):
                return decode_jpeg(torch.frombuffer(bytearray(self._data), dtype=torch.uint8), ImageReadMode.RGB)
        if jpeg and reduction > 1:
            image.draft(image.mode, (image.width // reduction, image.height // reduction))
        image = _rgb(ImageOps.exif_transpose(image) if self._orientation != 1 else image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _rgb(image):
    if image.mode.startswith("I"):  # 16-bit gray: Pillow's own conversion makes it white
        return Image.fromarray((np.asarray(image, dtype=np.int64) // 256).clip(0, 255).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _readable(decode):
    try:
        return decode()
    except MemoryError:
        raise
    except Exception as error:  # the decoders of damaged data raise whatever they stumble over
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadPicture("it is not a picture" if "cannot identify" in reason else reason) from None


def reduction_for(width, height, wanted_width, wanted_height):
    """The largest reduction with which a part of `width` x `height` pixels still has `wanted_width` x `wanted_height`."""
    return next((r for r in REDUCTIONS if width >= r * wanted_width and height >= r * wanted_height), 1)


def shrink(picture, side, interpolation="bilinear"):
    """Scales a picture so that its shorter side has `side` pixels. Returns uint8 [3, height, width], channels last.

    A JPEG is decoded to twice that size or more, which changes what is left after scaling by less than a level on average.
    """
    pixels = picture.pixels(reduction_for(picture.width, picture.height, 2 * side, 2 * side))
    if min(pixels.shape[1:]) == side:
        return pixels
    return F.resize(pixels, [side], InterpolationMode(interpolation), antialias=True)


class EvalTransform:
    """Scales the shorter side to `resize` pixels and takes the `crop` x `crop` pixels in the middle."""

    def __init__(self, preprocess):
        """Args: preprocess (dict): `resize`, `crop`, `interpolation`, as `pretrained.preprocessing` returns them."""
        self.size, self._resize, self._interpolation = (preprocess[name] for name in ("crop", "resize", "interpolation"))

    def __call__(self, picture, epoch=0, index=0):
        """Returns uint8 [3, crop, crop]; not random."""
        return F.center_crop(shrink(picture, self._resize, self._interpolation), [self.size, self.size])


class TrainTransform:
    """A random part of the picture, scaled to `size` x `size`; flipped, changed in color and shape, and partly erased.

    Args:
        seed (int): of the run.
        preprocess (dict): `interpolation`; and `mean`, which becomes the color of erased pixels.
        min_scale (float): the smallest part, as a share of the area.
        flip, random_erasing (float): probabilities.
        auto_augment (str): `trivial` (TrivialAugmentWide, arXiv:2103.10158), `rand` (RandAugment, arXiv:1909.13719) or `none`.
    """

    def __init__(self, seed, size, preprocess, *, min_scale=0.08, flip=0.5, auto_augment="none", random_erasing=0.0):
        self.size, self._seed, self._flip, self._interpolation = (
            size,
            seed,
            flip,
            InterpolationMode(preprocess["interpolation"]),
        )
        self._crop = v2.RandomResizedCrop(size, scale=(min_scale, 1.0))
        choice = {"trivial": v2.TrivialAugmentWide, "rand": v2.RandAugment, "none": None}[auto_augment]
        self._augment = choice(interpolation=self._interpolation) if choice else None
        color = [round(255 * value) for value in preprocess["mean"]]
        self._erase = v2.RandomErasing(random_erasing, value=color) if random_erasing else None

    def __call__(self, picture, epoch, index):
        """Returns uint8 [3, size, size]. Seeds torch's generator: all random numbers follow from seed, `epoch` and `index`."""
        torch.default_generator.manual_seed(sample_seed(self._seed, epoch, index))
        # The library decides which part before the picture is decoded: it needs no more than the size.
        part = self._crop.make_params([torch.empty(3, picture.height, picture.width, device="meta")])
        pixels = picture.pixels(reduction_for(part["width"], part["height"], self.size, self.size))
        pixels = F.resize(_part_of(pixels, part, picture), [self.size, self.size], self._interpolation, antialias=True)
        if torch.rand(()) < self._flip:
            pixels = F.horizontal_flip(pixels)
        if self._augment is not None:  # of a Pillow image: rotations and shears take a third of the time
            pixels = F.pil_to_tensor(self._augment(F.to_pil_image(pixels)))
        return self._erase(pixels) if self._erase is not None else pixels


def _part_of(pixels, part, picture):
    """A part of `picture`, cut out of what was decoded, which may be smaller."""
    height, width = pixels.shape[1:]
    vertical, horizontal = height / picture.height, width / picture.width
    top, left = int(part["top"] * vertical), int(part["left"] * horizontal)
    rows, columns = max(1, round(part["height"] * vertical)), max(1, round(part["width"] * horizontal))
    part = pixels[:, top : top + rows, left : left + columns]
    # As a view of the whole it would be scaled on the slow path, to another memory format.
    return part.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def sample_seed(seed, epoch, index):
    """A seed for one picture in one epoch, 64 bits, by BLAKE2 (RFC 7693)."""
    return int.from_bytes(hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest(), "little")


class EpochSampler(Sampler):
    """Yields (epoch, id) for the pictures of whole optimizer steps, in an order that follows from the seed and the epoch."""

    def __init__(self, samples, batch_size, seed, shuffle=True):
        """Args: samples (int): pictures in the data set. batch_size (int): pictures per optimizer step."""
        self._samples, self._used = samples, samples // batch_size * batch_size
        self._seed, self._shuffle, self._epoch = seed, shuffle, 0

    def set_epoch(self, epoch):
        """Which epoch is next; called by the prepared loader's own `set_epoch`."""
        self._epoch = epoch

    def __len__(self):
        return self._used

    def __iter__(self):
        generator = torch.Generator().manual_seed(sample_seed(self._seed, self._epoch, -1))
        order = torch.randperm(self._samples, generator=generator) if self._shuffle else torch.arange(self._samples)
        for ids in order[: self._used].split(1024):
            yield from ((self._epoch, index) for index in ids.tolist())


@contextlib.contextmanager
def ending_workers(loaders):
    """Ends the persistent workers of the loaders in this dict when the block ends, however it ends.

    Workers ignore signals, so that the loop can finish its step; Python would wait for them at exit, forever.
    """
    try:
        yield
    finally:
        for loader in loaders.values():
            iterator = getattr(loader, "_iterator", None)
            if iterator is not None:
                iterator._shutdown_workers()


class ImageBatches(Dataset):
    """Returns whole batches to a `DataLoader`, for a list of ids or of (epoch, id).

    A batch is a dict: `images` uint8 [batch, 3, size, size] in channels-last memory format, `labels` and `ids` int64 [batch],
    and `bad`, the list of ids of pictures that could not be read.
    """

    def __init__(self, pictures, transform, on_bad="stop", replace=False):
        """
        Args:
            pictures: a split, as `load_pictures` or `image_cache.cached` returns it.
            transform: `EvalTransform` or `TrainTransform`.
            on_bad (str): `stop`: a picture that cannot be read is an error; `skip`: it is left out.
            replace (bool): the next picture that can be read takes its place; otherwise, its label is -1.
        """
        self.pictures, self._transform, self._skip, self._replace = pictures, transform, on_bad == "skip", replace
        self.size, self._told = transform.size, set()

    def __len__(self):
        return len(self.pictures)

    def __getitems__(self, keys):
        keys = [key if isinstance(key, tuple) else (0, key) for key in keys]
        images, labels, bad = [], torch.full((len(keys),), -1, dtype=torch.int64), []
        with torch.random.fork_rng(devices=[]):  # the transforms seed the global generator
            for place, (epoch, index) in enumerate(keys):
                image, labels[place] = self._transformed(epoch, index, bad)
                images.append(image.permute(1, 2, 0))
        others = {"labels": labels, "ids": torch.tensor([index for _, index in keys]), "bad": bad}
        if get_worker_info():
            return SharedBatch(images, **others)
        return {"images": torch.stack(images).permute(0, 3, 1, 2), **others}

    def _transformed(self, epoch, index, bad):
        """A picture and its label. Adds the ids of those that cannot be read to the list `bad`."""
        for other in range(index, index + len(self)) if self._replace else (index,):
            other %= len(self)
            try:
                return self._transform(self.pictures.open(other), epoch, other), int(self.pictures.labels[other])
            except BadPicture as error:
                bad.append(self._refuse(other, error))
        if self._replace:
            raise UserError("none of the training pictures can be read", None)
        return torch.zeros(self.size, self.size, 3, dtype=torch.uint8).permute(2, 0, 1), -1

    def _refuse(self, index, error):
        line = f"cannot read {self.pictures.name(index)}: {error}"
        if not self._skip:
            # Only this process knows: it prints.
            raise UserError(f"{line}; replace or remove it, or leave it out with --on_bad_image skip", None)
        if index not in self._told:
            self._told.add(index)
            where = f" (worker {get_worker_info().id})" if get_worker_info() else ""
            print(f"warning{where}: left out: {line}", file=sys.stderr, flush=True)
        return index
