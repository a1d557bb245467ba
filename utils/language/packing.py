"""Cuts text into blocks, packs conversations into blocks by best fit; the settings of both."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from utils.language.blocks import Blocks, Pieces
from utils.language.conversations import ANSWERS, pad_id_of


@dataclass(frozen=True)
class TokenSettings:
    """How the rows of a data set become blocks of tokens.

    Args:
        tokenizer: of the `transformers` library.
        block_size (int): positions of a block.
        subset (str | None): a configuration of a Hub id.
        val_fraction (float): the share of the rows that is held out if the data has neither a
            split `val` nor `test`; of a single text, its last part.
        seed (int): decides which rows are held out, the order of a stream, and `synthetic`.
        loss_on (str): `answers` or `all`: which tokens of a conversation are targets.
        too_long (str): `truncate` or `drop`: conversations longer than a block.
        packed (bool): False: each block has positions of one document only.
    """

    tokenizer: object
    block_size: int
    subset: str | None = None
    val_fraction: float = 0.1
    seed: int = 0
    loss_on: str = ANSWERS
    too_long: str = "truncate"
    packed: bool = True

    @classmethod
    def from_args(cls, tokenizer, packed, args):
        """The settings that the command-line arguments give."""
        names = "block_size subset val_fraction seed loss_on too_long".split()
        return cls(tokenizer, packed=packed, **{name: getattr(args, name) for name in names})

    def pack(self, stream, documents, kind):
        """Makes blocks of documents.

        Args:
            stream (Stream), documents (Documents): the tokens, and where each document is.
            kind (str): see `documents.KINDS`.

        Returns:
            tuple: `Blocks`; dict[str, int], how many conversations were cut off or left out.
        """
        place = stream, documents, self.block_size, pad_id_of(self.tokenizer)
        if kind == "text":
            return cut_text(*place, packed=self.packed), {}
        return pack_conversations(*place, too_long=self.too_long, packed=self.packed)


class Documents(NamedTuple):
    """Where the documents of a split lie in a stream of tokens, one element for each document.

    starts: int64, the place of the first token in the stream.
    lengths: int64, the number of tokens.
    answers: int64, of conversations, the number of tokens before the last answer; -1: none.
    bytes: int64, of texts, the UTF-8 bytes that the targets predict.
    """

    starts: np.ndarray
    lengths: np.ndarray
    answers: np.ndarray
    bytes: np.ndarray


def join_segments(first, lengths, answers, sizes):
    """The `Documents` of segments that follow each other in a stream.

    Args:
        first (int64 [documents]): the first segment of each.
        lengths, answers, sizes (int64 [segments]): tokens, answer and bytes of each segment.
    """
    starts = np.cumsum(lengths) - lengths
    lengths, sizes = np.add.reduceat(lengths, first), np.add.reduceat(sizes, first)
    return Documents(starts[first], lengths, answers[first], sizes)


def cut_text(stream, documents, block_size, pad_id, *, packed=True):
    """Cuts texts into blocks: each token except the first of a document is a target once.

    Args:
        stream (Stream): the tokens.
        documents (Documents): in the order of the blocks.
        packed (bool): the texts follow each other, and only the last block has padding. False: a
            block has positions of one document only.

    Returns:
        Blocks.
    """
    kept = documents.lengths > 1
    starts, positions = documents.starts[kept], documents.lengths[kept] - 1
    begins, total = np.cumsum(positions) - positions, int(positions.sum())
    if packed:
        cuts = np.union1d(begins, np.arange(0, total, block_size))
        blocks = cuts // block_size
    else:
        counts = -(-positions // block_size)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        cuts = np.repeat(begins, counts) + numbers * block_size
        blocks = np.arange(len(cuts))
    owners = np.searchsorted(begins, cuts, side="right") - 1
    lengths = np.diff(np.append(cuts, total))
    pieces = Pieces(starts[owners] + cuts - begins[owners], lengths, blocks)
    return Blocks(stream, pieces, block_size, pad_id, bytes=int(documents.bytes[kept].sum()))


def pack_conversations(stream, documents, block_size, pad_id, *, too_long="truncate", packed=True):
    """Packs conversations into blocks; none is divided.

    Args:
        stream (Stream): the tokens.
        documents (Documents): where each is.
        too_long (str): what happens to those of more than `block_size` positions: `truncate` or
            `drop`.
        packed (bool): best fit decreasing. False: one conversation in each block.

    Returns:
        tuple: Blocks; and dict[str, int], how many were `truncated`, `dropped` as too long, and
        left out because they had `no targets` left.
    """
    positions = documents.lengths - 1
    long = positions > block_size
    kept = ~long if too_long == "drop" else np.ones(len(long), bool)
    positions = np.minimum(positions, block_size)
    empty = kept & (stream.count_targets(documents.starts + 1, positions) == 0)
    kept &= ~empty
    counts = {
        "truncated": int((long & kept).sum()),
        "dropped": int(long.sum()) if too_long == "drop" else 0,
        "no targets": int(empty.sum()),
    }
    chosen = np.flatnonzero(kept)
    lengths = positions[chosen]
    blocks = best_fit(lengths, block_size) if packed else np.arange(len(lengths))
    order = np.argsort(blocks, kind="stable")
    pieces = Pieces(documents.starts[chosen[order]], lengths[order], blocks[order])
    answers = _first_answers(documents, kept & ~long)
    blocks = Blocks(stream, pieces, block_size, pad_id, answers=answers)
    return blocks, counts


def best_fit(lengths, size):
    """Packs items into as few bins as best fit decreasing finds: the longest item first, each into
    the bin in which it leaves the least space.

    Args:
        lengths (int64 [items]): 1 to `size`.
        size (int): of a bin.

    Returns:
        int64 [items]: the bin of each item.
    """
    bins, count = np.empty(len(lengths), np.int64), 0
    waiting = [[] for _ in range(size + 1)]  # space -> the bins that have as much left
    spaces = 0  # bit s is set: a bin has space s left
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        enough = spaces >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1  # the lowest bit
            chosen = waiting[space].pop()
            if not waiting[space]:
                spaces ^= 1 << space
        else:
            space, chosen, count = size, count, count + 1
        bins[item] = chosen
        rest = space - length
        if rest:
            waiting[rest].append(chosen)
            spaces |= 1 << rest
    return bins


def _first_answers(documents, kept, count=1000):
    """The place, the length, and the tokens before the last answer of the first documents."""
    first = np.flatnonzero(kept & (documents.answers > 0))[:count]
    columns = documents.starts, documents.lengths, documents.answers
    return list(zip(*(column[first].tolist() for column in columns), strict=True))
