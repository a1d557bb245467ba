"""Finds the files of a data set of text: which of them are for training; opens them."""

import bz2
import codecs
import contextlib
import gzip
import lzma
import os
import zlib
from pathlib import Path
from typing import NamedTuple

from utils.data.cache_files import map_bytes
from utils.data.report import LeftOut
from utils.data.scan import Scanner, read_regular
from utils.data.tables import METADATA, READERS, files_by_split, local_path
from utils.run.failures import UserError
from utils.run.files import regular_file

MARKUP = {".md", ".markdown", ".rst"}  # beside tables, pages about the data
PLAIN = {".txt", ".text", *MARKUP}  # in a folder; a single file may be any
PAGES = {"readme", "license", "licence", "changelog", "contributing", "notice"}
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSED = {*PLAIN, ".jsonl", ".ndjson"}  # read when compressed
ARCHIVES = {".zst", ".zip", ".tar", ".7z", ".rar", ".tgz"}
SAMPLED_FILES, SAMPLED_BYTES = 100, 1 << 16  # of a split, and of each of them
PART = 1 << 20  # bytes of a file that are read at once
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
ALTERNATIVES = "use a Hub id, a local file or folder, or --dataset synthetic"


class TextFiles(NamedTuple):
    """The files of a local data set: split -> files, all of one kind; what was left out."""

    by_split: dict
    left_out: LeftOut

    @property
    def is_plain(self):
        """Whether the files are read byte for byte: they are not tables."""
        return suffix_of(self.by_split["train"][0]) not in READERS


def find_files(name):
    """Finds the files of a local data set.

    A folder may have `train.txt`, `val.txt` and `test.txt`, or folders with such names.

    Args:
        name (str): the value of `--dataset`.

    Returns:
        TextFiles | None: None: `name` may be a Hub id.

    Raises:
        UserError: there is no such path, or its files cannot be read as one text.
    """
    path = local_path(name, ALTERNATIVES)
    if path is None:
        return None
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"--dataset {name} is not a regular file; {ALTERNATIVES}")
        if path.suffix.lower() in ARCHIVES or _is_packed_table(path):
            raise UserError(f"--dataset {name} is compressed: unpack it first")
        return TextFiles({"train": [path]}, LeftOut())
    scanner = Scanner(path, {*PLAIN, *READERS, *OPENERS})
    files, left_out = [], scanner.left_out
    for file in scanner.below():
        if _is_packed_table(file):
            left_out.add("compressed files, other than of text: unpack them", file)
        elif os.path.basename(file) not in METADATA:
            files.append(file)
    files = _without_pages(files, left_out)
    kinds = {}
    for file in files:
        kinds.setdefault(suffix_of(file) if suffix_of(file) in READERS else "text", file)
    if not kinds:
        endings = ", ".join([*PLAIN, *READERS])
        raise UserError(f"--dataset {name} holds no file that ends in {endings}; {ALTERNATIVES}")
    if len(kinds) > 1:
        first, second, *_ = sorted(kinds.values())
        raise UserError(
            f"--dataset {name} holds both {first} and {second}: give files of one format, or one "
            "file"
        )
    return TextFiles(files_by_split(path, sorted(files, key=Path)), left_out)


def _is_packed_table(file):
    return Path(file).suffix.lower() in OPENERS and suffix_of(file) not in COMPRESSED


def _without_pages(files, left_out):
    """The files without pages about the data, such as README.md, unless there is nothing else."""
    has_tables = any(suffix_of(file) in READERS for file in files)
    used, pages = [], []
    for file in files:
        stem, suffix = os.path.splitext(os.path.basename(file).lower())
        is_page = suffix in MARKUP if has_tables else suffix in PLAIN and stem in PAGES
        kind = pages if is_page else used
        kind.append(file)
    if not used:
        return files
    for file in pages:
        left_out.add("pages about the data", file)
    return used


def suffix_of(file):
    """The suffix in lower case; of a compressed file, that of its content."""
    path = Path(file)
    if path.suffix.lower() in OPENERS:
        path = path.with_suffix("")
    return path.suffix.lower()


@contextlib.contextmanager
def reading(path):
    """Raises UserError, which names the file, if it cannot be read in the block."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else reason
        raise UserError(f"cannot read {path}: {reason}") from None


def open_text(path):
    """Opens a file of text, decompressed. The object yields bytes, and can seek.

    Raises:
        UserError: it is UTF-16.
        OSError: it cannot be opened.
    """
    opener = OPENERS.get(Path(path).suffix.lower(), open)
    file = opener(regular_file(path), "rb")
    if file.read(2) in UTF16:
        file.close()
        raise UserError(f"{path} is UTF-16: convert it to UTF-8, as with iconv -f UTF-16 -t UTF-8")
    file.seek(0)
    return file


def read_parts(path):
    """Yields the bytes of a text in parts, decompressed and without a byte order mark.

    Raises:
        UserError: it cannot be read.
    """
    with reading(path), open_text(path) as file:
        data = file.read(PART).removeprefix(codecs.BOM_UTF8)
        while data:
            yield data
            data = file.read(PART)


def map_text(path):
    """What `read_parts` yields, uint8 [bytes], mapped into memory; None of a compressed file.

    Raises:
        UserError: it cannot be read.
    """
    if Path(path).suffix.lower() in OPENERS:
        return None
    with reading(path):
        with open_text(path) as file:
            start = file.read(len(codecs.BOM_UTF8))
        text = map_bytes(regular_file(path))
    return text[len(start) :] if start == codecs.BOM_UTF8 else text


def samples(files):
    """What a checksum of large `TextFiles` reads: names, sizes, and the first bytes of some files.

    Returns:
        list[bytes].
    """
    parts = []
    for split, paths in files.by_split.items():
        sizes = [(split, file.name, file.stat().st_size) for file in paths]
        parts.append(repr(sizes).encode())
        distance = max(1, len(paths) // SAMPLED_FILES)
        parts += [read_regular(file, SAMPLED_BYTES) for file in paths[::distance]]
    return parts
