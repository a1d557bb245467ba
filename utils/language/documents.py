"""Finds the documents of a data set for a language model: conversations, prompts or texts."""

import codecs
import hashlib
import os
from typing import NamedTuple

from utils.data.scan import stamp
from utils.data.tables import local_path
from utils.language.rows import Rows, open_rows, stream_of
from utils.language.synthetic import make_conversations
from utils.language.text_files import ALTERNATIVES, find_files, open_text, reading
from utils.run.failures import UserError

SEGMENT = 250_000  # bytes of a file that are read at once
LINE_END = 10_000  # bytes in which a held-out part begins after a line break
KINDS = {"messages": ("messages",), "prompt": ("prompt", "completion"), "text": ("text",)}
WANTED = "messages (role and content), prompt and completion, or text"


class Documents(NamedTuple):
    """The documents of a data set.

    splits: dict, split -> `Rows` or `Files`: dicts. `train`, and `val` or else `test` if the data
        has one; if not, a part of `train` is to be held out.
    kind: `messages`, `prompt` or `text`: the columns of each row.
    details: lines about where the documents are from, and what was left out.
    """

    splits: dict
    kind: str
    details: list

    @property
    def asked(self):
        """How the model is asked, as `kind`: `messages` also for prompts that are conversations."""
        if self.kind != "prompt":
            return self.kind
        prompts = (row.get("prompt") for row in self.splits["train"] if row)
        first = next((prompt for prompt in prompts if prompt is not None), "")
        return "prompt" if isinstance(first, str) else "messages"


class Files(NamedTuple):
    """Files of plain text, each of which is a document.

    `parts`: tuples of a path, and of the first byte and the one behind the last (None: its end).
    """

    parts: list
    where: str

    @property
    def fingerprint(self):
        """Changes with the files."""
        parts = [[*stamp(path), limits] for path, *limits in self.parts]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def __len__(self):
        return len(self.parts)

    def __iter__(self):
        for path, start, stop in self.parts:
            yield {"text": _segments(path, start, stop)}


def find_documents(name, *, subset=None, val_fraction=0.1, seed=0):
    """Finds the documents of a data set. Its columns decide what they are.

    Args:
        name (str): a Hub id, a file, a folder, or `synthetic`: dates in words, to be written in
            ISO 8601. A file of plain text is one document.
        subset (str | None): a configuration of a Hub id.
        val_fraction (float): of a single text without a split `val` or `test`, the last part that
            is held out.
        seed (int): of `synthetic`.

    Returns:
        Documents.

    Raises:
        UserError: they cannot be found or read, or have no columns of a known kind.
    """
    if name == "synthetic":
        splits = {}
        for split, rows in make_conversations(seed).items():
            where = f"--dataset synthetic ({split})"
            splits[split] = Rows(rows, where, f"{split} of dates {seed}")
        return Documents(splits, "messages", [])
    files = _find_files(name, subset)
    if files and files.is_plain:
        kind, splits, left_out = "text", {}, files.left_out
        for split, paths in files.by_split.items():
            splits[split] = Files([(path, 0, None) for path in paths], f"--dataset {name}")
    else:
        kind, splits, left_out = _open_table(name, files, subset)
    if "val" in splits and "test" in splits:
        left_out.add("rows or files of the test split", name, len(splits.pop("test")))
    details = [_describe(split, rows) for split, rows in splits.items()]
    if len(splits) == 1 and len(splits["train"]) == 1 and val_fraction:
        if not files or not files.is_plain:
            raise UserError(
                f"--dataset {name} has one row: none is left to hold out for evaluation"
            )
        splits = _cut(name, splits["train"], val_fraction)
        details.append(f"val: the last {val_fraction:g} of the only document")
    return Documents(splits, kind, [*details, *left_out.lines()])


