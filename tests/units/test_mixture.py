"""Mixtures of several sources: their proportions, their order, and what the log says about them."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from harness.chats import make_tokenizer, say, token_stream

from utils.language.mixture import MemoryReader, Shuffled, SourceLog, labels, next_source
from utils.language.token_settings import TokenSettings
from utils.language.tokens import load_tokens

LANES, BLOCK, WEIGHTS = 4, 48, [0.75, 0.25]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Files with 40 conversations, which are soon exhausted, and with 200 texts."""
    folder = tmp_path_factory.mktemp("sources")
    chats = [{"messages": say(f"u ask {n}", "a " + "word " * (1 + n % 7))} for n in range(40)]
    texts = [{"text": f"text {n}" + " of some words" * (1 + n % 9)} for n in range(200)]
    for name, rows in (("chats", chats), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(folder / f"{name}.jsonl") for name in ("chats", "texts")]


@pytest.fixture(scope="module")
def blocks(sources, tokenizer):
    """The same sources in memory."""
    return [load_tokens(name, TokenSettings(tokenizer, BLOCK)).splits["train"] for name in sources]


def order(weights, count, taken=None, lane=0):
    """The sources of `count` documents; and how many of each were taken."""
    taken, found = taken or [0] * len(weights), []
    for _ in range(count):
        found.append(next_source(weights, taken, lane))
        taken = [n + (source == found[-1]) for source, n in enumerate(taken)]
    return found, taken


def largest_error(found, weights, window=1000):
    """By how many documents the share of a source differs at most, in all windows."""
    errors = []
    for source, weight in enumerate(weights):
        sums = [0]
        for other in found:
            sums.append(sums[-1] + (other == source))
        pairs = zip(sums, sums[window:], strict=False)
        errors += [abs(last - first - window * weight) for first, last in pairs]
    return max(errors)


def random_weights(trial):
    generator = random.Random(trial)
    weights = [generator.random() ** 3 + 0.001 for _ in range(generator.randint(2, 6))]
    return [weight / sum(weights) for weight in weights]


def test_every_window_of_1000_documents_has_the_proportions():
    for trial in range(12):
        weights = random_weights(trial)
        assert largest_error(order(weights, 2000)[0], weights) < 2, weights
        lanes = [order(weights, 300, lane=lane)[0] for lane in range(8)]
        together = [source for row in zip(*lanes, strict=True) for source in row]
        assert largest_error(together, weights) < 8, weights  # one percent are ten
        # A resume is an order that begins with what was taken.
        before, taken = order(weights, 700)
        assert before + order(weights, 1300, taken)[0] == order(weights, 2000)[0]


