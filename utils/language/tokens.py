"""Makes blocks of the tokens of a data set, which is tokenized once per machine, or streamed.

`load_tokens` tokenizes the rows in shards, by as many processes as a machine has cores, into files
that are mapped into memory. A shard that is done is a file of the cache: a run that is interrupted
goes on with the others. The machines of a run whose cache is on one disk share the work.

`open_stream` tokenizes documents during training, and continues exactly after a restart.
"""

import contextlib
import functools
import hashlib
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from utils.data.evaluation import with_progress
from utils.data.loaders import explain, sample_seed, set_up_worker, shuffled
from utils.data.sharing import cached, map_bytes, path_in_cache
from utils.data.tables import hold_out
from utils.language import lanes
from utils.language.chats import unread_keys
from utils.language.conversations import Document, Encoder
from utils.language.documents import asked, find_documents
from utils.language.packing import SEGMENT, Stream, join_segments
from utils.language.rows import checksum
from utils.run import devices, process
from utils.run.arguments import shown
from utils.run.failures import UserError
from utils.run.output import plural

NOUNS = {"messages": "conversations", "prompt": "prompts with completions", "text": "documents"}
VERSION = 4  # of what a file has: another one makes new files
TOKEN = [("token", np.int32), ("is_target", np.uint8)]  # texts have no such field
EMPTY = Document(np.zeros(0, np.int32), np.zeros(0, np.uint8))
CHARACTERS_AT_ONCE, ROWS_AT_ONCE = 2_000_000, 1000  # that are tokenized at once
MOST_LANES = 64  # parts of a stream: common numbers of processes divide it
BUFFER = 64  # blocks among which a lane packs and shuffles
HELD_OUT_BLOCKS = 64  # of a stream, at most
TOKEN_BYTES = 4  # int32
STAGGER = (math.sqrt(5) - 1) / 2  # multiples of it are spread evenly over 0 to 1


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
        used = table[table["length"] > 0]
        splits[split], counts = settings.pack(streams[split], used)
        if splits[split].target_tokens == 0:
            raise UserError(f"--dataset {name} has no token to predict in its {split} split")
        details += [f"{split}: {line}" for line in _describe(table, splits[split], kind, counts)]
    for split in tables.keys() - {"train"}:
        details += _describe_copies(tables["train"], split, tables[split], kind)
    if kind == "text" and settings.tokenizer.eos_token_id is None:
        details.append("the tokenizer has no end token: documents end without one")
    return Corpus(splits, asked(source), _summarize(tables, splits, kind), details)


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


def _describe(table, blocks, kind, counts):
    """Lines about a split: its size, and what was left out."""
    count = int((table["length"] > 0).sum())
    sizes = [f"{count:,} {NOUNS[kind]}", f"{blocks.tokens:,} tokens"]
    if kind != "text":
        sizes.append(f"{blocks.target_tokens:,} targets")
    sizes += [f"{number:,} {what}" for what, number in counts.items() if number]
    padding = 100 * (1 - blocks.tokens / len(blocks) / blocks.block_size)
    each = f"{count / len(blocks):.1f} per block, {padding:.1f} % padding"
    packed = f"{plural(len(blocks), 'block')}, {each}"
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


# --------------------------------------------------------------------------------------- shards


class _Gone(Exception):
    """Another machine has joined the shards, and removed them."""


class Shards(Dataset):
    """The shards of the rows of a split; item N makes the file of shard N, unless it is there.

    Args:
        rows (Rows): of the split.
        encoder (Encoder): makes tokens of them.
        kind (str): see `documents.KINDS`.
    """

    def __init__(self, rows, encoder, kind):
        self._parts, self._encoder, self._kind = rows.shards(), encoder, kind
        self.version = [fingerprint_of(encoder), kind, rows.fingerprint]

    def __len__(self):
        return len(self._parts)

    def __getitem__(self, number):
        part = self._parts[number]
        cached("tokens", _write(part, self._encoder, self._kind), self.version_of(number))
        return number

    def version_of(self, number):
        """The version of the file of a shard: the only one is that of all rows."""
        sizes = [self._parts[0].shard_size, number]
        return self.version if len(self) == 1 else [*self.version, *sizes]

    def file(self, number):
        """The path of the file of a shard."""
        return path_in_cache("tokens", self.version_of(number))

    def missing(self):
        """The numbers of the shards without a file; each machine begins elsewhere."""
        machine = int(os.environ.get("GROUP_RANK", 0))
        numbers = [number for number in range(len(self)) if not self.file(number).exists()]
        first = len(numbers) * machine // int(os.environ.get("GROUP_WORLD_SIZE", 1))
        return numbers[first:] + numbers[:first]


