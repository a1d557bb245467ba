"""The loss of packed documents is that of each alone, however they are divided."""

import functools
import itertools
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from harness.language_models import PACKED, VOCABULARY, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

from utils.language import lm_loss

BLOCKS, LENGTH = 2, 12
LENGTHS = st.lists(st.integers(1, LENGTH), min_size=1, max_size=2)


@functools.cache
def models(name, attention):
    """A model with the loss of `lm_loss`, and one without."""
    by_document = attention == "by document"
    made = [make_model(name, None if by_document else attention) for _ in range(2)]
    if by_document:
        lm_loss.attend_by_document(Accelerator(cpu=True), made[0])
    lm_loss.chunk_loss(made[0])
    return made


def gradient(model):
    weight = model.get_input_embeddings().weight
    found, weight.grad = weight.grad, None
    return found


@settings(max_examples=25)
@given(
    st.sampled_from(PACKED),
    st.sampled_from([None, "eager", "by document"]),
    st.lists(LENGTHS, min_size=BLOCKS, max_size=BLOCKS),
    st.floats(0, 1),
    st.sampled_from([1, 5, 2**20]),
    st.lists(st.integers(0, BLOCKS), max_size=2),
    st.booleans(),
)
def test_the_loss_and_its_gradient_are_those_of_each_document_alone(
    name, attention, lengths, share, chunk, cuts, per_block
):
    """In chunks and micro-batches of any size, with any share of targets, and with none."""
    model, own = models(name, attention)
    tokens = torch.randint(VOCABULARY, (BLOCKS, LENGTH + 1))
    targets = tokens[:, 1:].masked_fill(torch.rand(BLOCKS, LENGTH) >= share, -100)
    positions, expected = torch.zeros(BLOCKS, LENGTH, dtype=torch.int64), []
    for block in range(BLOCKS):
        ends = sorted({min(end, LENGTH) for end in [*lengths[block], LENGTH]})
        losses = []
        for begin, end in itertools.pairwise([0, *ends]):
            positions[block, begin:end] = torch.arange(end - begin)
            logits = own(input_ids=tokens[block : block + 1, begin:end]).logits[0].float()
            losses.append(F.cross_entropy(logits, targets[block, begin:end], reduction="sum"))
        expected.append(sum(losses))
    sum(expected).backward()
    batch = dict(input_ids=tokens[:, :-1], position_ids=positions, targets=targets)
    total, of_blocks, edges = 0.0, [], sorted({0, BLOCKS, *cuts})
    with mock.patch.object(lm_loss, "LOGITS", chunk * VOCABULARY):
        for begin, end in itertools.pairwise(edges):
            part = {key: rows[begin:end] for key, rows in batch.items()}
            if per_block:
                with torch.no_grad():
                    of_blocks += model(**part, per_block=True).tolist()
            loss = model(**part)
            loss.backward()
            total += loss.item()
    assert total == pytest.approx(sum(expected).item(), rel=1e-4, abs=1e-4)
    if per_block:
        alone = [loss.item() for loss in expected]
        assert of_blocks == pytest.approx(alone, rel=1e-4, abs=1e-4)
    found, expected_gradient = gradient(model), gradient(own)
    scale = expected_gradient.abs().max().item()
    assert torch.allclose(found, expected_gradient, rtol=1e-3, atol=1e-4 * max(1, scale))
