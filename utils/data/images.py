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
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

ORIENTATION = 0x0112  # the EXIF tag; 5 to 8 exchange width and height


class BadImage(Exception):
    """The data is not an image, or a damaged one."""


# ---------------------------------------------------------------------------------------- sources


class Names:
    """A list of strings in two arrays.

    The workers of a data loader share the memory of arrays. That of Python objects is copied into
    every worker, because each access changes their reference counts.
    """

    def __init__(self, names):
        encoded = [os.fsencode(name) for name in names]
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        self._text = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self):
        return len(self._ends)

    def __getitem__(self, index):
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._text[start : self._ends[index]].tobytes())


class Files:
    """Images in files.

    Args:
        root (Path): the folder of the data set.
        names (list[str]): paths relative to `root`.
    """

    def __init__(self, root, names):
        self.root, self._names = root, Names(names)

    def __len__(self):
        return len(self._names)

    def read(self, row):
        """The bytes of a file. Raises OSError."""
        return (self.root / self._names[row]).read_bytes()

    def name(self, row):
        """The path of a file."""
        return str(self.root / self._names[row])

    def portable_name(self, row):
        """The path relative to the folder of the data set, which differs between machines."""
        return self._names[row]

    def stamp(self, row):
        """A value that changes when the file does."""
        return _stamp(self.root / self._names[row])


class Rows:
    """Images in a column of a table.

    A value of the column is the bytes of an image, the path of a file, or a dict with `bytes` and
    `path`, as the `datasets` library stores images.

    Args:
        rows: a `datasets.Dataset` with no other column, or a list of bytes.
        place (str): names the table in messages.
        version (str): a value that changes when the table does.
        folder (Path | None): relative paths start here; None: in the current folder.
        in_files (bool): whether the column has paths only.
    """

    def __init__(self, rows, place, version, folder=None, in_files=False):
        self._rows, self._place, self._version = rows, place, version
        self._folder, self._in_files = Path(folder or "."), in_files

    def __len__(self):
        return len(self._rows)

    def read(self, row):
        """The bytes of an image. Raises ValueError if there is none."""
        data, path = self._value(row)
        if data is not None:
            return data
        if path is None:
            raise ValueError("the row has no image")
        try:
            return (self._folder / path).read_bytes()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None

    def name(self, row):
        """The row as messages name it."""
        return f"row {row} of {self._place}"

    def portable_name(self, row):
        """The row, without the table, which may have another path on each machine."""
        return f"row {row}"

    def stamp(self, row):
        """A value that changes when the table does, or the file that it names."""
        if not self._in_files:
            return self._version
        path = self._value(row)[1]
        return None if path is None else _stamp(self._folder / path)

    def _value(self, row):
        """Bytes and path of an image; each may be None."""
        value = self._rows[int(row)]
        if isinstance(value, bytes):
            return value, None
        (value,) = value.values()
        if isinstance(value, dict):
            return value.get("bytes"), value.get("path")
        return (None, value) if isinstance(value, str) else (value, None)


def _stamp(path):
    """The path of a file, its size and its time of change; None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return str(path), status.st_size, status.st_mtime_ns


@dataclass
class Images:
    """One split of a data set.

    `source` reads the images. `rows` are their numbers in it and `labels` their classes, both int64
    [samples].
    """

    source: Files | Rows
    rows: np.ndarray
    labels: np.ndarray

    def __len__(self):
        return len(self.rows)

    def open(self, index):
        """Reads an image and its header.

        Returns:
            Encoded.

        Raises:
            BadImage: it cannot be read, or is not an image.
        """
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
        """A checksum of names and labels, the same on every machine.

        Args:
            stamps (bool): include the path, size and time of every file, or the version of the
                table: for this machine only.

        Returns:
            str: hexadecimal.
        """
        digest = hashlib.sha256(self.labels.tobytes())
        for row in self.rows.tolist():
            digest.update(os.fsencode(self.source.portable_name(row)) + b"\0")
            if stamps:
                digest.update(repr(self.source.stamp(row)).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


# --------------------------------------------------------------------------------------- decoding


class Encoded:
    """An encoded image, of which only the header has been read.

    `width` and `height` are in pixels, after the rotation that its EXIF data asks for.
    """

    def __init__(self, data):
        """Reads the header.

        Args:
            data (bytes): a file in any format that Pillow reads.

        Raises:
            BadImage: the data is not an image.
        """
        self._data = data
        self._image = _readable(lambda: Image.open(io.BytesIO(data)))
        self._orientation = _readable(lambda: self._image.getexif().get(ORIENTATION, 1))
        width, height = self._image.size
        rotated = self._orientation in (5, 6, 7, 8)
        self.width, self.height = (height, width) if rotated else (width, height)

    def pixels(self, reduction=1):
        """Decodes the image to RGB; what is transparent becomes white.

        Args:
            reduction (int): 1, 2, 4 or 8: decode to 1/reduction of the size, if the format is JPEG.

        Returns:
            uint8 [3, height, width], in channels-last memory format.

        Raises:
            BadImage: the data is damaged.
        """
        return _readable(lambda: self._pixels(reduction))

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
    if image.mode.startswith("I"):  # 16-bit gray: Pillow's own conversion makes it white
        gray = (np.asarray(image, dtype=np.int64) // 256).clip(0, 255).astype(np.uint8)
        return Image.fromarray(gray).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _readable(decode):
    """Calls `decode()`. Raises BadImage with one line instead of any error."""
    try:
        return decode()
    except MemoryError:
        raise
    except Exception as error:  # the decoders of damaged data raise whatever they stumble over
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        not_an_image = "cannot identify" in reason
        raise BadImage("it is not an image" if not_an_image else reason) from None
