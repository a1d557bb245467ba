"""Tokenizes a data set once per machine, into a file that is mapped into memory.

It makes blocks of it: `load_tokens` is all that a script needs.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from utils.data import splits as split_names
from utils.data.permutation import sample_seed
from utils.language.chats import unread_keys
from utils.language.conversations import Encoder
from utils.language.documents import find_documents
from utils.language.packing import join_segments
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
    source = find_documents(name, settings)
    kind, encoder = source.kind, Encoder(settings.tokenizer, settings.loss_on)
    streams, tables, details = {}, {}, [*source.details]
    for split, rows in source.splits.items():
        streams[split], tables[split] = tokenize(rows, encoder, kind)
    if len(tables) == 1 and settings.val_fraction:
        streams["val"] = streams["train"]
        tables["train"], tables["val"] = divide(tables["train"], settings)
    else:
        tables = {split: join_segments(segments) for split, segments in tables.items()}
    if unread := unread_keys(source.splits["train"], settings.tokenizer.chat_template):
        details.append(f"not read, as the chat template does not: {', '.join(map(shown, unread))}")
    splits = {}
    for split, table in tables.items():
        # The others are empty, or have no answer.
        used = table[table["length"] > 0]
        splits[split], counts = settings.pack(streams[split], used, kind)
        if splits[split].target_tokens == 0:
            raise UserError(f"--dataset {name} has no token to predict in its {split} split")
        details += [f"{split}: {line}" for line in _describe(table, splits[split], kind, counts)]
    for split in tables.keys() - {"train"}:
        details += _describe_copies(tables["train"], split, tables[split], kind)
    if kind == "text" and settings.tokenizer.eos_token_id is None:
        details.append("the tokenizer has no end token: documents end without one")
    return Corpus(splits, source.asked, _summarize(tables, splits, kind), details)


def divide(segments, settings):
    """Divides a split: the documents to train on, and those to hold out; of one text its end.

    Args:
        segments: SEGMENT [segments], as `tokenize` returns them.
        settings (TokenSettings): `val_fraction` of the documents that have tokens, at least one,
            and `seed`. Equal ones stay together, and those of a row.

    Returns:
        tuple: two arrays of DOCUMENT.

    Raises:
        UserError: there is one only, and it cannot be divided.
    """
    documents, fraction = join_segments(segments), settings.val_fraction
    if len(documents) == 1 < len(segments):
        halves = segments.copy()
        cut = len(segments) - max(1, round(len(segments) * fraction))
        halves["begins"][max(1, cut)] = 1
        train, held_out = join_segments(halves)
        # After the last token of the training, which predicts the first one.
        held_out["start"], held_out["length"] = held_out["start"] - 1, held_out["length"] + 1
        return np.array([train]), np.array([held_out])
    used = documents[documents["length"] > 0]
    rows, first = np.unique(used["row"], return_index=True)
    if len(rows) < 2:
        raise UserError("the data set has one document: none is left to hold out for evaluation")
    keys = [sample_seed(settings.seed, 0, digest) for digest in used["digest"][first].tolist()]
    chosen = np.isin(documents["row"], rows[split_names.hold_out(keys, fraction)])
    return documents[~chosen], documents[chosen]


def _describe(table, blocks, kind, counts):
    """Lines about a split: its size, and what was left out."""
    count = int((table["length"] > 0).sum())
    sizes = [f"{count:,} {NOUNS[kind]}", f"{blocks.tokens:,} tokens"]
    if kind != "text":
        sizes.append(f"{blocks.target_tokens:,} targets")
    sizes += [f"{number:,} {what}" for what, number in counts.items() if number]
    padding = f"{100 * blocks.padding:.1f} % padding"
    packed = f"{plural(len(blocks), 'block')}, {count / len(blocks):.1f} per block, {padding}"
    lines = [f"{', '.join(sizes)}; {packed}"]
    empty = table["row"][table["length"] == 0]
    if len(empty):
        what = "empty documents" if kind == "text" else "conversations without an answer"
        lines.append(f"left out: {what}: {len(empty):,} (row {empty[0]})")
    return lines


def _describe_copies(train, split, table, kind):
    """A line about what a split has in common with `train`; none if that is nothing."""
    is_copy = (table["length"] > 0) & np.isin(table["digest"], train["digest"])
    rows = table["row"][is_copy]
    if not len(rows):
        return []
    return [f"{split}: equal {NOUNS[kind]} are in train: {len(rows):,} (row {rows[0]})"]


def _summarize(tables, splits, kind):
    """One line, with a checksum of the tokens of all splits."""
    digest, sizes = hashlib.sha256(), []
    for split, table in tables.items():
        digest.update(len(table).to_bytes(8, "little") + table["digest"].tobytes())
        sizes.append(f"{len(np.unique(table['row'][table['length'] > 0])):,} {split}")
    tokens = sum(blocks.tokens for blocks in splits.values())
    short = digest.hexdigest()[:12]
    return f"{' and '.join(sizes)} {NOUNS[kind]}, {tokens:,} tokens (fingerprint {short})"
