"""Streams the documents of a language model as blocks, and continues exactly after a restart."""

import math
from functools import partial

import numpy as np
import torch

from utils.data.permutation import Permutation, sample_seed
from utils.language import lanes
from utils.language.conversations import Document, Encoder
from utils.language.documents import find_documents
from utils.language.packing import SEGMENT, Stream, join_segments
from utils.language.rows import checksum
from utils.language.tokens import Corpus
from utils.run.failures import UserError

MOST_LANES = 64  # parts of a stream: common numbers of processes divide it
BUFFER = 64  # blocks among which a lane packs and shuffles
HELD_OUT_BLOCKS = 64  # of a stream, at most
TOKEN_BYTES = 4  # int32


def load_held_out(name, settings):
    """Reads the documents of a stream that are held out, at most `HELD_OUT_BLOCKS` blocks.

    Args: as of `tokens.load_tokens`.

    Returns:
        Corpus: with the split `val` only; the checksum is of its tokens, and of local files.

    Raises:
        UserError: the stream cannot be read, or nothing to learn is held out.
    """
    source = find_documents(name, settings, streaming=True)
    encode = _encoder(settings, source.kind)
    size = HELD_OUT_BLOCKS * settings.block_size * TOKEN_BYTES
    rows = lanes.read_held_out(name, source.splits, encode, content_of, size)
    blocks = _pack(rows, settings, source.kind)
    if blocks.target_tokens == 0:
        raise UserError(f"--dataset {name} has no token to predict in what is held out")
    short = checksum(b"".join(map(content_of, rows)), source.sample)
    size = f"a stream, of which {blocks.tokens:,} tokens are held out"
    return Corpus({"val": blocks}, source.asked, f"{size} (fingerprint {short})", [])


def content_of(documents):
    """The bytes of the tokens of the documents of a row."""
    return b"".join(document.tokens.tobytes() for document in documents)


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
            kind, encode = opened.kind, _encoder(settings, opened.kind)
            reader = lanes.RowReader(opened.splits, lane, share.lanes, encode, content_of)
        else:
            kind = "text" if source.stream.is_target is None else "messages"
            seed = sample_seed(settings.seed, 0, -1 - number) >> 1  # below 2**63
            reader = MemoryReader(source, seed, lane, share.lanes)
        pack = partial(_pack, settings=settings, kind=kind)
        return lanes.Source(reader, pack, weights[number] / sum(weights))

    def open_lane(lane):
        opened = [open_source(number, lane) for number in range(len(sources))]
        size = buffer * settings.block_size * TOKEN_BYTES
        return lanes.Lane(opened, content_of, size, lane, settings.seed)

    return lanes.LaneStream(open_lane, share, _collate)


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
        count = len(pieces.starts)
        while True:
            epoch, place = divmod(self.position * self._lanes + self._lane, count)
            piece = Permutation(count, self._seed, epoch)(np.array([place]))[0]
            start = pieces.starts[piece]
            run = slice(start, start + pieces.lengths[piece] + 1)
            is_target = None if stream.is_target is None else stream.is_target[run]
            self.position += 1
            yield [Document(stream.tokens[run], is_target)]


def _encoder(settings, kind):
    """What `lanes.RowReader` asks: a row, and text that names it -> its documents (list)."""
    encoder = Encoder(settings.tokenizer, settings.loss_on)
    return lambda row, where: encoder.encode(list(encoder.draft(row, kind, where)))


def _pack(rows, settings, kind):
    """Blocks of the documents of rows, in memory; a text may be divided into segments."""
    documents = [document for row in rows for document in row]
    segments = np.array([document.segment() for document in documents], SEGMENT)
    tokens, is_target = np.concatenate([document.tokens for document in documents]), None
    if kind != "text":
        is_target = np.concatenate([document.is_target for document in documents])
    return settings.pack(Stream(tokens, is_target), join_segments(segments), kind)[0]


def _collate(blocks):
    """Tensors of blocks; `ids` are their places in this batch."""
    batch = {name: torch.stack([block[name] for block in blocks]) for name in blocks[0]}
    return {**batch, "ids": torch.arange(len(blocks))}
