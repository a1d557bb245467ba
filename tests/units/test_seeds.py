"""Random numbers are a function of the seed and of where training stands, the same on all machines."""

from types import SimpleNamespace

import torch

from utils.run.seeds import sample_seed, seed_step


def process(rank, device="cpu"):
    return SimpleNamespace(process_index=rank, device=torch.device(device))


def drawn(*where, rank=0):
    seed_step(process(rank), *where)
    return torch.rand(4).tolist()


def test_a_step_draws_the_same_again_and_no_other_step_does():
    places = [(seed, step, micro) for seed in (0, 1) for step in (1, 2) for micro in (0, 1)]
    first = {(place, rank): drawn(*place, rank=rank) for place in places for rank in (0, 1)}
    again = {(place, rank): drawn(*place, rank=rank) for place in places for rank in (0, 1)}
    assert first == again and len({tuple(values) for values in first.values()}) == 16
    assert drawn(0, 1) == first[(0, 1, 0), 0]  # the first micro-batch


def test_the_seed_of_a_step(monkeypatch):
    """Runs resume exactly with later versions: the formula stays. It fits into 32 bits."""
    seen = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seen.append)
    seed_step(process(2), 10, 100, 3)
    seed = torch.default_generator.initial_seed()
    assert seed == 10 + 1_000_003 * 100 + 7_919 * 2 + 104_729 * 3 and seen == []
    seed_step(process(0, "cuda"), 2**32 - 1, 1000)
    assert torch.default_generator.initial_seed() == 1_000_002_999
    assert seen == [1_000_002_999] and seen[0] + 2**32 == 2**32 - 1 + 1_000_003 * 1000


def test_the_seed_of_a_sample():
    """64 bits, the same everywhere; negative numbers are streams that no sample has."""
    assert sample_seed(0, 0, 0) == 2_891_389_769_238_885_931
    seeds = {sample_seed(s, e, i) for s in range(4) for e in range(4) for i in range(-2, 60)}
    assert len(seeds) == 4 * 4 * 62 and max(seeds) < 2**64 and min(seeds) >= 0
    assert max(seeds) > 2**60
