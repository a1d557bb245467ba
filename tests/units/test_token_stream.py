"""Streamed documents: the same batches on any number of processes, from any position."""

import numpy as np
import pytest
from harness.chats import conversations, make_tokenizer, say, token_stream, write_rows
from harness.data import global_batches
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.language import tokens as module
from utils.language.packing import TokenSettings
from utils.language.tokens import (
    MemoryReader,
    count_lanes,
    load_held_out,
    load_tokens,
    next_source,
)
from utils.run.failures import RunFailed, UserError

BLOCK = 48


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_a_validation_split_is_held_out_up_to_some_blocks(tmp_path, tokenizer, monkeypatch):
    def held_out(tokenizer=tokenizer):
        return load_held_out(str(tmp_path), TokenSettings(tokenizer, 16))

    for split, count in (("train", 20), ("val", 90)):
        rows = [{"text": f"{split} text {number}"} for number in range(count)]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    whole = held_out()
    said = tokenizer.decode(whole.splits["val"].__getitems__([0])["input_ids"][0].tolist())
    assert whole.kind == "text" and "val text" in said and "train" not in said
    monkeypatch.setattr(module, "HELD_OUT_BLOCKS", 2)
    some = held_out()
    assert 16 < some.splits["val"].tokens < 4 * 16 < whole.splits["val"].tokens
    assert f"of which {some.splits['val'].tokens:,} tokens are held out" in some.description
    write_rows(tmp_path / "val.jsonl", [{"text": "a"}] * 3)
    with pytest.raises(UserError, match="has no token to predict in what is held out"):
        held_out(make_tokenizer(eos_token=None))