def tokenize(rows, encoder, kind):
    """Tokenizes rows, unless the cache has their tokens. Args: as of `Shards`.

    Returns:
        tuple: the tokens, a `Stream`; the documents, or segments of them, SEGMENT [segments].

    Raises:
        UserError: a row cannot be used, or the cache cannot be written.
    """
    shards = Shards(rows, encoder, kind)
    file = path_in_cache("tokens", shards.version)
    if not file.exists():
        _make(shards)
    if len(shards) > 1 and not file.exists():
        with contextlib.suppress(_Gone):
            cached("tokens", _join(shards), shards.version)
        for number in range(len(shards)):
            shards.file(number).unlink(missing_ok=True)
    tokens, segments = _divide(file)
    tokens = tokens.view(_fields(kind))
    is_target = None if kind == "text" else tokens["is_target"]
    return Stream(tokens["token"], is_target), segments.view(SEGMENT)


def _make(shards):
    """Makes the files of the shards that are missing, by several processes if they are several."""
    missing = shards.missing()
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


def _join(shards):
    """Yields the content of one file: the tokens of all shards, then all their segments."""
    count = 0
    for part in range(2):
        for number in range(len(shards)):
            try:
                content = _divide(shards.file(number))[part]
            except FileNotFoundError:
                raise _Gone from None
            count += part * len(content) // SEGMENT.itemsize
            yield content
    yield np.int64(count).tobytes()


def _divide(file):
    """The parts of a file, uint8: tokens, and segments, the number of which stands at the end."""
    data = map_bytes(file).numpy()
    count = int(data[-8:].view(np.int64)[0])
    begin = len(data) - 8 - count * SEGMENT.itemsize
    return data[:begin], data[begin:-8]


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
    segments = []
    for drafts in _drafts(rows, encoder, kind):
        documents = iter(encoder.encode([draft for _, draft in drafts if draft is not None]))
        for number, draft in drafts:
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
    """Yields lists of what is tokenized at once: pairs of a row's number and a draft of it.

    Each row is there at least once: an empty one with None.
    """
    waiting, characters = [], 0
    for number, row in enumerate(rows, rows.first):
        # A long text is drafted segment by segment, so that it is never in memory as a whole.
        empty = True
        for draft in encoder.draft(row, kind, f"row {number} of {rows.where}"):
            empty, characters = False, characters + sum(len(part.text) for part in draft.parts)
            waiting.append((number, draft))
            if characters >= CHARACTERS_AT_ONCE or len(waiting) >= ROWS_AT_ONCE:
                yield waiting
                waiting, characters = [], 0
        if empty:
            waiting.append((number, None))
    yield waiting


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
    return Corpus({"val": blocks}, asked(source), f"{size} (fingerprint {short})", [])


class OfRow(list):
    """The documents of a row of a stream."""

    def __bytes__(self):
        return b"".join(document.tokens.tobytes() for document in self)


def count_lanes(batch_size):
    """The parts of a stream: of 1, 2, 4, ... 64 the largest number that divides a batch."""
    return math.gcd(batch_size, MOST_LANES)


