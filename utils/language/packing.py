"""Cuts text into blocks of tokens, packs conversations into blocks by best fit; returns batches.

A document of n tokens has n - 1 positions: position t reads token t and predicts token t + 1. A
*piece* is a run of positions of one document; a *block* is a list of pieces and, if they do not
fill it, padding.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from utils.language.conversations import ANSWERS, pad_id_of

IGNORED = -100  # a target that the loss leaves out
PROMPT_TOKENS = 32  # of a text
# Of a document, or of a segment of a text, all int64: the row that it is from; its tokens; of a
# conversation, the targets after the first token; of a text, the UTF-8 bytes that its targets
# predict; a checksum; and whether a document begins with it.
NAMES = "row length targets bytes digest begins".split()
SEGMENT = np.dtype([(name, np.int64) for name in NAMES])
DOCUMENT = np.dtype([*SEGMENT.descr, ("start", np.int64)])  # the place of its first token


class Pieces(NamedTuple):
    """Runs of positions, by block: first token, number of positions and of targets, and block.

    Each is int64 [pieces].
    """

    starts: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray
    blocks: np.ndarray


class Parts:
    """Arrays that follow each other, of which a slice lies within one."""

    def __init__(self, arrays):
        self._arrays, self._ends = arrays, np.cumsum([len(array) for array in arrays])

    def __getitem__(self, run):
        number = np.searchsorted(self._ends, run.start, side="right")
        begin = self._ends[number] - len(self._arrays[number])
        return self._arrays[number][run.start - begin : run.stop - begin]


class Stream(NamedTuple):
    """The tokens of documents, one after the other: arrays, or `Parts` with whole documents.

    tokens: int32 [tokens].
    is_target: uint8 [tokens]; None: every token is a target.
    """

    tokens: np.ndarray
    is_target: np.ndarray | None = None


class Blocks(torch.utils.data.Dataset):
    """Blocks of `block_size` positions. Returns whole batches to a `DataLoader`.

    A batch is a dict of int64 tensors:

    input_ids [batch, block_size]: token t.
    targets [batch, block_size]: token t + 1, or -100: not a target, or padding. No target is in
        another document than its input.
    position_ids [batch, block_size]: from 0 on in every piece, and in the padding, which is thereby
        a document of its own.
    ids [batch]: the indices of the blocks.

    Attributes:
        tokens, target_tokens (int): positions without padding; targets, over all blocks.
        bytes (float | None): of texts, the UTF-8 bytes that the targets predict.
    """

    def __init__(self, stream, pieces, block_size, pad_id, bytes=None):
        self.stream, self.pieces, self.block_size, self.pad_id = stream, pieces, block_size, pad_id
        self.bytes = bytes
        count = int(pieces.blocks[-1]) + 1 if len(pieces.blocks) else 0
        self._firsts = np.searchsorted(pieces.blocks, np.arange(count + 1))
        self.tokens, self.target_tokens = int(pieces.lengths.sum()), int(pieces.targets.sum())

    def __len__(self):
        return len(self._firsts) - 1

    def __getitems__(self, indices):
        shape = len(indices), self.block_size
        inputs = np.full(shape, self.pad_id, np.int64)
        targets = np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            done = 0
            for piece in range(self._firsts[index], self._firsts[index + 1]):
                start, length = int(self.pieces.starts[piece]), int(self.pieces.lengths[piece])
                tokens = self.stream.tokens[start : start + length + 1]
                place = slice(done, done + length)
                inputs[row, place] = tokens[:-1]
                following = tokens[1:]
                if self.stream.is_target is not None:
                    is_target = self.stream.is_target[start + 1 : start + 1 + length]
                    following = np.where(is_target, following, IGNORED)
                targets[row, place] = following
                positions[row, place] = np.arange(length)
                done += length
            positions[row, done:] = np.arange(self.block_size - done)
        batch = dict(input_ids=inputs, targets=targets, position_ids=positions)
        batch = {name: torch.from_numpy(values) for name, values in batch.items()}
        return {**batch, "ids": torch.tensor(indices, dtype=torch.int64)}

    def select(self, indices):
        """The `Blocks` at `indices` (int64, ascending), with an estimate of their bytes."""
        mask = np.isin(self.pieces.blocks, indices)
        *columns, blocks = (column[mask] for column in self.pieces)
        pieces = Pieces(*columns, np.searchsorted(indices, blocks))
        selection = Blocks(self.stream, pieces, self.block_size, self.pad_id)
        selection.bytes = self.bytes and self.bytes * selection.target_tokens / self.target_tokens
        return selection

    def first(self, count):
        """The first `count` blocks, as `select` returns them."""
        return self.select(np.arange(min(count, len(self))))

    def __getitem__(self, index):
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def prompts(self, count):
        """The first prompts, at most `count`, to look at what a model answers.

        Returns:
            list[tuple]: the token ids of the prompt, and of the answer (list[int]). Of a
            conversation that is not cut off, the prompt is all before its last answer, with what
            asks for one. Of a text, or if all is learned: the first tokens, and None.
        """
        starts, lengths, is_target = self.pieces.starts, self.pieces.lengths, self.stream.is_target
        if is_target is None:
            chosen = np.flatnonzero(lengths >= min(PROMPT_TOKENS, lengths.max(initial=0)))
        else:
            chosen = np.flatnonzero(lengths < self.block_size)
        prompts = []
        for piece in chosen[np.argsort(starts[chosen], kind="stable")][:count]:
            run = slice(starts[piece], starts[piece] + lengths[piece] + 1)
            tokens, begin = self.stream.tokens[run].tolist(), 0
            if is_target is not None:
                learned = is_target[run]
                begin = end = np.flatnonzero(learned)[-1] + 1
                while begin and learned[begin - 1]:
                    begin -= 1
            first = tokens[: begin or min(PROMPT_TOKENS, lengths[piece])]
            prompts.append((first, tokens[begin:end] if begin else None))
        return prompts


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
        packed (bool): False: each block has positions of one document only.
    """

    tokenizer: object
    block_size: int
    subset: str | None = None
    val_fraction: float = 0.1
    seed: int = 0
    loss_on: str = ANSWERS
    packed: bool = True

    @classmethod
    def from_args(cls, tokenizer, packed, args):
        """The settings that the command-line arguments give."""
        names = "block_size subset val_fraction seed loss_on".split()
        return cls(tokenizer, packed=packed, **{name: getattr(args, name) for name in names})

    def pack(self, stream, documents):
        """What `cut_text` or `pack_conversations` returns."""
        make = cut_text if stream.is_target is None else pack_conversations
        pad_id = pad_id_of(self.tokenizer)
        return make(stream, documents, self.block_size, pad_id, packed=self.packed)