def test_what_cannot_be_streamed_is_one_line(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    for subset, says in (
        (None, "has no document that is held out .* too small to stream"),
        ("de", "--subset de: only a Hub id has subsets"),
    ):
        with pytest.raises(UserError, match=says):
            load_held_out(path, TokenSettings(tokenizer, 16, subset=subset))
    chats = [{"messages": say("u hello" + " long" * 40, f"a {number}")} for number in range(20)]
    for rows, says in (
        ([{"text": "one"}, {"text": "two"}, {"text": 5}], r"row 2 of --dataset .*\(train\)"),
        (chats, "lane 0 of the stream has nothing to learn"),
    ):
        write_rows(tmp_path / "a.jsonl", rows)
        with pytest.raises(RunFailed, match=says) as error:
            next(iter(token_stream(path, tokenizer, 16, 1, lanes=1, buffer=4)))
        assert error.value.rank_variable is None  # each process says what it alone met


def test_options_of_a_stream_decide_about_its_blocks(tmp_path, tokenizer):
    """Which documents share a block, which tokens are targets, and what is left out."""
    turns = [(f"u {number}", "a " + "long" * (30 * (number % 4 == 0))) for number in range(160)]
    rows = [{"messages": say(user, f"{answer} so")} for user, answer in turns]
    path = write_rows(tmp_path / "a.jsonl", rows)

    def read(**options):
        stream = token_stream(path, tokenizer, 64, 12, lanes=1, buffer=20, **options)
        batch = next(iter(stream))
        return tokenizer.batch_decode(batch["input_ids"]), (batch["targets"] >= 0).sum().item()

    held = load_held_out(path, TokenSettings(tokenizer, 64))
    assert held.kind == "messages" and held.splits["val"].prompts(100)
    texts, targets = read()
    assert max(text.count("user") for text in texts) > 1 and any("long" in text for text in texts)
    assert read(loss_on="all")[1] > targets
    assert {text.count("user") for text in read(packed=False)[0]} == {1}


def test_a_stream_continues_where_a_pass_ends(tmp_path, tokenizer):
    """Also if no row is left of the pass, or only rows without documents."""
    rows = [{"text": f"text {number} of some"} for number in range(4)] + [{"text": ""}] * 2
    path = write_rows(tmp_path / "a.jsonl", rows)

    def read(count, position=None):
        # A buffer is one document, so that some begin behind the last one.
        stream = token_stream(path, tokenizer, 8, 1, lanes=1, buffer=1, position=position)
        return global_batches([iter(stream)], "input_ids", count)

    whole, position = read(30)
    assert position["0"]["buffers"] > 4
    for stop in range(1, 20):
        before, position = read(stop)
        assert before + read(30 - stop, position)[0] == whole, stop


# --------------------------------------------------------------------------------------- mixtures

MIXED, WEIGHTS = 4, [3.0, 1.0]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Files with 40 conversations, which are soon exhausted, and with 200 texts."""
    folder = tmp_path_factory.mktemp("sources")
    texts = [{"text": f"text {n}" + " of some words" * (1 + n % 9)} for n in range(200)]
    chats = write_rows(folder / "chats.jsonl", conversations(range(40)))
    return [chats, write_rows(folder / "texts.jsonl", texts)]


@pytest.fixture(scope="module")
def in_memory(sources, tokenizer):
    return [load_tokens(name, TokenSettings(tokenizer, BLOCK)).splits["train"] for name in sources]


def test_a_pass_has_every_document_once_in_an_order_of_its_own(in_memory):
    blocks = in_memory[0]
    count = len(blocks.pieces.starts)
    readers = [iter(MemoryReader(blocks, 7, lane, 3)) for lane in range(3)]
    documents = [next(readers[number % 3])[0] for number in range(3 * count)]
    targets = sum(document.is_target[1:].sum() for document in documents)
    assert targets == 3 * blocks.target_tokens < sum(len(some.tokens) for some in documents)
    found = [document.tokens.tobytes() for document in documents]
    passes = [found[start : start + count] for start in range(0, 3 * count, count)]
    assert len(set(passes[0])) == count and sorted(passes[0]) == sorted(passes[1])
    assert passes[0] != passes[1] != passes[2] != passes[0]
    reader = MemoryReader(blocks, 7, 1, 3)
    reader.seek(count // 3)
    assert next(iter(reader))[0].tokens.tobytes() == found[count // 3 * 3 + 1]


def mixed_batches(sources, tokenizer, processes, count, position=None, seed=0):
    """The blocks of `count` global batches, and the position that a checkpoint would store."""
    options = dict(lanes=MIXED, buffer=4, weights=WEIGHTS, seed=seed, position=position)
    readers = []
    for process in range(processes):
        options["share"] = (process, processes)
        readers.append(iter(token_stream(sources, tokenizer, BLOCK, 8 // processes, **options)))
    return global_batches(readers, "input_ids", count)


@pytest.mark.parametrize("where", ["memory", "stream"])
def test_any_number_of_processes_mixes_the_same_blocks_from_any_position(
    where, sources, in_memory, tokenizer
):
    mixed = in_memory if where == "memory" else sources
    whole, last = mixed_batches(mixed, tokenizer, 1, 40)
    assert mixed_batches(mixed, tokenizer, 4, 40) == (whole, last)
    for stop in (1, 3, 17):
        before, position = mixed_batches(mixed, tokenizer, 2, stop)
        middle, position = mixed_batches(mixed, tokenizer, 4, 5, position)
        rest, end = mixed_batches(mixed, tokenizer, 1, 35 - stop, position)
        assert (before + middle + rest, end) == (whole, last), stop
    taken = [
        sum(counts)
        for counts in zip(*(at["reader"]["documents"] for at in last.values()), strict=True)
    ]
    assert taken[0] > 2 * 40  # it was exhausted
    assert taken[0] / sum(taken) == pytest.approx(3 / 4, abs=8 / sum(taken))
    assert mixed_batches(mixed, tokenizer, 1, 40, seed=1)[0] != whole


def test_common_numbers_of_processes_divide_the_lanes():
    assert [count_lanes(size) for size in (1, 3, 16, 24, 64, 96, 512)] == [1, 1, 16, 8, 64, 32, 64]


def order(weights, count, taken=None, lane=0):
    """The sources of `count` documents; and how many of each were taken."""
    taken, found = taken or [0] * len(weights), []
    for _ in range(count):
        found.append(next_source(weights, taken, lane))
        taken = [n + (source == found[-1]) for source, n in enumerate(taken)]
    return found, taken


@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=6), st.integers(0, 700))
@settings(max_examples=15)
def test_each_source_stays_within_two_documents_of_its_share(weights, stop):
    weights = [weight**3 / sum(one**3 for one in weights) for weight in weights]
    whole, taken = order(weights, 2000)
    for source, weight in enumerate(weights):
        counts = np.cumsum([other == source for other in whole])
        windows = counts[1000:] - counts[:-1000]
        assert abs(windows - 1000 * weight).max() < 2, weights
    together = np.array([order(weights, 300, lane=lane)[0] for lane in range(8)]).T.ravel()
    for source, weight in enumerate(weights):
        counts = np.cumsum(together == source)
        assert abs(counts[1000:] - counts[:-1000] - 1000 * weight).max() < 8  # one percent are ten
    # A resume is an order that begins with what was taken.
    before, taken = order(weights, stop)
    assert before + order(weights, 2000 - stop, taken)[0] == whole
