"""Blocks of tokens, in memory-mapped arrays or in memory; returns whole batches.

A document of n tokens has n - 1 positions: position t reads token t and predicts token t + 1. A
*piece* is a run of positions of one document; a *block* is a list of pieces and, if they do not
fill it, padding.
"""

import bisect
from typing import NamedTuple

import numpy as np
import torch

IGNORED = -100  # a target that the loss leaves out
PROMPT_TOKENS = 32  # of a text


class Pieces(NamedTuple):
    """Runs of positions: the place of the first token, the number of positions, the block.

    Three int64 arrays [pieces], sorted by block.
    """

    starts: np.ndarray
    lengths: np.ndarray
    blocks: np.ndarray


class Stream:
    """Reads tokens that lie in several arrays, such as those of a memory-mapped table.

    Args:
        tokens (list): of int32 arrays.
        is_target (list | None): of uint8 arrays of the same lengths; None: every token is a target.
        reopen: makes the same stream in another process, to which it is sent instead of the arrays.
    """

    def __init__(self, tokens, is_target=None, reopen=None):
        self._tokens, self._is_target, self._reopen = tokens, is_target, reopen
        self._starts = np.cumsum([0, *map(len, tokens)]).tolist()

    def __reduce__(self):
        return (self._reopen, ()) if self._reopen else (Stream, (self._tokens, self._is_target))

    def tokens(self, start, count):
        """int32 [count], the tokens from place `start` on."""
        return self._read(self._tokens, start, count)

    def is_target(self, start, count):
        """uint8 [count], or None if every token is a target."""
        return self._is_target and self._read(self._is_target, start, count)

    def _read(self, arrays, start, count):
        number = bisect.bisect_right(self._starts, start) - 1
        parts = []
        while True:
            first = start - self._starts[number]
            part = arrays[number][first : first + count]
            parts.append(part)
            start, count, number = start + len(part), count - len(part), number + 1
            if count == 0:
                return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def count_targets(self, starts, lengths):
        """The number of targets among `lengths` tokens from each of `starts`, int64.

        The tokens of one run lie in one array.
        """
        if self._is_target is None:
            return lengths.copy()
        counts, order = np.zeros(len(starts), np.int64), np.argsort(starts)
        borders = np.searchsorted(starts[order], self._starts)
        for number, array in enumerate(self._is_target):
            chosen = order[borders[number] : borders[number + 1]]
            sums = np.concatenate([[0], np.cumsum(array, dtype=np.int64)])
            first = starts[chosen] - self._starts[number]
            counts[chosen] = sums[first + lengths[chosen]] - sums[first]
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

    def tokens_of(self, index):
        """The positions of a block without padding (int)."""
        return int(self.pieces.lengths[self._firsts[index] : self._firsts[index + 1]].sum())

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
                tokens = self.stream.tokens(start, length + 1)
                is_target = self.stream.is_target(start + 1, length)
                place = slice(done, done + length)
                inputs[row, place] = tokens[:-1]
                following = tokens[1:]
                if is_target is not None:
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
            prompts = zip(starts[chosen].tolist(), sizes.tolist(), strict=True)
            return [(self.stream.tokens(*prompt).tolist(), None) for prompt in prompts]
        prompts = []
        for start, length, answer in self._answers[:count]:
            tokens = self.stream.tokens(start, length)
            learned = self.stream.is_target(start + answer, length - answer).astype(bool)
            prompts.append((tokens[:answer].tolist(), tokens[answer:][learned].tolist()))
        return prompts