def join_segments(segments):
    """The DOCUMENT array of a SEGMENT array, whose elements follow each other in a stream."""
    first = np.flatnonzero(segments["begins"])
    documents = np.zeros(len(first), DOCUMENT)
    for name in ("row", "begins"):
        documents[name] = segments[name][first]
    documents["start"] = (np.cumsum(segments["length"]) - segments["length"])[first]
    for name in ("length", "targets", "bytes", "digest"):
        documents[name] = np.add.reduceat(segments[name], first)
    return documents


def cut_text(stream, documents, block_size, pad_id, *, packed=True):
    """Cuts texts into blocks: each token except the first of a document is a target once.

    Args:
        documents (DOCUMENT [documents]): where each is in the stream, in the order of the blocks.
        packed (bool): the texts follow each other, and only the last block has padding. False: a
            block has positions of one document only.

    Returns:
        tuple: Blocks; an empty dict, since nothing is left out.
    """
    mask = documents["length"] > 1
    starts, positions = documents["start"][mask], documents["length"][mask] - 1
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
    pieces = Pieces(starts[owners] + cuts - begins[owners], lengths, lengths, blocks)
    return Blocks(stream, pieces, block_size, pad_id, int(documents["bytes"][mask].sum())), {}


def pack_conversations(stream, documents, block_size, pad_id, *, packed=True):
    """Packs conversations into blocks; none is divided, and what does not fit is cut off.

    Args:
        documents (DOCUMENT [documents]): where each is in the stream.
        packed (bool): best fit decreasing. False: one conversation in each block.

    Returns:
        tuple: Blocks; and dict[str, int], how many were `truncated`, and left out because they had
        `no targets` left.
    """
    long, targets = documents["length"] - 1 > block_size, documents["targets"].copy()
    positions = np.minimum(documents["length"] - 1, block_size)
    for place in np.flatnonzero(long):
        start = int(documents["start"][place]) + 1
        targets[place] = stream.is_target[start : start + block_size].sum()
    has_targets = targets > 0
    counts = {"truncated": int((long & has_targets).sum()), "no targets": int((~has_targets).sum())}
    chosen = np.flatnonzero(has_targets)
    blocks = best_fit(positions[chosen], block_size) if packed else np.arange(len(chosen))
    by_block = np.argsort(blocks, kind="stable")
    order = chosen[by_block]
    starts = documents["start"][order]
    pieces = Pieces(starts, positions[order], targets[order], blocks[by_block])
    return Blocks(stream, pieces, block_size, pad_id), counts


def best_fit(lengths, size):
    """The bin of each item, int64 [items], by best fit decreasing: the longest item first, each
    into the bin in which it leaves the least space.

    Args: lengths (int64 [items]): 1 to `size` (int), that of a bin.
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
