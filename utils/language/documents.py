"""Finds the documents of a data set for a language model: conversations, prompts or texts."""

import codecs
import hashlib
import io
import os
from typing import NamedTuple

from utils.data.report import LeftOut
from utils.data.tables import READERS, header, load_table, loading, local_path, name_splits
from utils.language.dates import make_conversations
from utils.language.text_files import (
    find_files,
    first_object,
    open_text,
    parse_line,
    read_arrays,
    reading,
    stamp,
    suffix_of,
)
from utils.run.failures import UserError

SEGMENT = 250_000  # bytes of a file that are read at once
SUBSETS_SHOWN = 10
LINE_END = 10_000  # bytes in which a held-out part begins after a line break
COMPRESSED = {".jsonl", ".ndjson"}  # read when compressed, besides text
KINDS = {"messages": ("messages",), "prompt": ("prompt", "completion"), "text": ("text",)}
WANTED = "messages (role and content), prompt and completion, or text"
ALTERNATIVES = (
    "use a Hub id such as HuggingFaceTB/smoltalk, a local file or folder, or --dataset synthetic"
)


class Documents(NamedTuple):
    """The documents of a data set.

    splits: dict, split -> rows, which can be iterated over: dicts. They have `fingerprint` (str),
        which changes with their content, and `where` (str), which names them. `train`, and `val`
        or else `test` if the data has one; if not, a part of `train` is to be held out.
    kind: `messages`, `prompt` or `text`: the columns of each row.
    asked: how the model is asked, as `kind`: `messages` also for prompts that are conversations.
    details: lines about where the documents are from, and what was left out.
    """

    splits: dict
    kind: str
    details: list

    @property
    def asked(self):
        if self.kind != "prompt":
            return self.kind
        prompts = (row.get("prompt") for row in self.splits["train"] if row)
        first = next((prompt for prompt in prompts if prompt is not None), "")
        return "prompt" if isinstance(first, str) else "messages"


class Rows(NamedTuple):
    """Rows that are in memory, or in a table of the `datasets` library.

    `is_lines`: the column `text` of each has a line of JSON.
    """

    rows: object
    fingerprint: str
    where: str
    is_lines: bool = False

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        in_memory = isinstance(self.rows, list)
        for number, row in enumerate(self.rows):
            if not self.is_lines:
                yield row if in_memory else {key: _given(value) for key, value in row.items()}
            elif row["text"].strip("\ufeff \t\r"):
                value = parse_line(row["text"], number, self.where, UserError)
                yield value if isinstance(value, dict) else {}
            else:
                yield None  # an empty line


def _given(value):
    """A value of a row without null fields: a table has the fields of all rows in each of them."""
    if isinstance(value, dict):
        return {key: _given(inner) for key, inner in value.items() if inner is not None}
    return [_given(inner) for inner in value] if isinstance(value, list) else value


class Files(NamedTuple):
    """Files of plain text, each of which is a document.

    `parts`: tuples of a path, and of the first byte and the one behind the last (None: its end).
    """

    parts: list
    where: str

    @property
    def fingerprint(self):
        known = []
        for path, *limits in self.parts:
            known.append([*stamp(path), limits])
        return hashlib.sha256(repr(known).encode()).hexdigest()

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
        rows = make_conversations(seed)
        splits = {
            split: Rows(some, f"{split} of dates {seed}", f"--dataset synthetic ({split})")
            for split, some in rows.items()
        }
        return Documents(splits, "messages", [])
    files = _find_files(name, subset)
    left_out = files.left_out if files else LeftOut()
    if files and files.is_plain:
        whole = {k: [(path, 0, None) for path in some] for k, some in files.by_split.items()}
        splits = {split: Files(parts, f"--dataset {name}") for split, parts in whole.items()}
        kind = "text"
    else:
        splits, columns = _load(name, subset, files, left_out)
        kind = _kind(name, columns)
    if "val" in splits and "test" in splits:
        left_out.add("rows or files of the test split", name, len(splits.pop("test")))
    details = [_describe(split, rows) for split, rows in splits.items()]
    if len(splits) == 1 and len(splits["train"]) == 1 and val_fraction:
        splits = _cut(name, splits["train"], kind, val_fraction)
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
    import datasets  # here, because it takes a second

    if name == "synthetic":
        splits = {
            split: Rows(
                datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=8), "", "synthetic"
            )
            for split, rows in make_conversations(0).items()
        }
        return Documents(splits, "messages", [])
    files = _find_files(name, subset)
    if files and files.is_plain:
        raise UserError(
            f"--dataset {name} is plain text, which is mapped into memory: leave out --streaming"
        )
    splits, columns = _load(name, subset, files, LeftOut(), streaming=True)
    return Documents(splits, _kind(name, columns), [])