def open_documents(name, subset=None):
    """Opens the documents of a data set as a stream: rows are read as they are needed.

    Args:
        name, subset: as for `find_documents`.

    Returns:
        Documents: `rows.rows` of each split is a `datasets.IterableDataset`.

    Raises:
        UserError: as `find_documents`; or the files are no tables.
    """
    if name == "synthetic":
        splits = make_conversations(0).items()
        opened = {
            split: stream_of(rows, f"--dataset synthetic ({split})") for split, rows in splits
        }
        return Documents(opened, "messages", [])
    files = _find_files(name, subset)
    if files and files.is_plain:
        raise UserError(
            f"--dataset {name} is plain text, which is mapped into memory: leave out --streaming"
        )
    kind, splits, _ = _open_table(name, files, subset, streaming=True)
    return Documents(splits, kind, [])


def _find_files(name, subset):
    """The `TextFiles` of a local data set; None: `name` may be a Hub id."""
    if subset is not None and local_path(name, ALTERNATIVES):
        raise UserError(f"--subset {subset}: only a Hub id has subsets, and --dataset is local")
    return find_files(name) if subset is None else None


def _describe(split, rows):
    noun = "file" if isinstance(rows, Files) else "row"
    return f"{split}: {len(rows):,} {noun if len(rows) == 1 else f'{noun}s'}"


def _open_table(name, files, subset, streaming=False):
    """The kind of the documents in a table, the rows of its splits, and what was left out."""

    def choose(columns):
        return [*KINDS[_kind(name, columns)], *({"tools"} & set(columns))]

    try:
        table = open_rows(name, files, choose, subset=subset, streaming=streaming)
    except UserError as error:
        if "Config name is missing" not in str(error):
            raise
        line = f"--dataset {name} has several subsets: give --subset, one of those on its page"
        raise UserError(line) from None
    return _kind(name, table.columns), table.splits, table.left_out


def _kind(name, columns):
    """What the documents are, by the names of their columns. Raises UserError if it is unknown."""
    if {"chosen", "rejected"} <= set(columns):
        raise UserError(
            f"--dataset {name} has preference data (columns chosen and rejected), which this "
            f"script does not train on: it reads {WANTED}"
        )
    for kind, wanted in KINDS.items():
        if set(wanted) <= set(columns):
            return kind
    listed = ", ".join(map(str, columns)) or "none"
    raise UserError(f"--dataset {name} has the columns {listed}; one needs {WANTED}")


# ------------------------------------------------------------------------------------ plain text


def _segments(path, start=0, stop=None):
    """Yields the text of a file, or of its bytes from `start` to `stop`, as `segments` does.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    with reading(path), open_text(path) as file:
        yield from segments(_decoded(file, start, stop))


def _decoded(file, start, stop):
    decoder = codecs.getincrementaldecoder("utf-8")()
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8 or start > 0:
        file.seek(start)
    while data := file.read(SEGMENT if stop is None else min(SEGMENT, stop - file.tell())):
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


def segments(parts):
    """Joins parts of a text, and yields segments that are about as long and end with a line."""
    kept = ""
    for part in parts:
        if kept and part:
            end = kept.rfind("\n") + 1 or max(kept.rfind(" "), 0) or len(kept)
            yield kept[:end]
            kept = kept[end:]
        kept += part
    yield kept


def segments_of(text):
    """Yields the segments of a text in memory."""
    return segments(text[start : start + SEGMENT] for start in range(0, len(text), SEGMENT))


def _cut(name, files, val_fraction):
    """Divides the only file of a data set: its last part is held out.

    Raises:
        UserError: it is too short.
    """
    path = files.parts[0][0]
    with reading(path), open_text(path) as file:
        size = file.seek(0, os.SEEK_END)
        cut = _cut_place(file, size, val_fraction)
    if not 0 < cut < size:
        raise UserError(f"--dataset {name} has {size} bytes: too few to hold some out")
    parts = {"train": (path, 0, cut), "val": (path, cut, None)}
    return {split: Files([part], files.where) for split, part in parts.items()}


def _cut_place(file, size, val_fraction):
    """The byte at which the held-out part of a text begins: after a line, if one ends there."""
    place = size - round(size * val_fraction)
    file.seek(place)
    data = file.read(min(LINE_END, (size - place) // 2))
    line = data.find(b"\n")
    while line < 0 and data and data[0] & 0xC0 == 0x80:  # within a character
        place, data = place + 1, data[1:]
    return place + line + 1
