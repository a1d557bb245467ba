"""Lists the files of a data set in a folder, and remembers what it left out.

Links to files and folders are followed. Nothing is opened that is not a regular file.
"""

import os
import stat
from collections import Counter
from pathlib import Path

from utils.data.report import LeftOut
from utils.data.splits import split_of
from utils.run.failures import UserError

# Folders that other programs put beside images: thumbnails, wastebaskets, metadata.
FOREIGN = {
    *"@eadir @__thumb @recycle @recently-snapshot #recycle #snapshot $recycle.bin".split(),
    *"__macosx __pycache__ lost+found".split(),
    "system volume information",
}
THUMBNAILS = {"thumb", "thumbs", "thumbnail", "thumbnails", "_thumbs", "_thumbnails"}
# Images that Pillow does not read.
UNREADABLE = {*".heic .heif .hif .jxl .svg .psd .raw .cr2 .cr3 .nef .arw .dng .orf .rw2".split()}


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


class Scanner:
    """Lists the files with some suffixes in the folders below a root.

    Attributes:
        left_out (LeftOut): everything else that it saw.
    """

    def __init__(self, root, suffixes):
        """
        Args:
            root (Path): the folder of the data set.
            suffixes: with their dot, in lower case.
        """
        self.root, self.left_out = Path(root), LeftOut()
        self._suffixes, self._listed, self._others = suffixes, {}, {}

    def list(self, folder=""):
        """What is directly in a folder.

        Args:
            folder (str): its path relative to the root.

        Returns:
            tuple: files and folders, lists of paths relative to the root, sorted by name.

        Raises:
            UserError: the folder cannot be read, or has a link that leads to itself.
        """
        if folder not in self._listed:
            self._listed[folder] = self._scan(folder)
        return self._listed[folder]

    def below(self, folder=""):
        """All files in a folder and in its sub-folders. Raises UserError as `list` does."""
        return self._below(folder, [self._identity("")] if folder else [])

    def others_below(self, folder):
        """How many files of which other suffixes are in a folder and below it, after `below`."""
        inner = (self.others_below(inside) for inside in self.list(folder)[1])
        return sum(inner, self._others[folder])

    def _below(self, folder, above):
        identity = self._identity(folder)
        if identity in above:
            raise UserError(
                f"the link {self.root / folder} leads to a folder that it is in: remove it"
            )
        files, folders = self.list(folder)
        found = list(files)
        for inside in folders:
            found.extend(self._below(inside, [*above, identity]))
        return found

    def _identity(self, folder):
        status = self._try(lambda: os.stat(self.root / folder))
        return status.st_dev, status.st_ino

    def _scan(self, folder):
        files, folders, others = [], [], Counter()
        prefix = f"{folder}/" if folder else ""
        in_class = folder and not split_of(os.path.basename(folder))
        entries = self._try(lambda: list(os.scandir(self.root / folder)))
        for entry in sorted(entries, key=lambda entry: os.fsencode(entry.name)):
            path = prefix + entry.name
            kind = self._try(lambda entry=entry: _kind(entry))
            plural = "folders" if kind == "folder" else "files"
            suffix = os.path.splitext(entry.name)[1].lower()
            if entry.name.startswith("."):
                self.left_out.add(f"hidden {plural}", path)
            elif kind == "folder":
                lower = entry.name.lower()
                if lower in FOREIGN or (in_class and lower in THUMBNAILS):
                    self.left_out.add("folders of thumbnails or of the system", path)
                else:
                    folders.append(path)
            elif kind == "link" and not suffix:
                raise UserError(f"the link {self.root / path} leads nowhere: remove it")
            elif kind == "special":
                self.left_out.add("devices, FIFOs or sockets", path)
            elif suffix in self._suffixes:
                files.append(path)
            else:
                others[suffix] += 1
                self.left_out.add(_describe(suffix), path)
        self._others[folder] = others
        return files, folders

    def _try(self, function):
        try:
            return function()
        except OSError as error:
            place = error.filename or self.root
            raise UserError(f"cannot read {place}: {error.strerror}") from None


def _kind(entry):
    """Whether a directory entry, or what it links to, is a `folder`, a `file` or `special`.

    `link`: it leads nowhere. By its suffix it is known whether it was one of an image.
    """
    if entry.is_dir():
        return "folder"
    if entry.is_file():
        return "file"
    return "special" if os.path.exists(entry.path) else "link"


def _describe(suffix):
    if not suffix:
        return "files without a suffix"
    if suffix in UNREADABLE:
        return f"{suffix} files, which Pillow cannot read (convert them to JPEG)"
    return f"{suffix} files"
