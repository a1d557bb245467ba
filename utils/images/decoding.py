"""Encoded images: where they are, and the one decoder for all of them.

What is kept of a data set are arrays of names, row numbers and labels, which the workers of a data
loader share. The images stay encoded, and are read when they are needed.
"""

import contextlib
import functools
import hashlib
import io
import os
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps, features

from utils.images.storage import Files, Pixels, Rows

ORIENTATION = 0x0112  # the EXIF tag; 5 to 8 exchange width and height
# Since Pillow 11.2, if built with it; `check` would warn about a name that it does not know.
HAS_AVIF = "avif" in features.modules and features.check("avif")
# Common ones first. Not PostScript, say, for which Pillow starts another program.
FORMATS = (
    *("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "DIB", "TGA", "JPEG2000", "ICO", "PCX"),
    *(["AVIF"] if HAS_AVIF else []),
)
TIFF_BITS = 258  # the tag: bits of each channel
SAMPLED = 1000  # images of which a fingerprint reads `SAMPLED_BYTES`
SAMPLED_BYTES = 1 << 16


class BadImage(Exception):
    """The data is not an image, or a damaged one."""


@dataclass
class Images:
    """One split of a data set.

    `source` reads the images. `rows` are their numbers in it and `labels` their classes, both int64
    [samples].
    """

    source: Files | Rows | Pixels
    rows: np.ndarray
    labels: np.ndarray

    def __len__(self):
        return len(self.rows)

    def open(self, index):
        """Reads an image and its header: `Encoded`. Raises BadImage if it cannot, or is none."""
        try:
            return Encoded(self.source.read(self.rows[index]))
        except (OSError, ValueError) as error:
            raise BadImage(getattr(error, "strerror", None) or str(error)) from None

    def name(self, index):
        """The path of an image, or the row and the split in which it is."""
        return self.source.name(self.rows[index])

    def portable_name(self, index):
        """The name of an image that is the same on every machine."""
        return self.source.portable_name(self.rows[index])

    def select(self, indices):
        """The images at `indices` (int64 array) only."""
        return Images(self.source, self.rows[indices], self.labels[indices])

    def subsample(self, count):
        """At most `count` images, at even distances over all."""
        indices = np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64)
        return self.select(indices)

    def fingerprint(self, stamps=False):
        """A checksum (str) of names, labels, sizes and data, the same on every machine.

        Of images in files or in a table it has the first `SAMPLED_BYTES` of `SAMPLED` images, at
        even distances over all: another change that keeps the sizes goes unnoticed. With `stamps`
        (bool), it has the path, size and time of every file instead, or the version of the table:
        for this machine only.
        """
        digest = hashlib.sha256(self.labels.tobytes())
        for row in self.rows.tolist():
            digest.update(os.fsencode(self.source.portable_name(row)) + b"\0")
            if stamps:
                digest.update(repr(self.source.stamp(row)).encode())
        if stamps:
            return digest.hexdigest()
        if isinstance(self.source, Pixels):
            digest.update(self.source.checksum().encode())
            return digest.hexdigest()
        digest.update(self.source.sizes[self.rows].tobytes())
        for row in self.subsample(SAMPLED).rows:
            with contextlib.suppress(OSError, ValueError):  # its name is in the checksum
                digest.update(self.source.read(row, SAMPLED_BYTES))
        return digest.hexdigest()


# --------------------------------------------------------------------------------------- decoding


class Encoded:
    """An encoded image, of which only the header has been read.

    `width` and `height` are in pixels, after the rotation that its EXIF data asks for.
    """

    def __init__(self, data):
        """Reads the header of a file in one of the `FORMATS` (bytes).

        Raises BadImage if it is not an image, or has more than 8 bits per channel.
        """
        self._data = data
        with _readable():
            self._image = _open(data)
        if _is_deep(self._image, self._data):
            raise BadImage(
                "it has more than 8 bits per channel: convert the data set with the recipe "
                "eight_bits of scripts/recipes/README.md"
            )
        self._orientation = _orientation(self._image)
        width, height = self._image.size
        rotated = self._orientation in (5, 6, 7, 8)
        self.width, self.height = (height, width) if rotated else (width, height)

    def pixels(self, reduction=1):
        """Decodes the image to RGB; what is transparent becomes white.

        Args:
            reduction (int): 1, 2, 4 or 8: decode to 1/reduction of the size, if the format is JPEG.

        Returns:
            uint8 [3, height, width], in channels-last memory format. Raises BadImage if damaged.
        """
        with _readable():
            return self._pixels(reduction)

    def _pixels(self, reduction):
        image, is_jpeg = self._image, self._image.format in ("JPEG", "MPO")
        plain = image.mode in ("RGB", "L") and self._orientation == 1
        if is_jpeg and plain and reduction == 1 and (decode := _jpeg_decoder()):
            # The same pixels as from Pillow, in two thirds of the time. Of damaged data Pillow,
            # below, says what is wrong.
            with contextlib.suppress(RuntimeError):
                return decode(torch.frombuffer(bytearray(self._data), dtype=torch.uint8))
        if is_jpeg and reduction > 1:
            image.draft(image.mode, (image.width // reduction, image.height // reduction))
        image = _rgb(ImageOps.exif_transpose(image) if self._orientation != 1 else image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _open(data):
    """Opens an image with Pillow, which reads its header."""
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.format == "PNG" and "exif" not in image.info:
        image.load()  # the EXIF data may be behind the pixels
    return image


def _is_deep(image, data):
    """Whether an image has more than 8 bits per channel, of which Pillow may read the upper 8."""
    if image.format == "PNG":
        return data[24] > 8
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    return image.mode[0] in "IF" or max(tags.get(TIFF_BITS, ()), default=8) > 8


def _orientation(image):
    """The EXIF orientation; 1, as in viewers, if the EXIF data cannot be read.

    Nothing is turned by a value that is not one of 1 to 8.
    """
    orientation = 1
    if image.format != "TIFF":  # which Pillow turns itself
        with contextlib.suppress(Exception):  # whatever the reader of damaged data stumbles over
            orientation = image.getexif().get(ORIENTATION, 1)
    return orientation


@functools.cache
def _jpeg_decoder():
    """The decoder of torchvision, or None: it is deprecated since 0.29.

    Imported when the first JPEG is decoded, because the import takes almost a second.
    """
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError:
        return None
    return functools.partial(decode_jpeg, mode=ImageReadMode.RGB)


def _rgb(image):
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


@contextlib.contextmanager
def _readable():
    """Raises BadImage, with one line, instead of any error in the block."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # the decoders of damaged data raise whatever they stumble over
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        not_an_image = "cannot identify" in reason
        raise BadImage("it is not an image" if not_an_image else reason) from None
