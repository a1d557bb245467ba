"""Makes blocks of the tokens of a data set, which is tokenized once per machine, or streamed.

`load_tokens` tokenizes the rows in shards, by as many processes as a machine has cores, into files
that are mapped into memory. A shard that is done is a file of the cache: a run that is interrupted
goes on with the others.

`open_stream` tokenizes documents during training, and continues exactly after a restart.
"""

import functools
import hashlib
import itertools
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from utils.data.evaluation import with_progress
from utils.data.loaders import explain, sample_seed, set_up_worker
from utils.data.sharing import cached, map_bytes, path_in_cache
from utils.data.tables import hold_out
from utils.language import lanes
from utils.language.conversations import Document, Encoder, unread_keys
from utils.language.documents import find_documents
from utils.language.packing import SEGMENT, Parts, Stream, join_segments
from utils.language.rows import checksum
from utils.run import devices, process
from utils.run.arguments import shown
from utils.run.failures import UserError
from utils.run.output import plural

NOUNS = {"messages": "conversations", "prompt": "prompts with completions", "text": "documents"}
VERSION = 5  # of what a file has: another one makes new files
TOKEN = [("token", np.int32), ("is_target", np.uint8)]  # texts have no such field
EMPTY = Document(np.zeros(0, np.int32), np.zeros(0, np.uint8))
AT_ONCE = 32  # drafts that are tokenized at once; one of a text has 250 kB at most
MOST_LANES = 64  # parts of a stream: common numbers of processes divide it
BUFFER = 64  # blocks among which a lane packs and shuffles
HELD_OUT_BLOCKS = 64  # of a stream, at most
TOKEN_BYTES = 4  # int32


class Corpus(NamedTuple):
    """A tokenized data set.

    splits: dict, `train`, and `val` or else `test` -> Blocks; of a stream, only what is held out.
    kind: of its documents: `messages`, `prompt` or `text`.
    description: one line, with a checksum of the tokens.
    details: more lines: documents, tokens, targets, padding, and what was left out.
    """

    splits: dict
    kind: str
    description: str
    details: list

    @property
    def held_out(self):
        """The name of the split that is held out."""
        return "val" if "val" in self.splits else "test"


def load_tokens(name, settings):
    """Loads a data set as blocks of tokens, a `Corpus`.

    Args: name (str): see `documents.find_documents`. settings (TokenSettings): what is made of it.

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
        splits[split], counts = settings.pack(streams[split], table[table["length"] > 0])
        if splits[split].target_tokens == 0:
            raise UserError(f"--dataset {name} has no token to predict in its {split} split")
        details += _describe(tables, split, splits[split], kind, counts)
    return Corpus(splits, kind, _summarize(tables, splits, kind), details)


def divide(segments, settings):
    """Divides a split: the documents to train on, and those to hold out; of one text its end.

    Args:
        segments: SEGMENT [segments], as `tokenize` returns them.
        settings (TokenSettings): `val_fraction` of the documents that have tokens, at least one,
            and `seed`. Equal ones stay together, and those of a row.

    Returns:
        tuple: two arrays of DOCUMENT. Raises UserError if there is only one document.
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
    chosen = np.isin(documents["row"], rows[hold_out(keys, fraction)])
    return documents[~chosen], documents[chosen]


def _describe(tables, split, blocks, kind, counts):
    """Lines about a split: its size, what was left out, and what is in `train`, too."""
    table = tables[split]
    used = table["length"] > 0
    sizes = [f"{used.sum():,} {NOUNS[kind]}", f"{blocks.tokens:,} tokens"]
    if kind != "text":
        sizes.append(f"{blocks.target_tokens:,} targets")
    sizes += [f"{number:,} {what}" for what, number in counts.items() if number]
    padding = 100 * (1 - blocks.tokens / len(blocks) / blocks.block_size)
    lines = [f"{', '.join(sizes)}; {plural(len(blocks), 'block')}, {padding:.1f} % padding"]
    empty = table["row"][~used]
    if len(empty):
        what = "empty documents" if kind == "text" else "conversations without an answer"
        lines.append(f"left out: {what}: {len(empty):,} (row {empty[0]})")
    copies = table["row"][used & np.isin(table["digest"], tables["train"]["digest"])]
    if split != "train" and len(copies):
        lines.append(f"equal {NOUNS[kind]} are in train: {len(copies):,} (row {copies[0]})")
    return [f"{split}: {line}" for line in lines]


