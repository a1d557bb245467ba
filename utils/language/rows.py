"""Opens a data set of text: rows of a Hub id, JSON Lines, Parquet or CSV, or plain text."""

import contextlib
import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from utils.data.scan import LeftOut, read_regular, scan, stamp
from utils.data.tables import (
    METADATA,
    READERS,
    files_by_split,
    load_table,
    loading,
    local_path,
    name_splits,
)
from utils.run.failures import UserError
from utils.run.output import plural

PLAIN = ".txt"  # in a folder; a single file may be any
COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".7z", ".rar", ".tgz"}
SAMPLED_FILES, SAMPLED_BYTES = 100, 1 << 16  # of a stream, and of each of them
SHORT, SAMPLED_PARTS = 1 << 26, 100  # bytes: of a longer text, a checksum reads some parts
SHARD_ROWS, FILE_SHARDS = 25_000, 100  # of a shard of a table; most shards of plain files
ALTERNATIVES = "use a Hub id, a local file or folder, or --dataset synthetic"


@dataclass(frozen=True)
class Rows:
    """The rows of a split; iterating over them yields dicts.

    rows: a list, or a table of the `datasets` library, in memory or as a stream. Of plain text,
        the column `text` of each has the path of a file.
    where (str): names them, in messages.
    fingerprint (str): changes with their content; of a local stream, with names and sizes, too.
    is_lines (bool): the column `text` of each has a line of JSON. The reader of the library would
        turn texts into dates, and refuse a key that few rows have.
    first (int): the number of the first one.
    shard_size (int): how many of them one process tokenizes at a time.
    """

    rows: object
    where: str
    fingerprint: str = ""
    is_lines: bool = False
    first: int = 0
    shard_size: int = SHARD_ROWS

    @property
    def in_memory(self):
        """Whether the rows are a list, as those of plain text are."""
        return isinstance(self.rows, list)

    def __len__(self):
        return len(self.rows)

    def shards(self):
        """The rows (list of `Rows`) of each shard, in their order; not of a stream."""
        shards = []
        for first in range(0, len(self) or 1, self.shard_size):
            chosen = range(first, min(first + self.shard_size, len(self)))
            rows = self.rows[first : chosen.stop] if self.in_memory else self.rows.select(chosen)
            shards.append(replace(self, rows=rows, first=first))
        return shards

    def __iter__(self):
        for number, row in enumerate(self.rows, self.first):
            if self.in_memory:
                yield row
            elif not self.is_lines:
                yield {key: _without_nulls(value) for key, value in row.items()}
            elif line := row["text"].strip("\ufeff \t\r"):
                yield self._parse(line, number)

    def _parse(self, line, number):
        try:
            value, reason = json.loads(line), "make lines of a list with `jq -c .[]`"
        except (ValueError, RecursionError) as error:
            value, reason = None, getattr(error, "msg", error)  # without a line of its own count
        if not isinstance(value, dict):
            raise UserError(f"row {number} of {self.where} is not an object in JSON: {reason}")
        return value


def _without_nulls(value):
    """A value of a row without null fields: a table has the fields of all rows in each of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@contextlib.contextmanager
def reading(name):
    """Raises UserError, which names the file, if it cannot be read in the block."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error.strerror
        raise UserError(f"cannot read {name}: {reason}") from None


# --------------------------------------------------------------------------------------- opening


class Table(NamedTuple):
    """The rows of a data set.

    splits: dict of `Rows`, those that are used.
    kind: what they are, by their columns.
    details: lines about all splits and what was left out; none about a stream.
    """

    splits: dict
    kind: str
    details: list


