"""Finds the documents of a data set for a language model: conversations, prompts or texts."""

import contextlib
import hashlib
import mmap
import os
from typing import NamedTuple

from utils.data.scan import stamp
from utils.language.rows import Rows, open_rows, reading
from utils.language.synthetic import make_conversations
from utils.run.failures import UserError

SEGMENT = 250_000  # bytes of a text that are tokenized at once
SHARD_BYTES = 1 << 26  # of files that one process tokenizes; a larger one is a shard of its own
LINE_END = 10_000  # bytes in which a held-out part begins after a line break
KINDS = {"messages": ("messages",), "prompt": ("prompt", "completion"), "text": ("text",)}
WANTED = "messages (role and content), prompt and completion, or text"


class Documents(NamedTuple):
    """The documents of a data set.

    splits: dict, split -> `Rows` or `Files`: dicts. `train`, and `val` or else `test` if the data
        has one; if not, a part of `train` is to be held out.
    kind: `messages`, `prompt` or `text`: the columns of each row.
    details: lines about where the documents are from, and what was left out.
    sample: of a stream of local files, what its checksum reads (bytes).
    """

    splits: dict
    kind: str
    details: list
    sample: bytes = b""

    @property
    def asked(self):
        """How the model is asked, as `kind`: `messages` also for prompts that are conversations."""
        if self.kind != "prompt":
            return self.kind
        prompts = (row.get("prompt") for row in self.splits["train"] if row)
        first = next((prompt for prompt in prompts if prompt is not None), "")
        return "prompt" if isinstance(first, str) else "messages"


class Files(NamedTuple):
    """Files of plain text, each of which is a document, in segments.

    `parts`: tuples of a path, and of the first byte and the one behind the last (None: its end).
    `first`: the number of the first one.
    """

    parts: list
    where: str
    first: int = 0

    @property
    def fingerprint(self):
        """Changes with the files."""
        parts = [[*stamp(path), limits] for path, *limits in self.parts]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def __len__(self):
        return len(self.parts)

    def shards(self, size):
        """Yields `Files` of at most `size` parts (int), and so many that they are not small."""
        waiting, total = [], 0
        for number, (path, start, stop) in enumerate(self.parts, 1):
            waiting.append((path, start, stop))
            total += (os.path.getsize(path) if stop is None else stop) - start
            if total >= SHARD_BYTES or len(waiting) == size or number == len(self.parts):
                yield Files(waiting, self.where, number - len(waiting))
                waiting, total = [], 0

    def __iter__(self):
        for part in self.parts:
            yield {"text": _read(*part)}


def find_documents(name, settings, *, streaming=False):
    """Finds the documents of a data set. Its columns decide what they are.

    Args:
        name (str): a Hub id, a file, a folder, or `synthetic`: dates in words, to be written in
            ISO 8601. A file of plain text is one document.
        settings (TokenSettings): `subset`; `seed` of `synthetic`; `val_fraction` of a single text
            without a split `val` or `test`, the last part that is held out.
        streaming (bool): rows are read as they are needed.

    Returns:
        Documents.

    Raises:
        UserError: they cannot be found or read, or have no columns of a known kind.
    """
    if name == "synthetic" and not streaming:
        return _synthetic(settings.seed)
    table = _open_table(name, settings.subset, streaming)
    kind, splits, fraction = _kind(name, table.columns), {**table.splits}, settings.val_fraction
    if streaming:
        return Documents(splits, kind, [], table.sample())
    if table.is_plain:
        for split, paths in table.files.items():
            splits[split] = Files([(path, 0, None) for path in paths], f"--dataset {name}")
    if "val" in splits:
        splits.pop("test", None)
    details = table.describe(splits)
    if table.is_plain and len(splits) == 1 and len(splits["train"]) == 1 and fraction:
        splits = _cut(name, splits["train"], fraction)
        details.append(f"val: the last {fraction:g} of the only document")
    return Documents(splits, kind, details)


def _synthetic(seed):
    splits = {}
    for split, rows in make_conversations(seed).items():
        splits[split] = Rows(rows, f"--dataset synthetic ({split})", f"{split} of dates {seed}")
    return Documents(splits, "messages", [])


def _open_table(name, subset, streaming):
    """The `Table` of a data set that is read by `open_rows`."""

    def choose(columns):
        return [*KINDS[_kind(name, columns)], *({"tools"} & set(columns))]

    try:
        return open_rows(name, choose, subset=subset, streaming=streaming)
    except UserError as error:
        if "Config name is missing" not in str(error):
            raise
        line = f"--dataset {name} has several subsets: give --subset, one of those on its page"
        raise UserError(line) from None


def _kind(name, columns):
    """What the documents are, by the names of their columns. Raises UserError if it is unknown."""
    for kind, wanted in KINDS.items():
        if set(wanted) <= set(columns):
            return kind
    listed = ", ".join(map(str, columns)) or "none"
    raise UserError(f"--dataset {name} has the columns {listed}; one needs {WANTED}")


# ------------------------------------------------------------------------------------ plain text


@contextlib.contextmanager
def _mapped(path):
    """The bytes of a file. Raises UserError if they cannot be read, or decoded in the block."""
    with reading(path), open(path, "rb") as file:
        if os.path.getsize(path) == 0:  # which cannot be mapped
            yield b""
        else:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data


def _read(path, start, stop):
    with _mapped(path) as data:
        yield from segments(data, start, stop)


def segments(data, start=0, stop=None):
    """Yields a text in segments that are about as long and end with a line, if they can.

    Args:
        data: the bytes of the text, or a map of them.
        start, stop (int): the first byte, and the one behind the last (None: the end).
    """
    stop = len(data) if stop is None else stop
    for place in range(start + SEGMENT, stop, SEGMENT):
        end = _end_of_segment(data, start, place)
        yield _decode(data, start, end)
        start = end
    yield _decode(data, start, stop)


def _end_of_segment(data, start, place):
    """A place after a line, or else before a word, or else between characters."""
    line = data.rfind(b"\n", start, place)
    if line >= 0:
        return line + 1
    blank = data.rfind(b" ", start + 1, place)
    return blank if blank >= 0 else _end_of_character(data, place)


def _end_of_character(data, place):
    while place < len(data) and data[place] & 0xC0 == 0x80:
        place += 1
    return place


def _decode(data, start, stop):
    return data[start:stop].decode("utf-8" if start else "utf-8-sig")


def _cut(name, files, val_fraction):
    """Divides the only file of a data set: its last part is held out, after a line if one ends.

    Raises:
        UserError: it is too short.
    """
    path = files.parts[0][0]
    with _mapped(path) as data:
        size = len(data)
        place = size - round(size * val_fraction)
        line = data.find(b"\n", place, place + min(LINE_END, (size - place) // 2))
        cut = line + 1 if line >= 0 else _end_of_character(data, place)
    if not 0 < cut < size:
        raise UserError(f"--dataset {name} has {size} bytes: too few to hold some out")
    parts = {"train": (path, 0, cut), "val": (path, cut, None)}
    return {split: Files([part], files.where) for split, part in parts.items()}
