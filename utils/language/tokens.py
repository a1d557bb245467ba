"""Tokenizes a data set once per machine, into a table of the `datasets` cache that is mapped into
memory, and makes blocks of it: `load_tokens` is all that a script needs.
"""

import functools
import hashlib
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.data import splits as split_names
from utils.data.report import LeftOut
from utils.language.blocks import Stream
from utils.language.conversations import Document, Encoder
from utils.language.documents import find_documents
from utils.language.messages import draft_row
from utils.language.packing import Documents, join_segments
from utils.run.failures import UserError, causes, full_disk
from utils.run.seeds import sample_seed

VERSION = 3  # of what a table has: another one makes new tables
NOUNS = {"messages": "conversations", "prompt": "prompts with completions", "text": "documents"}
NUMBERS = ("row", "answer", "bytes", "digest")  # columns of a table besides the tokens
# What is tokenized at once, and how many records are kept in memory until they are written.
CHARACTERS_AT_ONCE, ROWS_AT_ONCE, WRITTEN_AT_ONCE = 2_000_000, 1000, 100


class Corpus(NamedTuple):
    """A tokenized data set.

    splits: dict, `train`, and `val` or else `test` -> Blocks.
    kind: how a model of it is asked: `messages`, `prompt` or `text`.
    description: one line, with a checksum of the tokens.
    details: more lines: documents, tokens, targets, padding, and what was left out.
    """

    splits: dict
    kind: str
    description: str
    details: list


class _Table(NamedTuple):
    """A tokenized split: its stream, and columns, one element for each document.

    rows: int64, the row that it is from. digests: int64, a checksum.
    """

    stream: Stream
    documents: Documents
    rows: np.ndarray
    digests: np.ndarray

    def select(self, chosen):
        """The documents that a boolean array [documents] chooses."""
        documents = Documents(*(column[chosen] for column in self.documents))
        return _Table(self.stream, documents, self.rows[chosen], self.digests[chosen])

    @property
    def has_tokens(self):
        """Which documents have tokens; the others are empty, or have no answer."""
        return self.documents.lengths > 0


def load_tokens(name, settings):
    """Loads a data set as blocks of tokens.

    Args:
        name (str): a Hub id, a file, a folder, or `synthetic`; see `documents.find_documents`.
        settings (TokenSettings): what is made of it.

    Returns:
        Corpus.

    Raises:
        UserError: the data cannot be read, has no known columns, or nothing to learn.
    """
    share, seed = settings.val_fraction, settings.seed
    documents = find_documents(name, subset=settings.subset, val_fraction=share, seed=seed)
    kind, encoder = documents.kind, Encoder(settings.tokenizer, loss_on=settings.loss_on)
    fingerprint = fingerprint_of(encoder)
    tables = {
        split: _tokenize(rows, encoder, kind, fingerprint)
        for split, rows in documents.splits.items()
    }
    if len(tables) == 1 and share:
        train = tables["train"]
        held_out = np.isin(train.rows, hold_out(train.rows[train.has_tokens], share, seed))
        tables = {"train": train.select(~held_out), "val": train.select(held_out)}
    splits, details = {}, [*documents.details]
    for split, table in tables.items():
        used = table.select(table.has_tokens)
        splits[split], counts = settings.pack(used.stream, used.documents, kind)
        if splits[split].target_tokens == 0:
            raise UserError(f"--dataset {name} has no token to predict in its {split} split")
        details += [f"{split}: {line}" for line in _describe(table, splits[split], kind, counts)]
    if kind == "text" and settings.tokenizer.eos_token_id is None:
        details.append("the tokenizer has no end token: documents end without one")
    description = _summarize(tables, splits, kind)
    return Corpus(splits, documents.asked, description, details)


def _describe(table, blocks, kind, counts):
    """Lines about a split: its size, and what was left out."""
    sizes = [f"{int(table.has_tokens.sum()):,} {NOUNS[kind]}", f"{blocks.tokens:,} tokens"]
    if kind != "text":
        sizes.append(f"{blocks.target_tokens:,} targets")
    sizes += [f"{count:,} {what}" for what, count in counts.items() if count]
    padding = f"{100 * blocks.padding:.1f} % padding"
    left_out, empty = LeftOut(), table.rows[~table.has_tokens]
    if len(empty):
        what = "empty documents" if kind == "text" else "conversations without an answer"
        left_out.add(what, f"row {empty[0]}", len(empty))
    return [f"{', '.join(sizes)}; {len(blocks):,} blocks, {padding}", *left_out.lines()]


def _summarize(tables, splits, kind):
    """One line, with a checksum of the tokens of all splits."""
    digest, sizes = hashlib.sha256(), []
    for split, table in tables.items():
        digest.update(len(table.digests).to_bytes(8, "little") + table.digests.tobytes())
        sizes.append(f"{len(np.unique(table.rows[table.has_tokens])):,} {split}")
    tokens = sum(blocks.tokens for blocks in splits.values())
    short = digest.hexdigest()[:12]
    return f"{' and '.join(sizes)} {NOUNS[kind]}, {tokens:,} tokens (fingerprint {short})"


