"""Streams the documents of a language model as blocks, and continues exactly after a restart."""

import hashlib
import random
from functools import partial

import numpy as np
import torch

from utils.language import lanes
from utils.language.blocks import Stream
from utils.language.conversations import Encoder
from utils.language.documents import open_documents
from utils.language.messages import draft_row
from utils.language.mixture import MemoryReader, Shuffled, next_source
from utils.language.packing import join_segments
from utils.language.text_files import find_files, samples
from utils.language.token_settings import TokenSettings
from utils.language.tokens import Corpus
from utils.run.failures import RunFailed, UserError

LANES = 8  # parts of a stream
BUFFER = 64  # blocks among which a lane packs and shuffles
HELD_OUT_BLOCKS = 64  # of a stream, at most


def load_held_out(name, settings):
    """Reads the documents of a stream that are held out, at most `HELD_OUT_BLOCKS` blocks.

    Args:
        name (str), settings (TokenSettings): as for `tokens.load_tokens`.

    Returns:
        Corpus: with the split `val` only; the checksum is of its tokens, and of local files
        (`samples`).

    Raises:
        UserError: the stream cannot be read, or nothing to learn is held out.
    """
    source = open_documents(name, settings.subset)
    encode, size = _encoder(settings, source.kind), HELD_OUT_BLOCKS * settings.block_size
    rows = lanes.read_held_out(name, source.splits, encode, is_held_out, count_tokens, size)
    documents = [document for row in rows for document in row]
    blocks = _pack(documents, settings, source.kind)
    if blocks.target_tokens == 0:
        raise UserError(f"--dataset {name} has no token to predict in what is held out")
    files = None if name == "synthetic" else find_files(name)
    parts = [document.tokens.tobytes() for document in documents]
    digest = hashlib.sha256(b"".join([*parts, *(samples(files) if files else [])])).hexdigest()
    size = f"a stream, of which {blocks.tokens:,} tokens are held out"
    description = f"{size} (fingerprint {digest[:12]})"
    return Corpus({"val": blocks}, source.asked, description, [])


def count_tokens(documents):
    """The tokens of the documents of a row."""
    return sum(len(document.tokens) for document in documents)


def is_held_out(documents):
    """Whether the documents of a row are held out: a deterministic function of their tokens."""
    digest = hashlib.blake2b(digest_size=8)
    for document in documents:
        digest.update(document.tokens.tobytes())
    return int.from_bytes(digest.digest(), "little") % lanes.HELD_OUT_ONE_IN == 0


class TokenStream(lanes.LaneStream):
    """This process' share of an endless, shuffled stream of micro-batches, as of `Blocks`.

    A lane collects documents for about `buffer` blocks, packs them, yields the blocks in random
    order, and then fills the next buffer. Its position is the start of the buffer and the number of
    blocks yielded from it: after a restart the same buffer is read again.

    Of several sources, a lane takes documents in fixed proportions, each in turn; a block has
    documents of one of them. A source that ends begins again.

    Args:
        sources (list): names of data sets; one in memory is given as its `Blocks`.
        settings (TokenSettings): how documents become blocks.
        share (lanes.Share): what this process reads.
        weights (list[float]): the proportions of the documents.
    """

    def __init__(self, sources, settings, share, weights=(1.0,), buffer=BUFFER):
        seed, weights = settings.seed, [weight / sum(weights) for weight in weights]
        shuffled = {
            number: Shuffled(source, seed, number)
            for number, source in enumerate(sources)
            if not isinstance(source, str)
        }

        def open_source(number, lane):
            if number in shuffled:
                source = shuffled[number]
                return MemoryReader(source, lane, share.lanes), source.kind
            opened = open_documents(sources[number], settings.subset)
            encode = _encoder(settings, opened.kind)
            reader = lanes.open_reader(opened.splits, lane, share.lanes, encode, is_held_out)
            return reader, opened.kind

        def open_lane(lane):
            opened = [open_source(number, lane) for number in range(len(sources))]
            packs = [partial(_pack, settings=settings, kind=kind) for _, kind in opened]
            readers, tokens = [reader for reader, _ in opened], buffer * settings.block_size
            return _Lane(readers, packs, weights, tokens, lane, f"{seed} {lane}")

        super().__init__(open_lane, share)

    @classmethod
    def from_args(cls, args, accelerator, tokenizer, packed, sources, position=None):
        """Creates the share of this process from the command-line arguments, at `position`."""
        share = lanes.Share.from_args(args, accelerator, LANES, position)
        settings = TokenSettings.from_args(tokenizer, packed, args)
        return cls(sources, settings, share, args.mixture or [1.0])

    def collate(self, samples):
        """Tensors of blocks; `ids` are their places in this batch, `source` where they are from."""
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return {**batch, "ids": torch.arange(len(samples))}