def _summarize(tables, splits, kind):
    """One line, with a checksum of the tokens of all splits."""
    digest, sizes = hashlib.sha256(), []
    for split, table in tables.items():
        digest.update(len(table).to_bytes(8, "little") + table["digest"].tobytes())
        sizes.append(f"{len(np.unique(table['row'][table['length'] > 0])):,} {split}")
    tokens = sum(blocks.tokens for blocks in splits.values())
    short = digest.hexdigest()[:12]
    return f"{' and '.join(sizes)} {NOUNS[kind]}, {tokens:,} tokens (fingerprint {short})"


# --------------------------------------------------------------------------------------- shards


class Shards(Dataset):
    """The shards of the rows of a split; item N makes the file of shard N, unless it is there.

    Args:
        rows (Rows): of the split.
        encoder (Encoder): makes tokens of them.
        kind (str): see `documents.KINDS`.
    """

    def __init__(self, rows, encoder, kind):
        self._parts, self._encoder, self._kind = rows.shards(), encoder, kind
        self._version = [fingerprint_of(encoder), kind, rows.fingerprint]

    def __len__(self):
        return len(self._parts)

    def __getitem__(self, number):
        content = _write(self._parts[number], self._encoder, self._kind)
        cached("tokens", content, self._version_of(number))
        return number

    def _version_of(self, number):
        return [*self._version, self._parts[0].shard_size, number]

    def file(self, number):
        """The path of the file of a shard."""
        return path_in_cache("tokens", self._version_of(number))

    def missing(self):
        """The numbers (list) of the shards without a file."""
        return [number for number in range(len(self)) if not self.file(number).exists()]


def tokenize(rows, encoder, kind):
    """Tokenizes rows, unless the cache has their tokens. Args: as of `Shards`.

    Returns:
        tuple: the tokens, a `Stream`; the documents, or segments of them, SEGMENT [segments].

    Raises:
        UserError: a row cannot be used, or the cache cannot be written.
    """
    shards = Shards(rows, encoder, kind)
    if missing := shards.missing():
        _make(shards, missing)
    tokens, segments = zip(*(_read(shards.file(n), kind) for n in range(len(shards))), strict=True)
    is_target = None if kind == "text" else Parts([part["is_target"] for part in tokens])
    return Stream(Parts([part["token"] for part in tokens]), is_target), np.concatenate(segments)


def _make(shards, missing):
    """Makes the files of the shards that are missing, by several processes if they are several."""
    workers = min(devices.cores(), len(missing))
    workers = workers if workers > 1 else 0
    # Without this, the library would warn of the fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    loader = DataLoader(
        shards,
        batch_size=None,
        sampler=missing,
        num_workers=workers,
        worker_init_fn=_set_up_worker,
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
    )
    try:
        list(with_progress(loader, len(missing), "tokenizing", "shard", process.is_main()))
    except UserError as error:  # of a worker, with its traceback in the message
        error.with_traceback(None)  # it would keep the workers, which then take long to end
        raise UserError(explain(error) or error) from None


def _set_up_worker(worker):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork has no threads
    set_up_worker(worker)


def _read(file, kind):
    """The tokens in a file, and the segments that they are of, whose number stands at the end."""
    data = map_bytes(file).numpy()
    begin = len(data) - 8 - int(data[-8:].view(np.int64)[0]) * SEGMENT.itemsize
    return data[:begin].view(_fields(kind)), data[begin:-8].view(SEGMENT)


def _fields(kind):
    return TOKEN[:1] if kind == "text" else TOKEN


@functools.cache  # of all splits
def fingerprint_of(encoder):
    """A checksum of what decides about tokens: the tokenizer with its template, and `loss_on`."""
    digest = hashlib.sha256(repr([VERSION, encoder.loss_on]).encode())
    with tempfile.TemporaryDirectory() as folder:
        encoder.tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _write(rows, encoder, kind):
    """Yields the content of a file: tokens, the segments that they are of, and their number."""
    drafts, segments = _drafts(rows, encoder, kind), []
    while batch := list(itertools.islice(drafts, AT_ONCE)):
        documents = iter(encoder.encode([draft for _, draft in batch if draft is not None]))
        for number, draft in batch:
            document = EMPTY if draft is None else next(documents)
            tokens = np.empty(len(document.tokens), _fields(kind))
            tokens["token"] = document.tokens
            if kind != "text":
                tokens["is_target"] = document.is_target
            yield tokens.tobytes()
            segments.append(document.segment(number))
    segments = np.array(segments, SEGMENT)
    yield segments.tobytes()
    yield np.int64(len(segments)).tobytes()