def test_a_pass_has_every_document_once_in_an_order_of_its_own(blocks):
    shuffled = Shuffled(blocks[0], seed=0)
    count = len(shuffled)
    readers = [iter(MemoryReader(shuffled, lane, 3)) for lane in range(3)]
    found = [next(readers[number % 3])[0].tokens.tobytes() for number in range(3 * count)]
    passes = [found[start : start + count] for start in range(0, 3 * count, count)]
    assert len(set(passes[0])) == count and sorted(passes[0]) == sorted(passes[1])
    assert passes[0] != passes[1] != passes[2] != passes[0]
    reader = MemoryReader(shuffled, 1, 3)
    reader.seek(count // 3)  # the last one was of the first pass
    assert reader.epoch == 0 and next(iter(reader))[0].tokens.tobytes() == found[count // 3 * 3 + 1]
    assert reader.epoch == (count // 3 * 3 + 1) // count


def batches(sources, tokenizer, processes, count, position=None, weights=WEIGHTS):
    """The blocks of `count` global batches, and the position that a checkpoint would store."""
    options = dict(lanes=LANES, buffer=4, weights=weights, seed=0, position=position)
    readers = [
        iter(
            token_stream(sources, tokenizer, BLOCK, 8 // processes, share=(p, processes), **options)
        )
        for p in range(processes)
    ]
    found = []
    for _ in range(count):
        parts = [next(reader) for reader in readers]
        position = {lane: place for part in parts for lane, place in part["position"].items()}
        found.append(sorted(row for part in parts for row in part["input_ids"].tolist()))
    return found, json.loads(json.dumps(position))


@pytest.mark.parametrize("where", ["memory", "stream"])
def test_any_number_of_processes_mixes_the_same_blocks_from_any_position(
    where, sources, blocks, tokenizer
):
    mixed = blocks if where == "memory" else sources
    whole, last = batches(mixed, tokenizer, 1, 40)
    assert batches(mixed, tokenizer, 4, 40) == (whole, last)
    for stop in (1, 3, 17):
        before, position = batches(mixed, tokenizer, 2, stop)
        middle, position = batches(mixed, tokenizer, 4, 5, position)
        rest, end = batches(mixed, tokenizer, 1, 35 - stop, position)
        assert (before + middle + rest, end) == (whole, last), stop
    assert all(place["epochs"][0] > 0 for place in last.values())  # it was exhausted


def test_the_proportions_hold_across_buffers_and_a_resume(blocks, tokenizer):
    """Also of a source that is due once in several buffers."""
    weights, counts = [0.97, 0.03], []
    _, position = batches(blocks, tokenizer, 1, 60, weights=weights)
    _, later = batches(blocks, tokenizer, 2, 130, position, weights)
    for place in (position, later):
        taken = [lane["documents"] for lane in place.values()]
        counts.append([sum(some) for some in zip(*taken, strict=True)])
    between = [last - first for first, last in zip(*counts, strict=True)]
    assert sum(between) > 1000
    assert between[1] / sum(between) == pytest.approx(0.03, abs=0.01)


def test_tokens_of_each_source_are_those_of_the_blocks(blocks, tokenizer):
    options = dict(lanes=1, buffer=4, weights=WEIGHTS)
    stream, total = iter(token_stream(blocks, tokenizer, BLOCK, 1, **options)), 0
    for _ in range(50):
        position = next(stream)["position"]
        seen = position["0"]["tokens"]
        assert total < sum(seen) <= total + BLOCK
        total = sum(seen)
    again = iter(token_stream(blocks, tokenizer, BLOCK, 1, position=position, **options))
    assert next(again)["position"] == next(stream)["position"]  # a resume goes on counting


def test_the_log_has_the_tokens_and_says_once_what_repeats():
    accelerator, said = SimpleNamespace(reduce=lambda values, _: values), []

    def batch(*epochs):
        places = {"0": {"tokens": [10, 5], "epochs": [0, 0]}}
        places |= {"1": {"tokens": [7, 0], "epochs": list(epochs)}}
        blocks = dict(source=torch.tensor([0, 0]), targets=torch.tensor([[1, -100], [1, 2]]))
        return {"position": places, **blocks, "block_losses": torch.tensor([1.0, 2.0])}

    def figures(log, *batches):
        return log.figures(accelerator, list(batches), said.append)

    log = SourceLog(["data/chats.jsonl", "org/texts"])
    expected = {"tokens_seen/chats.jsonl": 17, "tokens_seen/texts": 5}
    expected |= {"loss/chats.jsonl": 1.0, "loss/texts": None}
    assert figures(log, batch(0, 0)) == expected and not said
    other = batch(0, 0) | {"source": torch.tensor([1, 0])}
    both = figures(log, batch(0, 0), other)
    assert both["loss/texts"] == 1.0 and both["loss/chats.jsonl"] == 5 / 5
    for _ in range(2):
        figures(log, batch(2, 0))
        assert said == ["--dataset data/chats.jsonl is exhausted and repeats: pass 3"]
    continued = SourceLog(["data/chats.jsonl", "org/texts"], batch(2, 0)["position"])
    figures(continued, batch(2, 1))
    assert said[1:] == ["--dataset org/texts is exhausted and repeats: pass 2"]
    assert figures(SourceLog(["synthetic"]), {}) == {}
    assert labels(["a/x.jsonl", "b/x.jsonl", "c"]) == ["x.jsonl", "x.jsonl_2", "c"]
