"""Tokenizes a data set once per machine, into a file that is mapped into memory.

It makes blocks of it: `load_tokens` is all that a script needs.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from utils.data import splits as split_names
from utils.data.permutation import sample_seed
from utils.language.blocks import Stream
from utils.language.chats import unread_keys
from utils.language.conversations import Encoder
from utils.language.documents import find_documents
from utils.language.packing import Documents, join_segments
from utils.language.tokenizing import tokenize
from utils.run.domains import shown
from utils.run.failures import UserError
from utils.run.output import plural

NOUNS = {"messages": "conversations", "prompt": "prompts with completions", "text": "documents"}


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
    documents = find_documents(name, settings)
    kind, encoder = documents.kind, Encoder(settings.tokenizer, settings.loss_on)
    tables = {
        split: _read(*tokenize(rows, encoder, kind)) for split, rows in documents.splits.items()
    }
    if len(tables) == 1 and share:
        train = tables["train"]
        used = train.select(train.has_tokens)
        held_out = np.isin(train.rows, hold_out(used.rows, used.digests, share, seed))
        tables = {"train": train.select(~held_out), "val": train.select(held_out)}
    splits, details = {}, [*documents.details]
    if unread := unread_keys(documents.splits["train"], settings.tokenizer.chat_template):
        details.append(f"not read, as the chat template does not: {', '.join(map(shown, unread))}")
    for split, table in tables.items():
        used = table.select(table.has_tokens)
        splits[split], counts = settings.pack(used.stream, used.documents, kind)
        if splits[split].target_tokens == 0:
            raise UserError(f"--dataset {name} has no token to predict in its {split} split")
        details += [f"{split}: {line}" for line in _describe(table, splits[split], kind, counts)]
    for split in tables.keys() - {"train"}:
        details += _describe_copies(tables["train"], split, tables[split], kind)
    if kind == "text" and settings.tokenizer.eos_token_id is None:
        details.append("the tokenizer has no end token: documents end without one")
    description = _summarize(tables, splits, kind)
    return Corpus(splits, documents.asked, description, details)


def _read(tokens, index):
    """The table of what `tokenize` returned."""
    first = np.flatnonzero(index["begins"])  # the first segment of each document
    documents = join_segments(first, index["length"], index["answer"], index["bytes"])
    with np.errstate(over="ignore"):
        digests = np.add.reduceat(index["digest"], first)
    is_target = tokens["is_target"] if "is_target" in tokens.dtype.names else None
    return _Table(Stream(tokens["token"], is_target), documents, index["row"][first], digests)


def _describe(table, blocks, kind, counts):
    """Lines about a split: its size, and what was left out."""
    sizes = [f"{int(table.has_tokens.sum()):,} {NOUNS[kind]}", f"{blocks.tokens:,} tokens"]
    if kind != "text":
        sizes.append(f"{blocks.target_tokens:,} targets")
    sizes += [f"{count:,} {what}" for what, count in counts.items() if count]
    padding = f"{100 * blocks.padding:.1f} % padding"
    per_block = int(table.has_tokens.sum()) / len(blocks)
    packed = f"{plural(len(blocks), 'block')}, {per_block:.1f} per block, {padding}"
    lines = [f"{', '.join(sizes)}; {packed}"]
    empty = table.rows[~table.has_tokens]
    if len(empty):
        what = "empty documents" if kind == "text" else "conversations without an answer"
        lines.append(f"left out: {what}: {len(empty):,} (row {empty[0]})")
    return lines


def _describe_copies(train, split, table, kind):
    """A line about what a split has in common with `train`; none if that is nothing."""
    copies = table.rows[table.has_tokens & np.isin(table.digests, train.digests)]
    if not len(copies):
        return []
    return [f"{split}: equal {NOUNS[kind]} are in train: {len(copies):,} (row {copies[0]})"]


def _summarize(tables, splits, kind):
    """One line, with a checksum of the tokens of all splits."""
    digest, sizes = hashlib.sha256(), []
    for split, table in tables.items():
        digest.update(len(table.digests).to_bytes(8, "little") + table.digests.tobytes())
        sizes.append(f"{len(np.unique(table.rows[table.has_tokens])):,} {split}")
    tokens = sum(blocks.tokens for blocks in splits.values())
    short = digest.hexdigest()[:12]
    return f"{' and '.join(sizes)} {NOUNS[kind]}, {tokens:,} tokens (fingerprint {short})"


def hold_out(rows, digests, fraction, seed):
    """Which rows are held out, by `splits.hold_out`: of equal rows all or none.

    Args:
        rows (int64): the numbers of the rows; the same number may be there several times.
        digests (int64): checksums of what is in them.
        fraction (float): of the rows; at least one is held out, and not all.
        seed (int): of the hash.

    Returns:
        int64: their numbers.

    Raises:
        UserError: there are fewer than two rows.
    """
    rows, first = np.unique(rows, return_index=True)
    if len(rows) < 2:
        raise UserError("the data set has one document: none is left to hold out for evaluation")
    keys = [sample_seed(seed, 0, digest) for digest in digests[first].tolist()]
    return rows[split_names.hold_out(keys, fraction)]