def open_stream(sources, settings, share, weights=(1.0,), buffer=BUFFER):
    """Opens this process' share of an endless, shuffled stream of `Blocks`, a `lanes.LaneStream`.

    A lane takes rows of several sources in fixed proportions; a block has documents of one of them.
    A source that ends begins again. Raises UserError if one cannot be opened.

    Args:
        sources (list): names of data sets; one in memory is given as its `Blocks`.
        settings (TokenSettings): how documents become blocks.
        share (lanes.Share): what this process reads.
        weights (list[float]): the proportions of the sources.
        buffer (int): blocks among which a lane packs and shuffles.
    """

    def open_source(number, lane):
        source = sources[number]
        if isinstance(source, str):
            opened = find_documents(source, settings, streaming=True)
            encode = _encoder(settings, opened.kind)
            return lanes.RowReader(opened.splits, lane, share.lanes, encode)
        seed = sample_seed(settings.seed, 0, -1 - number) >> 1  # below 2**63
        return MemoryReader(source, seed, lane, share.lanes)

    def pack(rows):
        parts = [[row for row in rows if row.source == number] for number in range(len(sources))]
        return ConcatDataset([_pack(part, settings) for part in parts if part])

    def open_lane(lane):
        readers = [open_source(number, lane) for number in range(len(sources))]
        reader = MixedReader(readers, [weight / sum(weights) for weight in weights], lane)
        size = buffer * settings.block_size * TOKEN_BYTES
        return lanes.Lane(reader, pack, size, lane, settings.seed)

    return lanes.LaneStream(open_lane, share, _collate)


class MixedReader:
    """Yields the documents of several readers in fixed proportions, each with its `source`.

    Args:
        readers (list): as for `lanes.Lane`.
        shares (list[float]): of the documents that come from each; their sum is 1.
        lane (int): see `next_source`.
    """

    def __init__(self, readers, shares, lane):
        self.readers, self.shares, self.lane = readers, shares, lane
        self.seek(None)

    @property
    def position(self):
        """The positions of the readers, and the documents taken from each."""
        places = [reader.position for reader in self.readers]
        return {"readers": places, "documents": [*self.taken]}

    def seek(self, position):
        """Continues at a position; None: at the beginning."""
        for number, reader in enumerate(self.readers):
            reader.seek(position and position["readers"][number])
        none = [0] * len(self.readers)
        self.taken = [*position["documents"]] if position else none  # documents of each

    def __iter__(self):
        documents = [iter(reader) for reader in self.readers]
        while True:
            number = next_source(self.shares, self.taken, self.lane)
            self.taken[number] += 1
            document = next(documents[number])
            document.source = number
            yield document


def next_source(shares, taken, lane=0):
    """The source that is furthest behind its share: each stays within 2 documents of it.

    Args:
        shares (list[float]): their sum is 1.
        taken (list[int]): the number of documents taken from each so far.
        lane (int): orders of other lanes are shifted, so that together they are as even.
    """
    total = sum(taken) + 1
    behind = [
        share * total - count + lane * (source + 1) * STAGGER % 1
        for source, (share, count) in enumerate(zip(shares, taken, strict=True))
    ]
    return behind.index(max(behind))


class MemoryReader:
    """Yields every `lanes`-th document of `Blocks` without end, for one lane.

    Each pass has another order, by the seed. A document is a conversation, or a part of a text that
    is no longer than a block; `position` is how many were taken.
    """

    def __init__(self, blocks, seed, lane, lanes):
        self._blocks, self._seed, self.position = blocks, seed, 0
        self._lane, self._lanes = lane, lanes

    def seek(self, position):
        """Continues at a position; None: at the beginning."""
        self.position = position or 0

    def __iter__(self):
        stream, pieces = self._blocks.stream, self._blocks.pieces
        count, last = len(pieces.starts), None
        while True:
            epoch, place = divmod(self.position * self._lanes + self._lane, count)
            if epoch != last:
                order, last = shuffled(count, self._seed, epoch), epoch
            piece = order[place]
            start = pieces.starts[piece]
            run = slice(start, start + pieces.lengths[piece] + 1)
            is_target = None if stream.is_target is None else stream.is_target[run]
            self.position += 1
            yield OfRow([Document(stream.tokens[run], is_target)])


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