def open_rows(name, kinds, needs, *, use=(("train",), ("val",)), subset=None, streaming=False):
    """Opens the rows of a data set, as a `Table`.

    Args:
        name (str): the value of `--dataset`: a Hub id, a file or a folder.
        kinds (dict): kind -> the columns that it has (tuple); the first that fits is that of a
            table, of which these are read, and `tools`. Plain text has the kind `text`.
        needs (str): what a table needs, for messages.
        use (tuple): groups of splits: of each, the first that the data has is used.
        subset (str | None): a configuration of a Hub id.
        streaming (bool): read rows as they are needed, instead of all of them now.

    Raises:
        UserError: it cannot be found or read, or has no known kind.
    """
    files, left_out = _find_files(name)
    if files and subset is not None:
        raise UserError(f"--subset {subset}: only a Hub id has subsets, and --dataset is local")
    is_plain = files is not None and files["train"][0].suffix.lower() not in READERS
    if streaming and (is_plain or name == "synthetic"):
        raise UserError(f"--dataset {name} is mapped into memory: leave out --streaming")
    if is_plain:
        opened = {}
        for split, paths in files.items():
            rows, size = [{"text": path} for path in paths], -(-len(paths) // FILE_SHARDS)
            version = repr([*map(stamp, paths)])
            opened[split] = Rows(rows, f"--dataset {name}", version, shard_size=size)
        return _table(opened, "text", use, left_out)
    is_lines = files is not None and READERS[files["train"][0].suffix.lower()] == "json"
    options = dict(subset=subset, streaming=streaming, alternatives=ALTERNATIVES)
    splits = load_table(name, files=files, as_lines=is_lines, **options)
    tables = name_splits(name, splits, left_out)
    if "train" not in tables:
        raise UserError(
            f"--dataset {name} has no train split, only {', '.join(splits)}; {ALTERNATIVES}"
        )
    sample, opened = _sample(files) if streaming and files else "", {}
    for split, table in tables.items():
        version = sample if streaming else table._fingerprint
        opened[split] = Rows(table, f"--dataset {name} ({split})", version, is_lines)
    with loading(name, ALTERNATIVES):
        # Lines have the columns of the first one, and a stream may know its own only then.
        train = opened["train"] if is_lines else tables["train"]
        columns = getattr(train, "column_names", None) or list(next(iter(train), {}))
    kind = next((kind for kind, fields in kinds.items() if set(fields) <= set(columns)), None)
    if kind is None:
        listed = ", ".join(map(str, columns)) or "none"
        raise UserError(f"--dataset {name} has the columns {listed}; one needs {needs}")
    if not is_lines:
        read = {*kinds[kind], "tools"} & {*columns}
        for split, table in tables.items():
            names = [name for name in table.column_names or read if name in read]
            opened[split] = replace(opened[split], rows=table.select_columns(names))
    return _table(opened, kind, use, None if streaming else left_out)


def _table(opened, kind, use, left_out):
    """The `Table` of the splits that are used, of those that were opened (dict)."""
    present = ([split for split in group if split in opened] for group in use)
    splits, details = {names[0]: opened[names[0]] for names in present if names}, []
    if left_out is not None:
        for split, rows in opened.items():
            name = split if split in splits else f"{split}, not used"
            details.append(f"{name}: {plural(len(rows), 'file' if rows.in_memory else 'row')}")
        details += left_out.lines()
    return Table(splits, kind, details)


def _sample(files):
    """A checksum of names, sizes and first bytes of the files of a stream."""
    files = [(split, file) for split, paths in files.items() for file in paths]
    sizes = [(split, file.name, file.stat().st_size) for split, file in files]
    chosen = files[:: max(1, len(files) // SAMPLED_FILES)]
    heads = [read_regular(file, SAMPLED_BYTES) for _, file in chosen]
    return hashlib.sha256(b"".join([repr(sizes).encode(), *heads])).hexdigest()


def _find_files(name):
    """Finds the files of a local data set, all of one kind.

    A folder may have `train.txt`, `val.txt` and `test.txt`, or folders with such names.

    Returns:
        tuple: split -> files (dict), None if `name` may be a Hub id; a `LeftOut`.

    Raises:
        UserError: there is no such path, or its files are not of one kind.
    """
    path = local_path(name, ALTERNATIVES)
    if path is None:
        return None, LeftOut()
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"--dataset {name} is not a regular file; {ALTERNATIVES}")
        if path.suffix.lower() in COMPRESSED:
            raise UserError(f"--dataset {name} is compressed: unpack it first")
        return {"train": [path]}, LeftOut()
    entries, _, left_out = scan(path, {PLAIN, *READERS})
    files, kinds = [file for file in entries if Path(file).name not in METADATA], {}
    for file in files:
        suffix = Path(file).suffix.lower()
        kinds.setdefault(suffix if suffix in READERS else "text", file)
    if not kinds:
        endings = ", ".join([PLAIN, *READERS])
        raise UserError(f"--dataset {name} holds no file that ends in {endings}; {ALTERNATIVES}")
    if len(kinds) > 1:
        first, second, *_ = sorted(kinds.values())
        raise UserError(
            f"--dataset {name} holds both {first} and {second}: give files of one format, or one "
            "file"
        )
    return files_by_split(path, sorted(files, key=Path)), left_out


def check_unicode(text, where):
    """Raises UserError for half of a pair, as in "\\ud800"; `where` names the row."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} is not valid Unicode") from None


def checksum(*texts):
    """A short checksum of texts (bytes, or uint8 arrays); of a long one, of its size and a sample.

    So it takes the same time for any size.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        distance = SAMPLED_BYTES if len(text) <= SHORT else len(text) // SAMPLED_PARTS
        for start in range(0, len(text), distance):
            digest.update(text[start : start + SAMPLED_BYTES])
    return digest.hexdigest()[:12]
