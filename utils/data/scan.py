"""Lists the files of a data set in a folder, and remembers what it left out.

Links to files and folders are followed. Nothing is opened that is not a regular file.
"""

import os
import stat

from utils.run.failures import UserError
from utils.run.output import one_line

# Folders that other programs put beside images: thumbnails, wastebaskets, metadata.
FOREIGN = {
    *"@eadir @__thumb @recycle @recently-snapshot #recycle #snapshot $recycle.bin".split(),
    *"__macosx __pycache__ lost+found".split(),
    "system volume information",
}
# Images that Pillow does not read everywhere.
UNREADABLE = {".heic", ".heif", ".avif", ".jxl", ".svg", ".raw", ".dng"}


class LeftOut:
    """What was found in a data set and is not used, by kind."""

    def __init__(self):
        self._kinds = {}  # kind -> [count, an example]

    def add(self, kind, example, count=1):
        """Counts `count` more of a kind.

        Args:
            kind (str): what they are, in the plural.
            example (str): the path of one of them; the first that is given is shown.
        """
        self._kinds.setdefault(kind, [0, example])[0] += count

    def lines(self, heading="left out"):
        """One line for each kind."""
        return [
            f"{heading}: {kind}: {count:,} ({one_line(example)})"
            for kind, (count, example) in sorted(self._kinds.items())
        ]


def read_regular(path, most=None):
    """The first `most` bytes of a regular file, or of one that a link leads to; None: all.

    Raises:
        OSError: there is none, it cannot be read, or it is a device, a FIFO or a socket, of which
            nothing is read.
    """
    # Without O_NONBLOCK, opening a FIFO waits until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, "not a regular file", str(path))
        return file.read(most)


def stamp(path):
    """The path of a file, its size and its time of change; None if there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    return os.path.abspath(path), status.st_size, status.st_mtime_ns


def scan(root, suffixes):
    """Lists the files in a folder (Path) and in all folders below it.

    Args:
        suffixes: of the files that are wanted, with their dot, in lower case.

    Returns:
        tuple: the wanted files, and the other ones, lists of paths relative to the root, sorted by
        name, a folder's files before its sub-folders; everything that is not wanted, a `LeftOut`.

    Raises:
        UserError: a folder cannot be read, or a link leads nowhere, or to a folder that it is in.
    """
    files, others, left_out = [], [], LeftOut()

    def visit(folder, above):
        here, folders = os.path.realpath(root / folder), []
        if here in above:
            raise UserError(f"the link {root / folder} leads to a folder that it is in: remove it")
        entries = sorted(os.scandir(here), key=lambda entry: os.fsencode(entry.name))
        for entry in entries:
            path = os.path.join(folder, entry.name)
            suffix = os.path.splitext(entry.name)[1].lower()
            if entry.name.startswith("."):
                left_out.add("hidden files and folders", path)
            elif entry.is_dir() and entry.name.lower() in FOREIGN:
                left_out.add("folders of thumbnails or of the system", path)
            elif entry.is_dir():
                folders.append(path)
            elif entry.is_file():
                if suffix in suffixes:
                    files.append(path)
                    continue
                others.append(path)
                kind = f"{suffix} files" if suffix else "files without a suffix"
                advice = " (convert them to JPEG)" if suffix in UNREADABLE else ""
                left_out.add(kind + advice, path)
            elif os.path.exists(entry.path):
                left_out.add("devices, FIFOs or sockets", path)
            else:
                raise UserError(f"the link {root / path} leads nowhere: remove it")
        for inside in folders:
            visit(inside, [*above, here])

    try:
        visit("", [])
    except OSError as error:
        raise UserError(f"cannot read {error.filename or root}: {error.strerror}") from None
    return files, others, left_out
