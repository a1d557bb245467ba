"""Random numbers are a function of the seed and of where training stands, the same on all machines."""

from itertools import product

import torch
from harness.fakes import accelerator

from utils.data.permutation import sample_seed
from utils.run.seeds import seed_step


def test_a_step_draws_the_same_again_and_no_other_step_does():
    def drawn(seed, step, micro_batch, rank):
        seed_step(accelerator(rank=rank), seed, step, micro_batch)
        return tuple(torch.rand(4).tolist())

    places = list(product((0, 1), (1, 2), (0, 1), (0, 1)))
    first = [drawn(*place) for place in places]
    assert first == [drawn(*place) for place in places] and len(set(first)) == 16


def test_the_seed_of_a_step(monkeypatch):
    """Runs resume exactly with later versions: the formula stays. It fits into 32 bits."""
    seen = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seen.append)
    seed_step(accelerator(rank=2), 10, 100, 3)
    seed = torch.default_generator.initial_seed()
    assert seed == 10 + 1_000_003 * 100 + 7_919 * 2 + 104_729 * 3 and seen == []
    seed_step(accelerator(device="cuda"), 2**32 - 1, 1000)  # the first micro-batch
    assert torch.default_generator.initial_seed() == 1_000_002_999
    assert seen == [1_000_002_999] and seen[0] + 2**32 == 2**32 - 1 + 1_000_003 * 1000


def test_the_seed_of_a_sample():
    """64 bits, the same everywhere; negative numbers are streams that no sample has."""
    assert sample_seed(0, 0, 0) == 2_891_389_769_238_885_931
    seeds = {sample_seed(s, e, i) for s, e, i in product(range(4), range(4), range(-2, 60))}
    assert len(seeds) == 4 * 4 * 62 and 2**60 < max(seeds) < 2**64 and min(seeds) >= 0
