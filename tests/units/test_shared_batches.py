"""Batches of workers in shared memory that is used again, but never while a tensor refers to it."""

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from utils.data.loaders import already_a_batch
from utils.images.shared_batches import SharedBatch


def made(value, count=2, height=3):
    """A batch, as a worker makes it, of images of a value and the next ones."""
    images = [torch.full((height, 4, 3), value + i, dtype=torch.uint8) for i in range(count)]
    return SharedBatch(images, labels=torch.arange(count), bad=[value])


def test_a_batch_arrives_as_it_was_sent():
    sent = made(7)
    _, (key, buffer, shape, others) = sent.__reduce__()  # what is pickled
    assert key[0] == os.getpid() and shape == (2, 3, 4, 3)
    assert buffer is None or buffer.is_shared()
    assert isinstance(others["labels"], np.ndarray)  # a tensor would take shared memory of its own
    batch = copy.copy(sent)
    assert batch["images"].shape == (2, 3, 3, 4) and batch["images"].dtype == torch.uint8
    assert batch["images"].is_contiguous(memory_format=torch.channels_last)
    assert batch["images"].unique(dim=0).flatten(1)[:, 0].tolist() == [7, 8]
    assert torch.equal(batch["labels"], torch.tensor([0, 1])) and batch["bad"] == [7]
    del batch
    known = 0
    for value in range(20):
        sent = made(value)
        known += sent.__reduce__()[1][1] is None  # only the number of its memory is sent
        assert copy.copy(sent)["images"].flatten()[0] == value
    assert known > 15


def test_memory_is_not_used_again_while_its_batch_is_kept():
    kept = [copy.copy(made(value)) for value in range(5)]
    assert [int(batch["images"].flatten()[0]) for batch in kept] == list(range(5))


@pytest.mark.parametrize(("count", "fits"), [(1, True), (2, True), (40, False)])
def test_a_batch_is_put_where_it_fits(count, fits):
    before = [copy.copy(made(0, height=5)) for _ in range(20)]
    before.clear()
    copy.copy(made(0, height=5))  # finds out that the others are free
    sent = made(9, count, height=5)
    known = sent.__reduce__()[1][1] is None
    batch = copy.copy(sent)
    assert known == fits and batch["images"].shape == (count, 3, 5, 4)
    assert batch["images"].flatten()[0] == 9


class Pictures(Dataset):
    def __len__(self):
        return 12

    def __getitems__(self, ids):
        images = [torch.full((32, 32, 3), index, dtype=torch.uint8) for index in ids]
        return SharedBatch(images, ids=torch.tensor(ids))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_memory_of_workers_that_have_ended_is_let_go():
    mapped = []
    for _ in range(4):  # each time with new workers
        batches = DataLoader(Pictures(), 2, num_workers=2, collate_fn=already_a_batch)
        for batch in batches:
            assert batch["images"][:, 0, 0, 0].tolist() == batch["ids"].tolist()
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped.append(sum("/torch_" in line for line in lines))
    assert 0 < mapped[-1] <= mapped[1]
