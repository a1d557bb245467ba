"""Encoded images: where they are, and the one decoder for all of them.

What is kept of a data set are arrays of names, row numbers and labels, which the workers of a data
loader share. The images stay encoded, and are read when they are needed.
"""

import contextlib
import hashlib
import io
import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from PIL import Image, ImageOps

from utils.data.scan import read_regular, stamp

ORIENTATION = 0x0112  # the EXIF tag; 5 to 8 exchange width and height
# Common ones first. Not PostScript, say, for which Pillow starts another program.
FORMATS = tuple("JPEG PNG GIF BMP PPM WEBP TIFF DIB TGA JPEG2000 ICO PCX".split())
TIFF_BITS = 258  # the tag: bits of each channel
SAMPLED = 1000  # images of which a fingerprint reads `SAMPLED_BYTES`
SAMPLED_BYTES = 1 << 16


class BadImage(Exception):
    """The data is not an image, or a damaged one."""


class Files:
    """Images in files: `names` (list of str) are paths relative to the folder `root`."""

    def __init__(self, root, names):
        # An array, whose memory the workers of a data loader share. That of Python objects is
        # copied into every worker, because each access changes their reference counts.
        self.place, self._names = f"{root}/", np.array([os.fsencode(name) for name in names], "S")

    def __len__(self):
        return len(self._names)

    def read(self, row, most=None):
        """The bytes of a file: arguments and errors as for `read_regular`."""
        return read_regular(self.place + self.portable_name(row), most)

    def portable_name(self, row):
        """The path in the folder of the data set, which differs between machines."""
        return os.fsdecode(self._names[row])

    @cached_property
    def _stamps(self):
        """The size in bytes and the time of change of each file, int64 [files, 2]; -1: none."""
        paths = [self.place + self.portable_name(row) for row in range(len(self))]
        stamps = [(stamp(path) or (path, -1, -1))[1:] for path in paths]
        return np.array(stamps, dtype=np.int64).reshape(-1, 2)

    @property
    def sizes(self):
        """The size of each file in bytes, int64; -1: there is no such file."""
        return self._stamps[:, 0]

    @cached_property
    def version(self):
        """A value (str) that changes when a file does, for this machine only."""
        digest = hashlib.sha256(os.fsencode(os.path.abspath(self.place)))
        digest.update(self._names.tobytes())
        digest.update(self._stamps.tobytes())
        return digest.hexdigest()


class Rows:
    """Images in the rows of a table.

    Args:
        rows: a `datasets.Dataset` with one column, of bytes or of structs with `bytes`; or a list
            of bytes.
        place (str): names the table in messages.
        version (str): a value that changes when the table does.
    """

    def __init__(self, rows, place, version):
        self._rows, self.place, self.version = rows, f"{place}, ", version

    def __len__(self):
        return len(self._rows)

    def read(self, row, most=None):
        """The first `most` bytes of an image; None: all. Raises ValueError if there is none."""
        value = self._rows[int(row)]
        if not isinstance(value, bytes):
            (value,) = value.values()
        data = value["bytes"] if isinstance(value, dict) else value
        if data is None:
            raise ValueError("the row has no image")
        return data[:most]

    def portable_name(self, row):
        """The row, without the table, which may have another path on each machine."""
        return f"row {row}"

    @cached_property
    def sizes(self):
        """The size of each image in bytes, int64; -1: there is none."""
        if isinstance(self._rows, list):
            return np.array([len(data) for data in self._rows], dtype=np.int64)
        import pyarrow.compute as pc  # here: images in files or arrays do not need it

        column = self._rows.with_format("arrow")[:].column(0)  # all at once: much faster
        if column.type.num_fields:
            column = pc.struct_field(column, "bytes")
        return pc.binary_length(column).fill_null(-1).to_numpy().astype(np.int64)


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
        """The path of an image, or the split and the row in which it is."""
        return self.source.place + self.portable_name(index)

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

    def fingerprint(self):
        """A checksum (str) of names, labels, sizes and data, the same on every machine.

        It has the first `SAMPLED_BYTES` of `SAMPLED` images, at even distances over all: another
        change that keeps the sizes goes unnoticed.
        """
        digest = hashlib.sha256(self.labels.tobytes())
        for row in self.rows.tolist():
            digest.update(os.fsencode(self.source.portable_name(row)) + b"\0")
        digest.update(self.source.sizes[self.rows].tobytes())
        for row in self.subsample(SAMPLED).rows:
            with contextlib.suppress(OSError, ValueError):  # its name is in the checksum
                digest.update(self.source.read(row, SAMPLED_BYTES))
        return digest.hexdigest()


# --------------------------------------------------------------------------------------- decoding


@contextlib.contextmanager
def _readable():
    """Raises BadImage, with one line, instead of any error in the block."""
    try:
        yield
    except (MemoryError, BadImage):
        raise
    except Exception as error:  # the decoders of damaged data raise whatever they stumble over
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        not_an_image = "cannot identify" in reason
        raise BadImage("it is not an image" if not_an_image else reason) from None


class Encoded:
    """An encoded image, of which only the header has been read.

    `width` and `height` are in pixels, after the rotation that its EXIF data asks for.
    """

    @_readable()
    def __init__(self, data):
        """Reads the header of a file in one of the `FORMATS` (bytes).

        Raises BadImage if it is not an image, or has more than 8 bits per channel.
        """
        self._data, image = data, Image.open(io.BytesIO(data), formats=FORMATS)
        if image.format == "PNG" and "exif" not in image.info:
            image.load()  # the EXIF data may be behind the pixels
        if _is_deep(image, data):
            raise BadImage(
                "it has more than 8 bits per channel: convert the data set with the recipe "
                "eight_bits of scripts/recipes/README.md"
            )
        self._image, self._orientation = image, _orientation(image)
        width, height = image.size
        rotated = self._orientation in (5, 6, 7, 8)
        self.width, self.height = (height, width) if rotated else (width, height)

    @_readable()
    def pixels(self, reduction=1):
        """Decodes the image to RGB; what is transparent becomes white.

        Args:
            reduction (int): 1, 2, 4 or 8: decode to 1/reduction of the size, if the format is JPEG.

        Returns:
            uint8 [3, height, width], in channels-last memory format. Raises BadImage if damaged.
        """
        image, is_jpeg = self._image, self._image.format in ("JPEG", "MPO")
        plain = image.mode in ("RGB", "L") and self._orientation == 1
        if is_jpeg and plain and reduction == 1:
            # The same pixels as from Pillow, in two thirds of the time; deprecated in torchvision
            # 0.29. Imported here, which takes almost a second. Pillow says what is damaged, below.
            with contextlib.suppress(ImportError, RuntimeError):
                from torchvision.io import ImageReadMode, decode_jpeg

                data = torch.frombuffer(bytearray(self._data), dtype=torch.uint8)
                return decode_jpeg(data, mode=ImageReadMode.RGB)
        if is_jpeg and reduction > 1:
            image.draft(image.mode, (image.width // reduction, image.height // reduction))
        image = _rgb(ImageOps.exif_transpose(image) if self._orientation != 1 else image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


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


def _rgb(image):
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
