"""Finds the documents of a data set for a language model: conversations, prompts or texts."""

import contextlib
import mmap
import os
from functools import partial
from typing import NamedTuple

from utils.language.rows import Rows, open_rows, reading
from utils.language.synthetic import make_conversations
from utils.run.failures import UserError

SEGMENT = 250_000  # bytes of a text that are tokenized at once, at most
FILE_SEGMENTS, SHORTEST = 100, 1000  # of a file that is not very short; bytes of one, about
KINDS = {"messages": ("messages",), "prompt": ("prompt", "completion"), "text": ("text",)}
WANTED = "messages (role and content), prompt and completion, or text"


class Documents(NamedTuple):
    """The documents of a data set.

    splits: dict, split -> `Rows`: `train`, and `val` or else `test` if the data has one; if not, a
        part of `train` is to be held out.
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


def find_documents(name, settings, *, streaming=False):
    """Finds the `Documents` of a data set. Its columns decide what they are.

    Args:
        name (str): a Hub id, a file, a folder, or `synthetic`: dates in words, to be written in
            ISO 8601. A file of plain text is one document.
        settings (TokenSettings): `subset`; `seed` of `synthetic`.
        streaming (bool): rows are read as they are needed.

    Raises:
        UserError: they cannot be found or read, or have no columns of a known kind.
    """
    if name == "synthetic" and not streaming:
        return _synthetic(settings.seed)
    try:
        table = open_rows(name, partial(_choose, name), subset=settings.subset, streaming=streaming)
    except UserError as error:
        if "Config name is missing" not in str(error):
            raise
        line = f"--dataset {name} has several subsets: give --subset, one of those on its page"
        raise UserError(line) from None
    kind, splits = _kind(name, table.columns), {**table.splits}
    if "val" in splits:
        splits.pop("test", None)
    return Documents(splits, kind, [] if streaming else table.describe(splits), table.sample)


def _synthetic(seed):
    splits = {}
    for split, rows in make_conversations(seed).items():
        splits[split] = Rows(rows, f"--dataset synthetic ({split})", f"{split} of dates {seed}")
    return Documents(splits, "messages", [])


def _choose(name, columns):
    """Those of the columns (list) that are read."""
    return [*KINDS[_kind(name, columns)], *({"tools"} & set(columns))]


def _kind(name, columns):
    """What the documents are, by the names of their columns. Raises UserError if it is unknown."""
    for kind, wanted in KINDS.items():
        if set(wanted) <= set(columns):
            return kind
    listed = ", ".join(map(str, columns)) or "none"
    raise UserError(f"--dataset {name} has the columns {listed}; one needs {WANTED}")


# ------------------------------------------------------------------------------------ plain text


def read_segments(path):
    """Yields the text of a file in segments. Raises UserError if it cannot be read."""
    with reading(path), contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        size = os.path.getsize(path)
        if size:  # else it cannot be mapped
            data = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            yield from segments(data, min(SEGMENT, max(SHORTEST, size // FILE_SEGMENTS)))


def segments(data, size):
    """Yields a text in segments of about `size` bytes that end with a line, if they can.

    Args: data: the bytes of the text, or a map of them.
    """
    start = 0
    for place in range(size, len(data), size):
        end = _end_of_segment(data, start, place)
        yield _decode(data, start, end)
        start = end
    yield _decode(data, start, len(data))


def _end_of_segment(data, start, place):
    """A place after a line, or else before a word, or else between characters."""
    line = data.rfind(b"\n", start, place)
    if line >= 0:
        return line + 1
    blank = data.rfind(b" ", start + 1, place)
    if blank >= 0:
        return blank
    while place < len(data) and data[place] & 0xC0 == 0x80:
        place += 1
    return place


def _decode(data, start, stop):
    return data[start:stop].decode("utf-8" if start else "utf-8-sig")
