"""Blocks of tokens, in a memory-mapped array or in memory; returns whole batches.

A document of n tokens has n - 1 positions: position t reads token t and predicts token t + 1. A
*piece* is a run of positions of one document; a *block* is a list of pieces and, if they do not
fill it, padding.
"""

from typing import NamedTuple

import numpy as np
import torch

IGNORED = -100  # a target that the loss leaves out
PROMPT_TOKENS = 32  # of a text
COUNTED = 10_000  # documents whose targets are counted at once


class Pieces(NamedTuple):
    """Runs of positions: the place of the first token, the number of positions, the block.

    Three int64 arrays [pieces], sorted by block.
    """

    starts: np.ndarray
    lengths: np.ndarray
    blocks: np.ndarray


class Stream(NamedTuple):
    """The tokens of documents, one after the other.

    tokens: int32 [tokens].
    is_target: uint8 [tokens]; None: every token is a target.
    """

    tokens: np.ndarray
    is_target: np.ndarray | None = None

    def count_targets(self, starts, lengths):
        """The number of targets among `lengths` tokens from each of `starts`, int64."""
        if self.is_target is None:
            return lengths.copy()
        counts, order = np.zeros(len(starts), np.int64), np.argsort(starts)
        # Some at a time, because sums take eight times as much memory.
        for first in range(0, len(order), COUNTED):
            chosen = order[first : first + COUNTED]
            begin, ends = starts[chosen[0]], starts[chosen] + lengths[chosen]
            sums = np.cumsum(self.is_target[begin : ends.max()], dtype=np.int64)
            sums = np.concatenate([[0], sums])
            counts[chosen] = sums[ends - begin] - sums[starts[chosen] - begin]
        return counts


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
        block_targets (int64 [blocks]): the number of targets of each block.
    """

    def __init__(self, stream, pieces, block_size, pad_id, bytes=None, answers=None):
        self.stream, self.pieces, self.block_size, self.pad_id = stream, pieces, block_size, pad_id
        self.bytes, self._answers = bytes, answers
        count = int(pieces.blocks[-1]) + 1 if len(pieces.blocks) else 0
        self._firsts = np.searchsorted(pieces.blocks, np.arange(count + 1))
        targets = stream.count_targets(pieces.starts + 1, pieces.lengths)
        self.block_targets = np.bincount(pieces.blocks, targets).astype(np.int64)
        self.tokens, self.target_tokens = int(pieces.lengths.sum()), int(targets.sum())

    @property
    def padding(self):
        """The share of the positions that are padding."""
        return 1 - self.tokens / max(1, len(self) * self.block_size)

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
        """The blocks at `indices` (int64 array, ascending), as `Blocks`.

        Their number of bytes is estimated, from that of all blocks, by their targets.
        """
        kept = np.isin(self.pieces.blocks, indices)
        starts, lengths, blocks = (column[kept] for column in self.pieces)
        pieces = Pieces(starts, lengths, np.searchsorted(indices, blocks))
        some = Blocks(self.stream, pieces, self.block_size, self.pad_id, answers=self._answers)
        some.bytes = self.bytes and self.bytes * some.target_tokens / self.target_tokens
        return some

    def first(self, count):
        """The first `count` blocks, as `select` returns them."""
        return self.select(np.arange(min(count, len(self))))

    def __getitem__(self, index):
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def prompts(self, count):
        """The first prompts, to look at what a model answers.

        Args:
            count (int): at most as many.

        Returns:
            list[tuple]: the token ids of the prompt, and of the answer (list[int]). Of a
            conversation, the prompt is all before its last answer, with what asks for one; of a
            text, the first tokens of a piece, and the answer is None.
        """
        if self._answers is None:
            starts, lengths = self.pieces.starts, self.pieces.lengths
            chosen = np.flatnonzero(lengths >= min(PROMPT_TOKENS, lengths.max(initial=0)))[:count]
            sizes = np.minimum(lengths[chosen], PROMPT_TOKENS)
            pairs = zip(starts[chosen], sizes, strict=True)
            return [(self.stream.tokens[start : start + n].tolist(), None) for start, n in pairs]
        prompts = []
        for start, length, answer in self._answers[:count]:
            tokens = self.stream.tokens[start : start + length]
            learned = self.stream.is_target[start + answer : start + length].astype(bool)
            prompts.append((tokens[:answer].tolist(), tokens[answer:][learned].tolist()))
        return prompts
