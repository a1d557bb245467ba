"""Tokenizes the rows of a data set in shards, by as many processes as a machine has cores.

A shard that is done is a file of the cache: a run that is interrupted goes on with the others. The
machines of a run whose cache is on one disk share the work.
"""

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset

from utils.data.cache_files import cached, map_bytes, path_in_cache
from utils.data.loaders import explain, set_up_worker
from utils.language.conversations import Document
from utils.language.packing import SEGMENT, Stream
from utils.report.progress import with_progress
from utils.run import devices, process
from utils.run.failures import UserError

VERSION = 5  # of what a file has: another one makes new files
TOKEN = [("token", np.int32), ("is_target", np.uint8)]  # texts have no such field
EMPTY = Document(np.zeros(0, np.int32), np.zeros(0, np.uint8))
CHARACTERS_AT_ONCE, ROWS_AT_ONCE = 2_000_000, 1000  # that are tokenized at once


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
    """Tokenizes rows, unless the cache has their tokens.

    Args: as of `Shards`.

    Returns:
        tuple: the tokens, a `Stream`; where the documents, or segments of them, are, SEGMENT
        [segments].

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
    except UserError as error:  # of a worker, with its traceback
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
            content = tokens.tobytes()
            yield content
            digest = hashlib.blake2b(content, digest_size=8).digest()
            digest = int.from_bytes(digest, "little", signed=True)
            segments.append(document.segment(number, digest))
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
