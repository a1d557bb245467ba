"""Tokenizes a data set once per machine, into a table of the `datasets` cache that is mapped into
memory, and makes blocks of it: `load_tokens` is all that a script needs.
"""

import functools
import hashlib
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.data.report import LeftOut
from utils.language.conversations import ANSWERS, Document, Encoder
from utils.language.documents import find_documents
from utils.language.messages import draft_row
from utils.language.packing import (
    Documents,
    Stream,
    cut_text,
    join_segments,
    pack_conversations,
    sum_segments,
)
from utils.run.failures import UserError, causes, full_disk
from utils.run.seeds import sample_seed

VERSION = 2  # of what a table has: another one makes new tables
EMPTY, NO_ANSWER = 1, 2  # why a row has no tokens
REASONS = {EMPTY: "empty documents", NO_ANSWER: "conversations without an answer"}
NOUNS = {"messages": "conversations", "prompt": "prompts with completions", "text": "documents"}
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

    rows: int64, the row that it is from. reasons: int64, why it has no tokens, or 0. digests:
    int64, a checksum. quotes: whether it contains the name of a special token.
    """

    stream: Stream
    documents: Documents
    rows: np.ndarray
    reasons: np.ndarray
    digests: np.ndarray
    quotes: np.ndarray

    def select(self, chosen):
        """The documents that a boolean array [documents] chooses."""
        documents = Documents(*(column[chosen] for column in self.documents))
        return _Table(self.stream, documents, *(column[chosen] for column in self[2:]))


def load_tokens(
    name,
    tokenizer,
    block_size,
    *,
    subset=None,
    val_fraction=0.1,
    seed=0,
    chat_template=None,
    loss_on=ANSWERS,
    too_long="truncate",
    packed=True,
):
    """Loads a data set as blocks of tokens.

    Args:
        name (str): a Hub id, a file, a folder, or `synthetic`; see `documents.find_documents`.
        tokenizer: of the `transformers` library.
        block_size (int): positions of a block.
        subset (str | None): a configuration of a Hub id.
        val_fraction (float): the share of the rows that is held out if the data has neither a
            split `val` nor `test`; of a single text, its last part.
        seed (int): decides which rows are held out, and makes `synthetic`.
        chat_template (str | None): a Jinja template, instead of that of the tokenizer.
        loss_on (str): `answers` or `all`: which tokens of a conversation are targets.
        too_long (str): `truncate`, `drop` or `error`: conversations longer than a block.
        packed (bool): False: each block has positions of one document only.

    Returns:
        Corpus.

    Raises:
        UserError: the data cannot be read, has no known columns, or nothing to learn.
    """
    documents = find_documents(name, subset=subset, val_fraction=val_fraction, seed=seed)
    encoder = Encoder(tokenizer, chat_template, loss_on)
    fingerprint = fingerprint_of(encoder)
    tables = {
        split: _tokenize(rows, encoder, documents.kind, fingerprint)
        for split, rows in documents.splits.items()
    }
    if len(tables) == 1 and val_fraction:
        train = tables["train"]
        held_out = np.isin(train.rows, hold_out(train.rows[train.reasons == 0], val_fraction, seed))
        tables = {"train": train.select(~held_out), "val": train.select(held_out)}
    options = packing_options(tokenizer, documents.kind, block_size, too_long, packed)
    splits, details = {}, [*documents.details]
    for split, table in tables.items():
        splits[split], lines = _make_blocks(table, documents.kind, options)
        if splits[split].target_tokens == 0:
            raise UserError(f"--dataset {name} has no token to predict in its {split} split")
        details += [f"{split}: {line}" for line in lines]
    if documents.kind == "text" and tokenizer.eos_token_id is None:
        details.append("the tokenizer has no end token: documents end without one")
    return Corpus(splits, documents.asked, _describe(tables, splits, documents.kind), details)


def packing_options(tokenizer, kind, block_size, too_long, packed):
    """The arguments of `cut_text`, or of `pack_conversations`, beside the documents."""
    known = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
    pad_id = next(number for number in known if number is not None)
    options = dict(block_size=block_size, packed=packed, pad_id=pad_id)
    return options if kind == "text" else options | dict(decode=tokenizer.decode, too_long=too_long)


def _make_blocks(table, kind, options):
    """The blocks of a split, and lines about them."""
    kept, counts = table.select(table.reasons == 0), {}
    if kind == "text":
        blocks = cut_text(kept.stream, kept.documents, **options)
    else:
        blocks, counts = pack_conversations(kept.stream, kept.documents, **options)
    said = [f"{len(kept.rows):,} {NOUNS[kind]}", f"{blocks.tokens:,} tokens"]
    if kind != "text":
        said.append(f"{blocks.target_tokens:,} targets")
    said += [f"{count:,} {what}" for what, count in counts.items() if count]
    padding = f"{100 * blocks.padding:.1f} % padding"
    lines = [f"{', '.join(said)}; {len(blocks):,} blocks, {padding}"]
    left_out = LeftOut()
    for reason, noun in REASONS.items():
        rows = table.rows[table.reasons == reason]
        if len(rows):
            left_out.add(noun, f"row {rows[0]}", len(rows))
    lines += left_out.lines()
    if kept.quotes.any():
        lines.append(f"{int(kept.quotes.sum()):,} contain names of special tokens, as text")
    return blocks, lines


def _describe(tables, splits, kind):
    """One line, with a checksum of the tokens of all splits."""
    digest = hashlib.sha256()
    for table in tables.values():
        digest.update(len(table.digests).to_bytes(8, "little") + table.digests.tobytes())
    sizes = [f"{len(np.unique(t.rows[t.reasons == 0])):,} {split}" for split, t in tables.items()]
    tokens = sum(blocks.tokens for blocks in splits.values())
    short = digest.hexdigest()[:12]
    return f"{' and '.join(sizes)} {NOUNS[kind]}, {tokens:,} tokens (fingerprint {short})"


def hold_out(rows, fraction, seed):
    """Which rows are held out: those with the lowest hashes.

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
    count = min(max(1, round(len(rows) * fraction)), len(rows) - 1)
    hashes = np.array([sample_seed(seed, 0, row) for row in rows.tolist()], np.uint64)
    return rows[np.argsort(hashes, kind="stable")[:count]]


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
    value, numbers = datasets.Value, ("row", "answer", "bytes", "digest", "reason")
    features = {
        "tokens": datasets.LargeList(value("int32")),
        **({} if kind == "text" else {"is_target": datasets.LargeList(value("uint8"))}),
        **{name: value("int64") for name in numbers},
        **{name: value("bool") for name in ("begins", "quotes")},
    }
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
    waiting, characters = [], 0  # tuples of a row's number and its drafts
    for number, row in enumerate(rows):
        # A long text is drafted segment by segment, so that it is never in memory as a whole.
        empty = True
        for draft in draft_row(row, encoder, kind, f"row {number} of {rows.where}"):
            empty, characters = False, characters + sum(len(part.text) for part in draft.parts)
            waiting.append((number, draft))
            if characters >= CHARACTERS_AT_ONCE or len(waiting) >= ROWS_AT_ONCE:
                yield from _write(waiting, encoder, kind)
                waiting, characters = [], 0
        if empty:
            waiting.append((number, None))
    yield from _write(waiting, encoder, kind)


