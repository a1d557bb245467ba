"""Finds the text of a data set: which files, which of them are for training, and their bytes."""

import bz2
import codecs
import contextlib
import gzip
import io
import json
import lzma
import os
import zlib
from pathlib import Path
from typing import NamedTuple

from utils.data.cache_files import map_bytes
from utils.data.report import LeftOut
from utils.data.scan import Scanner, read_regular
from utils.data.tables import (
    METADATA,
    READERS,
    files_by_split,
    header,
    load_table,
    loading,
    local_path,
)
from utils.data.tables import name_splits as splits_of
from utils.run.failures import UserError
from utils.run.files import regular_file

PLAIN = {".txt", ".text", ".md", ".markdown", ".rst"}  # in a folder; a single file may be any
PAGES = {"readme", "license", "licence", "changelog", "contributing", "notice"}
DECOMPRESS = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ARCHIVES = {".zst", ".zip", ".tar", ".7z", ".rar", ".tgz"}
SAMPLED_FILES, SAMPLED_BYTES = 100, 1 << 16  # of a split, and of each of them
PART = 1 << 20  # bytes of a file that are read at once
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
ALTERNATIVES = (
    "use a Hub id such as karpathy/tiny_shakespeare, a local text file or folder, or "
    "--dataset synthetic"
)


class TextFiles(NamedTuple):
    """The files of a local data set: split -> files, all of one kind; what was left out."""

    by_split: dict
    left_out: LeftOut

    @property
    def is_plain(self):
        """Whether the files are read byte for byte: they are not tables."""
        return suffix_of(self.by_split["train"][0]) not in READERS


