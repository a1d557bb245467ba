"""Where the images of a data set are: in files, in the rows of a table, or in an array.

Nothing is decoded.
"""

import os
import zlib
from functools import cached_property
from pathlib import Path

import numpy as np

from utils.data.scan import read_regular, stamp


class Files:
    """Images in files.

    Args:
        root (Path): the folder of the data set.
        names (list[str]): paths relative to `root`.
    """

    def __init__(self, root, names):
        # An array, whose memory the workers of a data loader share. That of Python objects is
        # copied into every worker, because each access changes their reference counts.
        self.root, self._names = root, np.array([os.fsencode(name) for name in names], np.bytes_)

    def __len__(self):
        return len(self._names)

    def read(self, row, *part):
        """The bytes of a file, or a part of them: arguments and errors as for `read_regular`."""
        return read_regular(self.name(row), *part)

    def name(self, row):
        """The path of a file."""
        return f"{self.root}/{self.portable_name(row)}"

    def portable_name(self, row):
        """The path relative to the folder of the data set, which differs between machines."""
        return os.fsdecode(self._names[row])

    @cached_property
    def sizes(self):
        """The size of each file in bytes, int64; -1: there is no such file."""
        return _sizes(map(self.name, range(len(self))))

    def stamp(self, row):
        """A value that changes when the file does."""
        return stamp(Path(self.name(row)))


class Rows:
    """Images in a column of a table.

    A value of the column is the bytes of an image, the path of a file, or a dict with `bytes` and
    `path`, as the `datasets` library stores images.

    Args:
        rows: a `datasets.Dataset` with no other column, or a list of bytes.
        place (str): names the table in messages.
        version (str): a value that changes when the table does.
        folder (Path | None): relative paths start here and stay here; None: no file is read, but
            those in `allowed`.
        in_files (bool): whether the column has paths only.
        allowed (tuple | None): other folders in which files may be. The rows of somebody else's
            table must not name any file of this machine, whose image could end up in a published
            plot. None: absolute paths may name any file, in a list that a person wrote.
    """

    def __init__(self, rows, place, version, folder=None, in_files=False, allowed=()):
        self._rows, self._place, self._version = rows, place, version
        self._folder, self._in_files = Path(os.path.abspath(folder or ".")), in_files
        self._anywhere = allowed is None
        folders = [os.path.abspath(path) for path in allowed or ()]
        folders += [os.path.abspath(folder)] if folder else []
        self._allowed = {*folders, *map(os.path.realpath, folders)}

    def __len__(self):
        return len(self._rows)

    def read(self, row, *part):
        """The bytes of an image, or a part of a file, as for `Files`. ValueError: there is none."""
        data, path = self._value(row)
        if data is not None:
            return data
        if path is None:
            raise ValueError("the row has no image")
        try:
            return read_regular(self._file(path), *part)
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
        return None if path is None else stamp(self._folder / path)

    @cached_property
    def sizes(self):
        """The size of each image in bytes, int64; -1: there is none."""
        if isinstance(self._rows, list):
            return np.array([len(data) for data in self._rows], dtype=np.int64)
        column = self._rows.with_format("arrow")[:].column(0)  # all at once: much faster
        if self._in_files:
            return _sizes(path and self._folder / path for path in self.paths())
        lengths = [_lengths(chunk) for chunk in column.chunks if len(chunk)]
        return np.concatenate(lengths).astype(np.int64)

    def paths(self):
        """The path in each row, as a list of str or None; None if the rows have images instead."""
        if not self._in_files:
            return None
        return list(map(_path_in, self._rows.with_format("arrow")[:].column(0).to_pylist()))

    def _file(self, path):
        """The file that a row names. Raises ValueError if it is in no folder that is allowed."""
        file = Path(os.path.normpath(self._folder / path))
        if self._anywhere and os.path.isabs(path):
            return file
        if not any(file.is_relative_to(folder) for folder in self._allowed):
            raise ValueError(f"{path} is not in the folder of the table")
        return file

    def _value(self, row):
        """Bytes and path of an image; each may be None."""
        value = self._rows[int(row)]
        if isinstance(value, bytes):
            return value, None
        (value,) = value.values()
        data = value.get("bytes") if isinstance(value, dict) else value
        return (None, _path_in(value)) if data is None or isinstance(data, str) else (data, None)


class Pixels:
    """Images in an array.

    Args:
        images: uint8 array [images, height, width, 3].
        place (str): names it in messages.
        version (str): a value that changes when its file does.
    """

    def __init__(self, images, place, version):
        self.images, self._place, self._version = images, place, version

    def __len__(self):
        return len(self.images)

    def read(self, row, most=-1):
        """An image as a PPM file, which has its values as they are; or the first `most` bytes."""
        _, height, width, _ = self.images.shape
        data = b"P6 %d %d 255\n" % (width, height) + self.images[int(row)].tobytes()
        return data if most < 0 else data[:most]

    def name(self, row):
        """The number of an image, and where it is."""
        return f"image {row} of {self._place}"

    def portable_name(self, row):
        """The number of an image."""
        return f"row {row}"

    def stamp(self, row):
        """A value that changes when the file of the array does."""
        return self._version

    @property
    def sizes(self):
        """The size of each image in bytes, int64."""
        return np.full(len(self), self.images[0].nbytes)

    def checksum(self):
        """A checksum of all images: it takes a fraction of the time in which they were loaded."""
        return f"{self.images.shape} {zlib.crc32(self.images)}"


def _path_in(value):
    """The path in a value of a column, also if Windows wrote it; None: there is none."""
    path = value["path"] if isinstance(value, dict) else value
    return os.path.normpath(path.replace("\\", "/")) if path else None


def _lengths(values):
    """The length of each value in an Arrow array of bytes, or of a struct with `bytes`."""
    if hasattr(values, "field"):
        values = values.field("bytes")
    kind = np.int64 if "large" in str(values.type) else np.int32
    offsets = np.frombuffer(values.buffers()[1], kind)  # nothing is copied
    return np.diff(offsets[values.offset : values.offset + len(values) + 1])


def _sizes(paths):
    """The sizes of files, int64; -1 where there is none."""
    return np.array([_size(path) for path in paths], dtype=np.int64)


def _size(path):
    try:
        return os.stat(path).st_size if path else -1
    except (OSError, ValueError):
        return -1