def _write(waiting, encoder, kind):
    """Yields the records of drafts; of None, one without tokens."""
    documents = iter(encoder.encode([draft for _, draft in waiting if draft is not None]))
    for number, draft in waiting:
        if draft is None:
            yield _record(_NOTHING, number, EMPTY if kind == "text" else NO_ANSWER, kind)
        else:
            yield _record(next(documents), number, 0, kind)


_NOTHING = Document(np.zeros(0, np.int32), np.zeros(0, np.uint8))


def _record(document, row, reason, kind):
    content = document.tokens.tobytes()
    content += b"" if kind == "text" else document.is_target.tobytes()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return {
        "tokens": document.tokens,
        **({} if kind == "text" else {"is_target": document.is_target}),
        "row": row,
        "answer": document.answer,
        "bytes": document.bytes,
        "digest": int.from_bytes(digest, "little", signed=True),
        "reason": reason,
        "begins": document.begins,
        "quotes": document.quotes,
    }


def _open(table):
    """A `_Table` of a table on disk, without a copy of its tokens."""
    chunks = table.data.column("tokens").chunks
    sizes = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])
    column = {
        name: table.data.column(name).to_numpy()
        for name in ("row", "answer", "bytes", "digest", "reason", "begins", "quotes")
    }
    first = np.flatnonzero(column["begins"])  # the first segment of each document
    documents = join_segments(first, sizes, column["answer"], column["bytes"])
    with np.errstate(over="ignore"):
        digests = sum_segments(first, column["digest"])
    quotes = sum_segments(first, column["quotes"].astype(np.int64)) > 0
    rows, reasons = column["row"][first], column["reason"][first]
    return _Table(_open_stream(table), documents, rows, reasons, digests, quotes)


def _open_stream(table):
    """The stream of the tokens of a table: views of its memory-mapped file."""

    def views(column):
        chunks = table.data.column(column).chunks
        return [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in chunks]

    is_target = views("is_target") if "is_target" in table.column_names else None
    return Stream(views("tokens"), is_target, functools.partial(_open_stream, table))