def _find_files(name, subset):
    """The `TextFiles` of a local data set; None: `name` may be a Hub id."""
    if subset is not None and local_path(name, ALTERNATIVES):
        raise UserError(f"--subset {subset}: only a Hub id has subsets, and --dataset is local")
    return find_files(name, COMPRESSED) if subset is None else None


def _describe(split, rows):
    noun = "file" if isinstance(rows, Files) else "row"
    return f"{split}: {len(rows):,} {noun}{'s' * (len(rows) != 1)}"


def _load(name, subset, files, left_out, streaming=False):
    """The rows of each split of a table, and the names of its columns."""
    import datasets  # here, because it takes a second

    options, is_lines, where = {}, False, f"--dataset {name}"
    if files:
        first = files.by_split["train"][0]
        reader = READERS[suffix_of(first)]
        if reader == "json" and (row := first_object(first)):
            is_lines, columns, options = True, list(row), {"reader": "text"}
        elif reader == "json" and streaming:
            raise UserError(f"{where} is one list, which is read whole: leave out --streaming")
        elif reader == "json":
            return _arrays(name, files)
        elif reader == "csv":
            columns = header(first)
            _kind(name, columns)
            # 007 and NA are text. All columns: with `usecols`, pandas cuts off longer rows.
            options = dict(converters=dict.fromkeys(columns, str), keep_default_na=False)
    options |= dict(files=files and files.by_split, alternatives=ALTERNATIVES)
    try:
        tables = load_table(name, subset=subset, streaming=streaming, **options)
    except UserError as error:
        if "Config name is missing" not in str(error):
            raise
        with loading(name, ALTERNATIVES):
            subsets = ", ".join(datasets.get_dataset_config_names(name)[:SUBSETS_SHOWN])
        raise UserError(f"{where} has several subsets: give --subset, such as {subsets}") from None
    splits = name_splits(name, tables, left_out)
    if "train" not in splits:
        raise UserError(f"{where} has no train split, only {', '.join(tables)}; {ALTERNATIVES}")
    if not is_lines:
        train = splits["train"]
        with loading(name, ALTERNATIVES):  # a stream may know its columns only with its first row
            columns = train.column_names or list(next(iter(train), {}))
    return {
        split: Rows(table, getattr(table, "_fingerprint", ""), f"{where} ({split})", is_lines)
        for split, table in splits.items()
    }, columns


def _arrays(name, files):
    """The rows of files of JSON that each hold a list of objects, and the names of the columns."""
    tables = read_arrays(files.by_split)
    if not tables:
        first = files.by_split["train"][0]
        raise UserError(
            f"--dataset {name}: {first.name} holds neither an object in each line nor one list "
            "of objects"
        )
    found = {}
    for split, rows in tables.items():
        parts = Files([(path, 0, None) for path in files.by_split[split]], name)
        found[split] = Rows(rows, parts.fingerprint, f"--dataset {name} ({split})")
    return found, list(tables["train"][0])


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


def _cut(name, rows, kind, val_fraction):
    """Divides the only document of a data set: its last part is held out.

    Raises:
        UserError: it is no text, or too short.
    """
    if kind != "text":
        raise UserError(f"--dataset {name} has one row: none is left to hold out for evaluation")
    if isinstance(rows, Files):
        path = rows.parts[0][0]
        with reading(path), open_text(path) as file:
            size = file.seek(0, os.SEEK_END)
            cut = _cut_place(file, size, val_fraction)
        parts = {"train": (path, 0, cut), "val": (path, cut, None)}
        found = {split: Files([part], rows.where) for split, part in parts.items()}
    else:
        text = next((row["text"] for row in rows if row and isinstance(row["text"], str)), "")
        data = text.encode("utf-8", "surrogatepass")
        size, cut = len(data), _cut_place(io.BytesIO(data), len(data), val_fraction)
        parts = {"train": data[:cut], "val": data[cut:]}
        found = {
            split: Rows(
                [{"text": part.decode("utf-8", "surrogatepass")}],
                f"{rows.fingerprint} {split} {cut}",
                rows.where,
            )
            for split, part in parts.items()
        }
    if not 0 < cut < size:
        raise UserError(f"--dataset {name} has {size} bytes: too few to hold some out")
    return found


def _cut_place(file, size, val_fraction):
    """The byte at which the held-out part of a text begins: after a line, if one ends there."""
    place = size - round(size * val_fraction)
    file.seek(place)
    data = file.read(min(LINE_END, (size - place) // 2))
    line = data.find(b"\n")
    while line < 0 and data and data[0] & 0xC0 == 0x80:  # within a character
        place, data = place + 1, data[1:]
    return place + line + 1
