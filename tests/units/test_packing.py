"""How documents become blocks: which token is a target where, and how few blocks there are."""

import numpy as np
import pytest
import torch

from utils.language.packing import (
    DOCUMENT,
    IGNORED,
    Stream,
    best_fit,
    cut_text,
    pack_conversations,
)

PAD = 999


def make(lengths, seed=0, targets=True):
    """Documents of tokens 0, 1, 2, ..., and which of them are targets."""
    total = sum(lengths)
    is_target = np.random.default_rng(seed).integers(0, 2, total).astype(np.uint8)
    stream = Stream(np.arange(total, dtype=np.int32), is_target if targets else None)
    documents, lengths = np.zeros(len(lengths), DOCUMENT), np.array(lengths)
    documents["start"], documents["length"] = np.cumsum(lengths) - lengths, lengths
    documents["bytes"] = lengths - 1
    for document in documents:
        begin = document["start"]
        document["targets"] = is_target[begin + 1 : begin + document["length"]].sum()
    return stream, documents, is_target


def check(blocks, documents, expected):
    """The inputs and targets of all blocks, which have `expected` targets.

    A target is the token after its input. Every position that begins anew is padding, or at most
    once inside of a document.
    """
    batch = blocks.__getitems__(list(range(len(blocks))))
    for values in batch.values():
        assert values.dtype == torch.int64 and values.is_contiguous()
    assert batch["ids"].tolist() == list(range(len(blocks)))
    inputs, targets = batch["input_ids"].numpy(), batch["targets"].numpy()
    used, starts = targets != IGNORED, set(documents["start"].tolist())
    assert sorted(targets[used]) == expected and blocks.target_tokens == len(expected)
    assert (inputs[used] == targets[used] - 1).all() and not used[inputs == PAD].any()
    assert blocks.tokens == (inputs != PAD).sum()
    for row, places in zip(inputs, batch["position_ids"].numpy(), strict=True):
        assert places[0] == 0
        for t in range(1, len(row)):
            if row[t] == PAD:
                goes_on = row[t - 1] == PAD
            else:
                goes_on = row[t] == row[t - 1] + 1 and row[t] not in starts
            assert places[t] == (places[t - 1] + 1 if goes_on else 0)
    return inputs, targets


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("lengths", [[50], [3, 1, 40, 2, 9, 17], [17, 17], [9, 9, 9], [2], [1, 1]])
def test_each_token_of_a_text_but_the_first_is_a_target_once(lengths, packed):
    stream, documents, _ = make(lengths, targets=False)
    blocks = cut_text(stream, documents, 8, PAD, packed=packed)[0]
    firsts = documents["start"].tolist()
    inputs, targets = check(blocks, documents, sorted({*range(sum(lengths))} - {*firsts}))
    used = targets != IGNORED
    assert (inputs[~used] == PAD).all()
    assert blocks.bytes == sum(length - 1 for length in lengths)
    if packed:
        assert used.ravel()[: used.sum()].all()  # only the last block has padding
    else:
        for row in targets:
            owners = np.searchsorted(firsts, row[row != IGNORED], side="right")
            assert len(set(owners.tolist())) == 1


@pytest.mark.parametrize("packed", [True, False])
def test_conversations_keep_their_targets(packed):
    lengths = np.random.default_rng(1).integers(1, 30, 60).tolist()
    stream, documents, is_target = make(lengths)
    blocks, counts = pack_conversations(stream, documents, 16, PAD, packed=packed)
    expected, truncated, empty = [], 0, 0
    for start, length in zip(documents["start"].tolist(), lengths, strict=True):
        learned = [token for token in range(start + 1, start + min(length, 17)) if is_target[token]]
        expected += learned
        empty += not learned
        truncated += bool(learned and length > 17)
    inputs, _ = check(blocks, documents, expected)
    assert counts == {"truncated": truncated, "no targets": empty} and min(truncated, empty) > 0
    assert (inputs == PAD).any() and blocks.bytes is None
    if not packed:
        assert len(blocks) == len(lengths) - empty


@pytest.mark.parametrize("size", [1, 7, 64, 2048])
def test_best_fit(size):
    lengths = np.random.default_rng(size).integers(1, size + 1, 500)
    space, expected = [], []
    for item in np.argsort(-lengths, kind="stable"):
        fitting = [free for free in space if free >= lengths[item]]
        place = space.index(min(fitting)) if fitting else len(space)
        space += [] if fitting else [size]
        space[place] -= lengths[item]
        expected.append(place)
    bins = best_fit(lengths, size)
    assert sorted(size - np.bincount(bins, lengths).astype(int)) == sorted(map(int, space))
    assert (best_fit(lengths, size) == bins).all()
    assert len(best_fit(np.zeros(0, np.int64), size)) == 0


def test_prompts_end_where_the_last_answer_begins():
    """Of the first document, the end is cut off; of the last, all is learned."""
    stream, documents, is_target = make([20, 6, 9, 4])
    is_target[:] = [0] * 20 + [0, 1, 0, 1, 1, 0] + [0] * 5 + [1] * 4 + [1] * 4
    documents["targets"] = [20, 3, 4, 3]
    is_target[3] = 1
    blocks, _ = pack_conversations(stream, documents, 12, PAD)
    prompts = [([20, 21, 22], [23, 24]), ([26, 27, 28, 29, 30], [31, 32, 33, 34])]
    prompts.append(([35, 36, 37], None))
    assert blocks.prompts(5) == prompts and blocks.prompts(1) == prompts[:1]