def hold_out(rows, fraction, seed):
    """Which rows are held out, by `splits.hold_out`.

    Args:
        rows (int64): the numbers of the rows; the same number may be there several times.
        fraction (float): of the rows; at least one is held out, and not all.
        seed (int): of the hash.

    Returns:
        int64: their numbers.

    Raises:
        UserError: there are fewer than two rows.
    """
    rows = np.unique(rows)
    if len(rows) < 2:
        raise UserError("the data set has one document: none is left to hold out for evaluation")
    return rows[
        split_names.hold_out([sample_seed(seed, 0, row) for row in rows.tolist()], fraction)
    ]


# ------------------------------------------------------------------------------------- tokenizing


def fingerprint_of(encoder):
    """A checksum of all that decides which tokens a document has: the content of the tokenizer,
    the template and `loss_on`.
    """
    digest = hashlib.sha256(repr([VERSION, encoder.loss_on, encoder.chat_template]).encode())
    with tempfile.TemporaryDirectory() as folder:
        encoder.tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _tokenize(rows, encoder, kind, fingerprint):
    """The table of the tokens of `rows`, made or from the cache."""
    import datasets  # here, because it takes a second

    datasets.disable_progress_bars()
    features = {name: datasets.Value("int64") for name in NUMBERS}
    features |= {"begins": datasets.Value("bool")}
    features |= {"tokens": datasets.LargeList(datasets.Value("int32"))}
    if kind != "text":
        features["is_target"] = datasets.LargeList(datasets.Value("uint8"))
    key = hashlib.sha256(f"{fingerprint} {kind} {rows.fingerprint}".encode()).hexdigest()[:32]
    try:
        table = datasets.Dataset.from_generator(
            _records,
            features=datasets.Features(features),
            gen_kwargs=dict(rows=rows, encoder=encoder, kind=kind),
            fingerprint=key,
            writer_batch_size=WRITTEN_AT_ONCE,
        )
    except (datasets.exceptions.DatasetGenerationError, OSError) as error:
        for cause in causes(error):
            if isinstance(cause, UserError):
                raise cause from None
            if isinstance(cause, OSError) and not full_disk(cause):
                folder = datasets.config.HF_DATASETS_CACHE
                raise UserError(
                    f"cannot write tokens to {folder}: {cause.strerror} (see HF_DATASETS_CACHE)"
                ) from None
        raise
    return _open(table)


def _records(rows, encoder, kind):
    """Yields what is in the table: at least one record for each row."""
    waiting, characters = [], 0  # tuples of a row's number and a draft, None of an empty row
    for number, row in enumerate(rows):
        # A long text is drafted segment by segment, so that it is never in memory as a whole.
        empty = True
        for draft in draft_row(row, encoder, kind, f"row {number} of {rows.where}"):
            empty, characters = False, characters + sum(len(part.text) for part in draft.parts)
            waiting.append((number, draft))
            if characters >= CHARACTERS_AT_ONCE or len(waiting) >= ROWS_AT_ONCE:
                yield from _encode(waiting, encoder)
                waiting, characters = [], 0
        if empty:
            waiting.append((number, None))
    yield from _encode(waiting, encoder)


def _encode(waiting, encoder):
    """Yields the records of drafts; of None, one without tokens."""
    documents = iter(encoder.encode([draft for _, draft in waiting if draft is not None]))
    empty = Document(np.zeros(0, np.int32), np.zeros(0, np.uint8))
    for number, draft in waiting:
        document = empty if draft is None else next(documents)
        content = document.tokens.tobytes()
        if not (is_text := document.is_target is None):
            content += document.is_target.tobytes()
        digest = hashlib.blake2b(content, digest_size=8).digest()
        yield {
            "tokens": document.tokens,
            **({} if is_text else {"is_target": document.is_target}),
            "row": number,
            "answer": document.answer,
            "bytes": document.bytes,
            "digest": int.from_bytes(digest, "little", signed=True),
            "begins": document.begins,
        }


def _open(table):
    """A `_Table` of a table on disk, without a copy of its tokens."""
    chunks = table.data.column("tokens").chunks
    lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])
    column = {name: table.data.column(name).to_numpy() for name in (*NUMBERS, "begins")}
    first = np.flatnonzero(column["begins"])  # the first segment of each document
    documents = join_segments(first, lengths, column["answer"], column["bytes"])
    with np.errstate(over="ignore"):
        digests = np.add.reduceat(column["digest"], first)
    return _Table(_open_stream(table), documents, column["row"][first], digests)


def _open_stream(table):
    """The stream of the tokens of a table: views of its memory-mapped file."""

    def views(column):
        chunks = table.data.column(column).chunks
        return [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in chunks]

    is_target = views("is_target") if "is_target" in table.column_names else None
    return Stream(views("tokens"), is_target, functools.partial(_open_stream, table))
