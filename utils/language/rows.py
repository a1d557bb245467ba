"""Opens the rows of a data set of text: of a Hub id, JSON Lines, Parquet or CSV.

The script decides from the names of the columns what the rows are.
"""

import json
from dataclasses import dataclass
from typing import NamedTuple

from utils.data.report import LeftOut
from utils.data.tables import READERS, header, load_table, loading, name_splits
from utils.language.text_files import ALTERNATIVES, open_text, reading, suffix_of
from utils.run.failures import UserError


@dataclass(frozen=True)
class Rows:
    """The rows of a split; iterating over them yields dicts, and None for an empty line.

    rows: a list, or a table of the `datasets` library, in memory or as a stream.
    where (str): names them, in messages.
    fingerprint (str): changes with their content.
    is_lines (bool): the column `text` of each has a line of JSON. The reader of the library would
        turn texts that look like dates into dates.
    """

    rows: object
    where: str
    fingerprint: str = ""
    is_lines: bool = False

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        for number, row in enumerate(self.rows):
            if isinstance(self.rows, list):
                yield row
            elif not self.is_lines:
                yield {key: _without_nulls(value) for key, value in row.items()}
            elif row["text"].strip("\ufeff \t\r"):
                yield self._parse(row["text"], number)
            else:
                yield None

    def _parse(self, line, number):
        try:
            value = json.loads(line.lstrip("\ufeff"))
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)  # without a line of its own count
            raise UserError(f"row {number} of {self.where} is not JSON: {reason}") from None
        return value if isinstance(value, dict) else {}


def _without_nulls(value):
    """A value of a row without null fields: a table has the fields of all rows in each of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def stream_of(rows, where):
    """`Rows` that are in memory (list of dicts), as a stream in eight parts."""
    import datasets  # here, because it takes a second

    return Rows(datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=8), where)


class Table(NamedTuple):
    """The rows of a data set: `splits` (dict of `Rows`), one of which is `train`; its columns."""

    splits: dict
    columns: list
    left_out: LeftOut


def open_rows(name, files, choose, *, subset=None, streaming=False):
    """Opens the rows of a data set.

    Args:
        name (str): the value of `--dataset`.
        files (TextFiles | None): tables; None: `name` is a Hub id.
        choose (Callable): the names of the columns -> those that are read. It raises UserError if
            one is missing.
        subset (str | None): a configuration of a Hub id.
        streaming (bool): read rows as they are needed, instead of all of them now.

    Returns:
        Table.

    Raises:
        UserError: they cannot be read.
    """
    by_split, is_lines, columns, options = files and files.by_split, False, None, {}
    left_out = files.left_out if files else LeftOut()
    if files:
        first = by_split["train"][0]
        reader = READERS.get(suffix_of(first))
        if reader == "json" and (row := _first_object(first)):
            is_lines, columns, options = True, list(row), {"reader": "text"}
        elif reader == "json":
            raise UserError(
                f"--dataset {name}: {first.name} does not hold an object in each line: of one "
                f"list, make lines with `jq -c .[] {first.name} > lines.jsonl`"
            )
        elif reader == "csv":
            columns = header(first)
            # 007 and NA are text. All columns: with `usecols`, pandas cuts off longer rows.
            options = dict(converters=dict.fromkeys(columns, str), keep_default_na=False)
    if columns is not None:
        chosen = choose(columns)
    options |= dict(subset=subset, streaming=streaming, alternatives=ALTERNATIVES)
    tables = load_table(name, files=by_split, **options)
    splits = name_splits(name, tables, left_out)
    if "train" not in splits:
        raise UserError(
            f"--dataset {name} has no train split, only {', '.join(tables)}; {ALTERNATIVES}"
        )
    if columns is None:
        train = splits["train"]
        with loading(name, ALTERNATIVES):  # a stream may know its columns only with its first row
            columns = train.column_names or list(next(iter(train), {}))
        chosen = choose(columns)
    opened, read = {}, ["text"] if is_lines else chosen
    for split, table in splits.items():
        names = table.column_names or read  # a stream may not know them
        table = table.select_columns([name for name in names if name in read])
        where, version = f"--dataset {name} ({split})", getattr(table, "_fingerprint", "")
        opened[split] = Rows(table, where, version, is_lines)
    return Table(opened, columns, left_out)


def _first_object(path):
    """The object in the first line of a file, if it holds JSON Lines; None if not."""
    with reading(path), open_text(path) as file:
        line = next((line for line in file if line.strip()), b"")
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def check_column(name, column, columns):
    """The column of text, in a list, for `open_rows`. Raises UserError if there is none."""
    if column not in columns:
        listed = ", ".join(columns)
        raise UserError(
            f"--dataset {name} has no column {column}: give --text_column, one of {listed}"
        )
    return [column]


def encode_row(row, column, where):
    """The bytes of the text in a row (dict), without a byte order mark.

    Raises:
        UserError: the row has no text; `where` names it.
    """
    text = row.get(column)
    if not isinstance(text, str):
        raise UserError(f"{where} is not text but {type(text).__name__}")
    check_unicode(text, where)
    return text.removeprefix("\ufeff").encode()


def check_unicode(text, where):
    """Raises UserError for half of a pair, as in "\\ud800"; `where` names the row."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} is not valid Unicode") from None
