"""Where the images of a data set are: in files, in the rows of a table, or in an array.

Nothing is decoded.
"""

import os
import zlib
from functools import cached_property

import numpy as np

from utils.data.scan import read_regular, stamp


class Files:
    """Images in files: `names` (list of str) are paths relative to the folder `root`."""

    def __init__(self, root, names):
        # An array, whose memory the workers of a data loader share. That of Python objects is
        # copied into every worker, because each access changes their reference counts.
        self.root, self._names = root, np.array([os.fsencode(name) for name in names], np.bytes_)

    def __len__(self):
        return len(self._names)

    def read(self, row, most=None):
        """The bytes of a file: arguments and errors as for `read_regular`."""
        return read_regular(self.name(row), most)

    def name(self, row):
        """The path of a file."""
        return f"{self.root}/{self.portable_name(row)}"

    def portable_name(self, row):
        """The path in the folder of the data set, which differs between machines."""
        return os.fsdecode(self._names[row])

    @cached_property
    def sizes(self):
        """The size of each file in bytes, int64; -1: there is no such file."""
        stamps = map(self.stamp, range(len(self)))
        return np.array([known[1] if known else -1 for known in stamps], dtype=np.int64)

    def stamp(self, row):
        """A value that changes when the file does; None: there is none."""
        return stamp(self.name(row))


class Rows:
    """Images in the rows of a table.

    Args:
        rows: a `datasets.Dataset` with one column, of bytes or of structs with `bytes`; or a list
            of bytes.
        place (str): names the table in messages.
        version (str): a value that changes when the table does.
    """

    def __init__(self, rows, place, version):
        self._rows, self._place, self._version = rows, place, version

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

    def name(self, row):
        """The row as messages name it."""
        return f"row {row} of {self._place}"

    def portable_name(self, row):
        """The row, without the table, which may have another path on each machine."""
        return f"row {row}"

    def stamp(self, row):
        """A value that changes when the table does."""
        return self._version

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

    def checksum(self):
        """A checksum of all images: it takes a fraction of the time in which they were loaded."""
        return f"{self.images.shape} {zlib.crc32(self.images)}"
