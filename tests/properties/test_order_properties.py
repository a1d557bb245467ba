"""Which samples a step sees: the same on any number of processes, from any position."""

import math

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from harness.fakes import accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from utils.data.evaluation import choose
from utils.data.loaders import EpochSampler, already_a_batch, shuffled
from utils.data.sharing import evaluation_batch_size
from utils.run.failures import UserError
from utils.run.launch import check_division

SEEDS, EPOCHS = st.integers(0, 2**32 - 1), st.integers(0, 1000)


@given(st.integers(20, 200), st.integers(1, 20), SEEDS, EPOCHS, st.booleans())
@settings(max_examples=20)
def test_a_sampler_has_another_order_in_each_epoch_and_reaches_every_sample(
    size, batch, seed, epoch, with_epoch
):
    sampler, seen, orders = EpochSampler(size, batch, seed, with_epoch), set(), []
    for number in range(epoch, epoch + 40):
        sampler.set_epoch(number)
        keys = list(sampler)
        ids = [index for _, index in keys] if with_epoch else keys
        assert not with_epoch or {epoch for epoch, _ in keys} == {number}
        assert len(ids) == len(set(ids)) == len(sampler) == size // batch * batch
        assert list(sampler) == keys
        orders.append(tuple(ids))
        seen |= set(ids)
    assert seen == set(range(size)) and len(set(orders)) == 40


class Ids(Dataset):
    """A data set whose batches are the keys that a sampler yields."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitems__(self, keys):
        return {"keys": torch.tensor([key if isinstance(key, tuple) else (0, key) for key in keys])}

    def select(self, indices):
        return indices


def shares(loader_of, processes):
    """What each of some processes reads, joined as they are gathered: one list per batch."""
    options = dict(num_processes=processes, split_batches=True, put_on_device=False)
    read = [
        [batch["keys"] for batch in prepare_data_loader(loader_of(), process_index=rank, **options)]
        for rank in range(processes)
    ]
    return [torch.cat(parts).tolist() for parts in zip(*read, strict=True)]


@given(st.integers(8, 100), st.integers(1, 3), st.sampled_from([1, 2]), SEEDS, st.integers(0, 3))
@settings(max_examples=20)
def test_global_batches_are_the_same_on_any_processes_and_after_a_restart(
    size, parts, accumulation, seed, skip
):
    batch = 4 * parts * accumulation
    if batch > size:
        return
    sampler = EpochSampler(size, batch, seed, with_epoch=True)

    def loader():
        return DataLoader(
            Ids(size), batch // accumulation, sampler=sampler, collate_fn=already_a_batch
        )

    whole = shares(loader, 1)
    assert whole == shares(loader, 2) == shares(loader, 4)
    assert [key for part in whole for key in part] == [list(key) for key in sampler]
    left = [rest["keys"].tolist() for rest in skip_first_batches(loader(), skip)]
    assert left == whole[skip:]


@given(st.integers(1, 120), st.integers(1, 5), st.integers(1, 40))
def test_an_evaluation_has_even_batches_and_few_repeats(size, processes, most):
    batch = evaluation_batch_size(accelerator(processes), size, most)
    batches = math.ceil(size / batch)
    assert batch % processes == 0 and batch <= most * processes
    assert batches == math.ceil(size / (most * processes))  # no more than it must take
    assert batches * batch - size < batches * processes  # less than one repeat per share
    read = shares(lambda: DataLoader(Ids(size), batch, collate_fn=already_a_batch), processes)
    assert [index for part in read for _, index in part][:size] == list(range(size))


@given(st.integers(1, 300), st.integers(1, 320), SEEDS)
def test_evaluated_samples_are_a_random_part_in_order_and_more_contain_fewer(size, count, seed):
    whole = Ids(size)
    if count >= size:
        assert choose(whole, count, seed) is whole
        return
    chosen = choose(whole, count, seed).tolist()
    assert chosen == sorted(shuffled(size, seed, 0)[:count])
    fewer = choose(whole, max(1, count // 2), seed).tolist()
    assert set(fewer) <= set(chosen)


@given(st.integers(1, 10_000), st.integers(1, 1024))
def test_a_batch_is_split_evenly_or_the_error_names_the_nearest_sizes(batch, parts):
    if batch % parts == 0:
        check_division(batch, parts, "2 processes")
        return
    says = f"^--batch_size {batch} does not divide evenly over 2 processes: use "
    with pytest.raises(UserError, match=says) as error:
        check_division(batch, parts, "2 processes")
    named = [int(word) for word in str(error.value).rpartition(": use ")[2].split(" or ")]
    sizes = range(batch - parts + 1, batch + parts)
    assert named == [size for size in sizes if size > 0 and size % parts == 0]
