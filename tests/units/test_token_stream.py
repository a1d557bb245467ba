"""Streamed documents: the same batches on any number of processes, from any position."""

import pytest
from harness.chats import conversations, make_tokenizer, say, token_stream, write_rows
from harness.data import global_batches

from utils.language import tokens as module
from utils.language.packing import TokenSettings
from utils.language.tokens import count_lanes, load_held_out
from utils.run.failures import RunFailed, UserError


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


def test_any_number_of_processes_reads_the_same_blocks_from_any_position(tmp_path, tokenizer):
    path = write_rows(tmp_path / "chats.jsonl", conversations(range(80)))

    def batches(processes, count, position=None, seed=0):
        options = dict(lanes=4, buffer=4, seed=seed, position=position)
        readers = []
        for process in range(processes):
            options["share"] = (process, processes)
            readers.append(iter(token_stream(path, tokenizer, 48, 8 // processes, **options)))
        return global_batches(readers, "input_ids", count)

    whole, last = batches(1, 40)
    assert batches(4, 40) == (whole, last) and batches(1, 40, seed=1)[0] != whole
    for stop in (1, 17):
        before, position = batches(2, stop)
        middle, position = batches(4, 5, position)
        rest, end = batches(1, 35 - stop, position)
        assert (before + middle + rest, end) == (whole, last), stop


def test_common_numbers_of_processes_divide_the_lanes():
    assert [count_lanes(size) for size in (1, 3, 16, 24, 64, 96, 512)] == [1, 1, 16, 8, 64, 32, 64]