def find_files(name, compressed=frozenset()):
    """Finds the files of a local data set.

    A folder may have `train.txt`, `val.txt` and `test.txt`, or folders with such names.

    Args:
        name (str): the value of `--dataset`.
        compressed: suffixes of the tables that are read when compressed, as plain text is.

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
        suffix, inner = path.suffix.lower(), suffix_of(path)
        if suffix in ARCHIVES or (suffix in DECOMPRESS and inner not in {*PLAIN, *compressed}):
            raise UserError(f"--dataset {name} is compressed: unpack it first")
        return TextFiles({"train": [path]}, LeftOut())
    scanner = Scanner(path, {*PLAIN, *READERS, *DECOMPRESS})
    files, left_out = [], scanner.left_out
    for file in scanner.below():
        packed = Path(file).suffix.lower() in DECOMPRESS
        if packed and suffix_of(file) not in {*PLAIN, *compressed}:
            left_out.add("compressed files, other than of text: unpack them", file)
        elif os.path.basename(file) not in METADATA:
            files.append(file)
    files = _of_one_kind(name, files, left_out)
    if not files:
        known = ", ".join([*PLAIN, *READERS])
        raise UserError(f"--dataset {name} holds no file that ends in {known}; {ALTERNATIVES}")
    return TextFiles(files_by_split(path, sorted(files, key=Path)), left_out)


def _of_one_kind(name, files, left_out):
    """Leaves out pages about the data. Raises UserError for files of several formats."""
    tables = [file for file in files if suffix_of(file) in READERS]
    pages = [file for file in files if _is_page(file, tables)]
    if len(pages) == len(files):
        return files
    for file in pages:
        left_out.add("pages about the data", file)
    used = [file for file in files if file not in pages]
    formats = {(suffix_of(file) if file in tables else "text"): file for file in reversed(used)}
    if len(formats) > 1:
        first, second = sorted(formats.values())[:2]
        raise UserError(
            f"--dataset {name} holds both {first} and {second}: give files "
            "of one format, or one file"
        )
    return used


def _is_page(file, tables):
    stem, suffix = os.path.splitext(os.path.basename(file).lower())
    if tables:
        return suffix in PLAIN - {".txt", ".text"}
    return suffix in PLAIN and stem in PAGES


def suffix_of(file):
    """The suffix in lower case; of a compressed file, that of its content."""
    path = Path(file)
    if path.suffix.lower() in DECOMPRESS:
        path = path.with_suffix("")
    return path.suffix.lower()


def read_text(path):
    """The bytes of a file, decompressed; UTF-16 becomes UTF-8.

    Raises:
        UserError: it cannot be read.
    """
    try:
        data = read_regular(path)
        decompress = DECOMPRESS.get(path.suffix.lower())
        data = decompress(data) if decompress else data
        return data.decode("utf-16").encode() if data.startswith(UTF16) else data
    except (OSError, EOFError, lzma.LZMAError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from None


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
    """Opens a file of text, decompressed; UTF-16 becomes UTF-8. The object can seek."""
    opener = OPENERS.get(Path(path).suffix.lower(), open)
    file = opener(regular_file(path), "rb")
    if file.read(2) in UTF16:
        file.close()
        return io.BytesIO(read_text(path))
    file.seek(0)
    return file


def read_parts(path):
    """Yields parts of what `read_text` returns, without a byte order mark; raises as it does."""
    with reading(path), open_text(path) as file:
        data = file.read(PART).removeprefix(codecs.BOM_UTF8)
        while data:
            yield data
            data = file.read(PART)


def map_text(path):
    """The parts of `read_parts`, uint8 [bytes], mapped into memory; None: the file has other bytes.

    Raises:
        UserError: it cannot be read.
    """
    with reading(path):
        file = regular_file(path)
        with file.open("rb") as opened:
            start = opened.read(len(codecs.BOM_UTF8))
        if Path(path).suffix.lower() in DECOMPRESS or start.startswith(UTF16):
            return None
        return map_bytes(file)[3 if start == codecs.BOM_UTF8 else 0 :]


def samples(files):
    """What a checksum of large `TextFiles` reads: names, sizes, and the first bytes of some files.

    Returns:
        list[bytes].
    """
    known = []
    for split, some in files.by_split.items():
        known.append(repr([(split, file.name, file.stat().st_size) for file in some]).encode())
        distance = max(1, len(some) // SAMPLED_FILES)
        known += [read_regular(file, SAMPLED_BYTES) for file in some[::distance]]
    return known


def stamp(path):
    """The path of a file, its size and its time of change."""
    status = os.stat(path)
    return [str(Path(path).resolve()), status.st_size, status.st_mtime_ns]


# ------------------------------------------------------------------------------------------- rows


class TextTable(NamedTuple):
    """Rows with a column of text: split -> rows of a data set of the `datasets` library.

    `lines`: each row is a line of JSON. The reader of the library would turn texts that look like
    dates into dates.
    """

    splits: dict
    column: str
    lines: bool
    left_out: LeftOut

    def documents(self, rows, where, failure=UserError):
        """Yields the texts of rows, encoded.

        Raises:
            UserError: of the type `failure`: a row has no text. `where` names the data set.
        """
        for number, row in enumerate(rows):
            if not self.lines:
                text = row[self.column]
            elif row["text"].strip("\ufeff \t\r"):
                value = parse_line(row["text"], number, where, failure)
                text = value.get(self.column) if isinstance(value, dict) else value
            else:
                continue
            yield encode(text, number, where, failure)


def load_column(name, column, files, streaming=False):
    """Loads a table that has a column of text.

    Args:
        name, streaming: as for `tables.load_table`.
        column (str): the column.
        files (TextFiles | None): what `find_files` returned.

    Returns:
        TextTable: with the split `train`.

    Raises:
        UserError: it cannot be loaded, or has no such column.
    """
    by_split, lines, columns, options = files and files.by_split, False, None, {}
    if files:
        first = by_split["train"][0]
        reader = READERS.get(suffix_of(first))
        if reader == "json" and (row := first_object(first)):
            lines, columns, options = True, list(row), {"reader": "text"}
        elif reader == "json" and (tables := _read_column(by_split, column, streaming)):
            return TextTable(tables, column, False, files.left_out)
        elif reader == "csv":
            columns = header(first)
            # 007 and NA are text. All columns: with `usecols`, pandas cuts off longer rows.
            options = dict(converters=dict.fromkeys(columns, str), keep_default_na=False)
    _check_column(name, column, columns)
    tables = load_table(
        name, files=by_split, streaming=streaming, alternatives=ALTERNATIVES, **options
    )
    left_out = files.left_out if files else LeftOut()
    splits = splits_of(name, tables, left_out)
    if "train" not in splits:
        raise UserError(
            f"--dataset {name} has no train split, only {', '.join(tables)}; {ALTERNATIVES}"
        )
    train = splits["train"]
    if columns is None:
        with loading(name, ALTERNATIVES):  # a stream may know its columns only with its first row
            columns = train.column_names or list(next(iter(train), {column: None}))
        _check_column(name, column, columns)
    return TextTable(splits, column, lines, left_out)


def _check_column(name, column, columns):
    """Raises UserError if a table has no such column; `columns` None: they are not known yet."""
    if columns is not None and column not in columns:
        listed = ", ".join(columns)
        raise UserError(
            f"--dataset {name} has no column {column}: give --text_column, one of {listed}"
        )


def first_object(path):
    """The object in the first line of a file, if it holds JSON Lines; None if not."""
    opener = OPENERS.get(Path(path).suffix.lower(), open)
    with loading(path, ALTERNATIVES), opener(path, "rt", encoding="utf-8-sig") as file:
        line = next((line for line in file if line.strip()), "")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_arrays(by_split):
    """Files that each hold a list of objects as one JSON text: split -> rows; None: they do not."""
    tables = {}
    for split, some in by_split.items():
        rows = []
        for path in some:
            try:
                rows += json.loads(read_text(path))
            except (ValueError, TypeError, RecursionError):  # not JSON, or not a list
                return None
        if not rows or not all(isinstance(row, dict) for row in rows):
            return None
        tables[split] = rows
    return tables


def _read_column(by_split, column, streaming):
    """The column of files as `read_arrays` reads them, as tables; None: they are others."""
    import datasets  # here, because it takes a second

    found, tables = read_arrays(by_split), {}
    for split, rows in (found or {}).items():
        path = by_split[split][-1]
        _check_column(path, column, list(rows[0]))
        texts = [row.get(column) for row in rows]
        for number, text in enumerate(texts):
            encode(text, number, f"--dataset {path}")
        table = datasets.Dataset.from_dict({column: texts})
        shards = min(8, len(rows))
        tables[split] = table.to_iterable_dataset(num_shards=shards) if streaming else table
    return tables or None


def parse_line(line, number, where, failure):
    """The value in a line of JSON. Raises `failure` if it is none; `where` names the data set."""
    try:
        return json.loads(line.lstrip("\ufeff"))
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)  # without a line of its own count
        raise failure(f"row {number} of {where} is not JSON: {reason}") from None


def encode(text, number, where, failure=UserError):
    """The bytes of a row, without a byte order mark. Raises `failure` if it is not text."""
    if not isinstance(text, str):
        raise failure(f"row {number} of {where} is not text but {type(text).__name__}")
    try:
        return text.removeprefix("\ufeff").encode()
    except UnicodeEncodeError:  # half of a pair, as in "\ud800"
        raise failure(f"row {number} of {where} is not valid Unicode") from None