def _drafts(rows, encoder, kind):
    """Yields pairs of a row's number and a draft of it; of an empty row, one pair with None."""
    for number, row in enumerate(rows, rows.first):
        empty = True
        # A long text is drafted segment by segment, so that it is never in memory as a whole.
        for draft in encoder.draft(row, kind, f"row {number} of {rows.where}"):
            empty = False
            yield number, draft
        if empty:
            yield number, None


# --------------------------------------------------------------------------------------- streams


def load_held_out(name, settings):
    """Reads the documents of a stream that are held out, at most `HELD_OUT_BLOCKS` blocks.

    Args: as of `load_tokens`.

    Returns:
        Corpus: with the split `val` only; the checksum is of its tokens, and of local files.

    Raises:
        UserError: the stream cannot be read, or nothing to learn is held out.
    """
    source = find_documents(name, settings, streaming=True)
    encode = _encoder(settings, source.kind)
    size = HELD_OUT_BLOCKS * settings.block_size * TOKEN_BYTES
    rows = lanes.read_held_out(name, source.splits, encode, size)
    blocks = _pack(rows, settings)
    if blocks.target_tokens == 0:
        raise UserError(f"--dataset {name} has no token to predict in what is held out")
    files = source.splits["train"].fingerprint
    short = checksum(b"".join(map(bytes, rows)), files.encode())
    size = f"a stream, of which {blocks.tokens:,} tokens are held out"
    return Corpus({"val": blocks}, source.kind, f"{size} (fingerprint {short})", [])


class OfRow(list):
    """The documents of a row of a stream."""

    def __bytes__(self):
        return b"".join(document.tokens.tobytes() for document in self)


def count_lanes(batch_size):
    """The parts of a stream: of 1, 2, 4, ... 64 the largest number that divides a batch."""
    return math.gcd(batch_size, MOST_LANES)


def open_stream(name, settings, share, buffer=BUFFER):
    """Opens this process' share of an endless, shuffled stream of `Blocks`, a `lanes.LaneStream`.

    A source that ends begins again. Raises UserError if it cannot be opened.

    Args:
        name (str), settings (TokenSettings): as of `load_tokens`.
        share (lanes.Share): what this process reads.
        buffer (int): blocks among which a lane packs and shuffles.
    """

    def open_lane(lane):
        source = find_documents(name, settings, streaming=True)
        encode = _encoder(settings, source.kind)
        reader = lanes.RowReader(source.splits, lane, share.lanes, encode)
        size = buffer * settings.block_size * TOKEN_BYTES
        return lanes.Lane(reader, lambda rows: _pack(rows, settings), size, lane, settings.seed)

    return lanes.LaneStream(open_lane, share, _collate)


def _encoder(settings, kind):
    """What `lanes.RowReader` asks: a row, and text that names it -> its documents (list)."""
    encoder = Encoder(settings.tokenizer, settings.loss_on)
    return lambda row, where: OfRow(encoder.encode(list(encoder.draft(row, kind, where))))


def _pack(rows, settings):
    """Blocks of the documents of rows, in memory; a text may be divided into segments."""
    documents = [document for row in rows for document in row]
    segments = [document.segment(number) for number, row in enumerate(rows) for document in row]
    segments = np.array(segments, SEGMENT)
    tokens, is_target = np.concatenate([document.tokens for document in documents]), None
    if documents[0].is_target is not None:  # these are no texts
        is_target = np.concatenate([document.is_target for document in documents])
    return settings.pack(Stream(tokens, is_target), join_segments(segments))[0]


def _collate(blocks):
    """Tensors of blocks; `ids` are their places in this batch."""
    batch = {name: torch.stack([block[name] for block in blocks]) for name in blocks[0]}
    return {**batch, "ids": torch.arange(len(blocks))}