class _Lane:
    """Yields blocks without end; `position` can be stored as JSON.

    Args:
        readers (list): of each source, yields lists of documents.
        packs (list): of each source, makes `Blocks` of documents.
        weights (list[float]): how many of the lists are those of each source.
        tokens (int): of a buffer.
        number (int): of the lane.
        seed (str): of the order.
    """

    def __init__(self, readers, packs, weights, tokens, number, seed):
        self.readers, self.packs, self.weights = readers, packs, weights
        self.tokens, self.number, self.seed = tokens, number, seed
        none = [0] * len(readers)
        # Where the buffer starts: the position of each reader, and how many lists were taken from
        # each; the number of the buffer, and the blocks taken from it. And of each source, the
        # tokens in all blocks so far, and the passes that are complete.
        self.position = {"readers": [None] * len(readers), "documents": none, "buffers": 0}
        self.position |= {"taken": 0, "tokens": none, "epochs": none}

    def __iter__(self):
        for reader, place in zip(self.readers, self.position["readers"], strict=True):
            reader.seek(place)
        lists = [iter(reader) for reader in self.readers]
        passes = max(reader.epoch for reader in self.readers)  # at the last block
        while True:
            start = self.position
            blocks, counts = self._fill(lists, start["documents"])
            order = [(source, i) for source, some in enumerate(blocks) for i in range(len(some))]
            random.Random(f"{self.seed} {start['buffers']}").shuffle(order)
            seen, epochs = list(start["tokens"]), [reader.epoch for reader in self.readers]
            following = {"readers": [reader.position for reader in self.readers]}
            following |= {"documents": counts, "buffers": start["buffers"] + 1, "taken": 0}
            for taken in range(start["taken"], len(order)):
                source, index = order[taken]
                seen[source] += blocks[source].tokens_of(index)
                place = following if taken + 1 == len(order) else {**start, "taken": taken + 1}
                self.position = {**place, "tokens": list(seen), "epochs": epochs}
                yield {**blocks[source][index], "source": torch.tensor(source)}
            if order:
                passes = max(epochs)
            elif max(epochs) > passes + 1:
                raise RunFailed(
                    f"lane {self.number} of the stream has nothing to learn: its documents have no "
                    "answers, or none that fits in a block",
                    retry=False,
                    rank_variable=None,
                )
            else:  # too long for a block, or nothing to learn
                self.position = {**following, "tokens": seen, "epochs": epochs}

    def _fill(self, lists, counts):
        """The blocks of a buffer, of each source; and how many lists were taken from each so far.

        Args:
            lists (list): of each source, an iterator over lists of documents.
            counts (list[int]): how many were taken before.
        """
        documents, tokens, counts = [[] for _ in lists], 0, list(counts)
        while tokens < self.tokens:
            source = next_source(self.weights, counts, self.number)
            counts[source] += 1
            # All documents of a row: the state of a reader is between two rows.
            row = next(lists[source])
            documents[source] += row
            tokens += count_tokens(row)
        pairs = zip(self.packs, documents, strict=True)
        return [pack(some) if some else [] for pack, some in pairs], counts


def _encoder(settings, kind):
    """What `lanes.RowReader` asks: a row, and text that names it -> its documents (list)."""
    encoder = Encoder(settings.tokenizer, loss_on=settings.loss_on)
    return lambda row, where: encoder.encode(list(draft_row(row, encoder, kind, where)))


def _pack(documents, settings, kind):
    """Blocks of documents that are in memory; a text may be divided into segments."""
    columns = [(d.begins, len(d.tokens), d.answer, d.bytes) for d in documents]
    begins, *others = (np.array(column, np.int64) for column in zip(*columns, strict=True))
    joined = join_segments(np.flatnonzero(begins), *others)
    # One array, because a document must not lie in several.
    tokens = [np.concatenate([document.tokens for document in documents])]
    is_target = None
    if kind != "text":
        is_target = [np.concatenate([document.is_target for document in documents])]
    return settings.pack(Stream(tokens, is_target), joined, kind)[0]
