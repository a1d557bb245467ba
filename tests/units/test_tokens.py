"""A data set as blocks of tokens: what is counted, cached and said; its shards; and streams."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.chats import (
    PLAIN,
    conversations,
    make_tokenizer,
    say,
    with_template,
    write_rows,
)
from harness.data import global_batches

from utils.language import tokens
from utils.language.conversations import Encoder
from utils.language.lanes import Share
from utils.language.packing import SEGMENT, TokenSettings, join_segments
from utils.language.rows import Rows
from utils.language.tokens import Shards, count_lanes, divide, load_held_out, load_tokens, tokenize
from utils.run.failures import RunFailed, UserError


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and the rows that were tokenized, on one core."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens.devices, "cores", lambda: 1)
    counted, draft = [], Encoder.draft
    monkeypatch.setattr(Encoder, "draft", lambda *args: counted.append(args[-1]) or draft(*args))
    return counted


def load(path, tokenizer, block_size, **options):
    return load_tokens(path, TokenSettings(tokenizer, block_size, **options))


def chats(path, count=40):
    rows = [{"messages": say(f"u {i} hello", f"a what {i}")} for i in range(count)]
    return write_rows(Path(path), rows)


def targets(blocks):
    """The texts of all targets."""
    batch = blocks.__getitems__(list(range(len(blocks))))
    return batch["targets"][batch["targets"] >= 0].tolist()


def test_rows_become_blocks(tokenizer, tmp_path):
    rows = [{"prompt": f"{i}: ", "completion": f"what {i}"} for i in range(40)]
    corpus = load(write_rows(tmp_path / "a.jsonl", rows), tokenizer, 64)
    assert corpus.kind == "prompt" and set(corpus.splits) == {"train", corpus.held_out}
    said = "".join(tokenizer.decode(targets(blocks)) for blocks in corpus.splits.values())
    assert sorted(said.split("<|im_end|>")[:-1]) == sorted(f"what {i}" for i in range(40))
    assert corpus.splits["val"].bytes is None
    assert corpus.description.startswith("36 train and 4 val prompts with completions, ")
    counted = sum(blocks.tokens for blocks in corpus.splits.values())
    assert f" {counted:,} tokens (fingerprint " in corpus.description
    assert f"{corpus.splits['train'].target_tokens:,} targets" in "".join(corpus.details)
    prompt, answer = map(tokenizer.decode, corpus.splits["train"].prompts(1)[0])
    assert answer == f"what {prompt.removesuffix(': ')}<|im_end|>"


def test_the_end_of_a_single_text_is_held_out(tokenizer, tmp_path, monkeypatch):
    """Each token but the first is a target, and each byte counts once."""
    text = "".join(f"the date is {number}\n" for number in range(300))
    (tmp_path / "a.txt").write_text(text)
    corpus = load(str(tmp_path / "a.txt"), tokenizer, 32, val_fraction=0.4)
    train, val = corpus.splits["train"], corpus.splits["val"]
    first = tokenizer.decode(train[0]["input_ids"][:1])
    said = [tokenizer.decode(targets(blocks)) for blocks in (train, val)]
    assert first + "".join(said) == f"{text}<|im_end|>"
    assert said[1].startswith("the date") and 0.3 < len(said[1]) / len(text) < 0.5
    assert [train.bytes, val.bytes] == [len(said[0]), len(said[1].removesuffix("<|im_end|>"))]
    monkeypatch.setattr("utils.language.documents.SHORTEST", 6000)
    os.utime(tmp_path / "a.txt", (1, 1))
    with pytest.raises(UserError, match="has one document: none is left to hold out"):
        load(str(tmp_path / "a.txt"), tokenizer, 32)
    # The same tokens, whatever is tokenized at once.
    whole = load(str(tmp_path / "a.txt"), tokenizer, 32, val_fraction=0).splits["train"]
    assert targets(whole) == targets(train) + targets(val)


def test_only_what_decides_about_tokens_makes_them_anew(tmp_path, cache, monkeypatch):
    path, tokenizer = chats(tmp_path / "a.jsonl"), make_tokenizer()
    first = load(path, tokenizer, 256)
    again = load(path, make_tokenizer(), 256, seed=1)  # other rows are held out
    assert again.description != first.description
    alone = load(path, tokenizer, 64, packed=False, val_fraction=0.25).splits
    assert (len(alone["train"]), len(alone["val"])) == (30, 10)  # a block for each
    same = load(path, tokenizer, 256)
    assert (same.description, same.details) == (first.description, first.details)
    assert len(cache) == 40
    longer = make_tokenizer()
    longer.add_tokens(["what"])
    made = [load(path, longer, 256), load(path, with_template(tokenizer, PLAIN), 256)]
    made += [load(path, tokenizer, 256, loss_on="all"), load(chats(path, 41), tokenizer, 256)]
    assert len({first.description, *(other.description for other in made)}) == 5
    assert len(cache) == 40 + 3 * 40 + 41
    monkeypatch.setattr(tokens, "VERSION", -1)
    assert load(path, tokenizer, 256).description == made[-1].description
    assert len(cache) == 40 + 3 * 40 + 2 * 41


def test_what_is_left_out_is_said(tokenizer, tmp_path):
    rows = [{"messages": say("u hello", "a what")} for _ in range(20)]
    rows[3] = {"messages": say("u hello")}
    rows[5] = {"messages": []}
    rows[7] = {"messages": say("u " + "hello " * 99, "a what")}  # its answer is cut off
    rows[9] = {"messages": say("u hello", "a " + "what " * 99)}
    rows[13] = {"messages": None}
    rows[14]["messages"][1] |= {"weight": 1, "trian": False, "time zone": "here"}
    path = tmp_path / "a.jsonl"
    write_rows(path, rows)
    path.write_text(path.read_text() + "\n")
    corpus = load(str(path), tokenizer, 64, val_fraction=0)
    assert set(corpus.splits) == {"train"} and corpus.description.startswith("17 train conv")
    details = "\n".join(corpus.details)
    assert "conversations without an answer: 3 (row 3)" in details
    assert "1 truncated, 1 no targets" in details
    assert "not read, as the chat template does not: 'time zone', 'trian'" in details
    write_rows(path, [{"text": text} for text in ("hello", "", None, " \n", "world", "what")])
    corpus = load(str(path), make_tokenizer(eos_token=None), 8)
    assert corpus.description.startswith("2 train and 1 val documents")
    details = "\n".join(corpus.details)
    assert "empty documents: 3 (row 1)" in details and "not read" not in details
    (folder := tmp_path / "splits").mkdir()
    for split, numbers in (("train", range(10)), ("val", range(8, 12))):
        write_rows(folder / f"{split}.jsonl", [{"text": f"a text {i}"} for i in numbers])
    details = load(str(folder), tokenizer, 16).details
    assert "val: equal documents are in train: 2 (row 0)" in details


def held_out(contents, rows=None, **settings):
    """The rows of documents with these contents that are held out."""
    segments = np.ones(len(contents), SEGMENT)
    segments["row"] = np.arange(len(contents)) if rows is None else rows
    segments["digest"] = contents
    train, chosen = divide(segments, TokenSettings(None, 8, **settings))
    assert not set(train["row"]) & set(chosen["row"]) and len(train) + len(chosen) == len(contents)
    return set(chosen["row"].tolist())


def test_the_held_out_rows_are_chosen_by_the_seed(tokenizer, tmp_path):
    rows = np.repeat(np.arange(100), 2)
    chosen = held_out(rows, rows)
    assert len(chosen) == 10 and held_out(rows[::-1], rows[::-1]) == chosen
    assert held_out(rows, rows, seed=1) != chosen < held_out(rows, rows, val_fraction=0.2)
    for share in (0.01, 0.99):
        assert len(held_out(rows[:4], rows[:4], val_fraction=share)) == 1
    contents = np.arange(100) % 50  # equal rows are on one side
    chosen = contents[list(held_out(contents, val_fraction=0.2))]
    assert len(chosen) == 20 and len(set(chosen.tolist())) == 10
    for some in ([{"text": "a"}, {"text": ""}], [{"messages": say("u a")}] * 3):
        with pytest.raises(UserError, match="has one document"):
            load(write_rows(tmp_path / "a.jsonl", some), tokenizer, 16)


# --------------------------------------------------------------------------------------- shards

CHATS = [{"messages": say(f"u {number} hello", f"a what {number}")} for number in range(25)]
ENCODER = Encoder(make_tokenizer())
ROWS = Rows([*CHATS, {"messages": []}], "here", "26 rows")


def shards_of(size):
    return Shards(replace(ROWS, shard_size=size), ENCODER, "messages")


def blocks_of(stream, segments):
    """The batch of all blocks."""
    blocks, _ = TokenSettings(ENCODER.tokenizer, 64).pack(stream, join_segments(segments[:25]))
    return blocks.__getitems__(list(range(len(blocks)))), blocks.prompts(30)


@pytest.mark.parametrize(("size", "cores"), [(1, 1), (7, 2), (13, 1)])
def test_shards_have_the_tokens_of_all_rows(size, cores, monkeypatch):
    monkeypatch.setattr(tokens.devices, "cores", lambda: cores)
    stream, segments = tokenize(ROWS, ENCODER, "messages")
    assert segments["row"].tolist() == list(range(26)) and segments["length"][25] == 0
    assert len(set(segments["digest"].tolist())) == 26 and (segments["targets"][:25] > 0).all()
    monkeypatch.setattr(tokens, "AT_ONCE", 3)
    others, same = tokenize(replace(ROWS, shard_size=size), ENCODER, "messages")
    assert (same == segments).all()
    batch, prompts = blocks_of(stream, segments)
    other, others = blocks_of(others, same)
    assert all((values == other[name]).all() for name, values in batch.items())
    assert prompts == others and len(prompts) == 25 and (batch["targets"] >= 0).any()


def test_what_is_done_is_not_done_again(cache):
    shards = shards_of(10)
    assert shards.missing() == [0, 1, 2] and shards[1] == 1 and shards.missing() == [0, 2]
    assert shards[1] == 1 and len(cache) == 10 and shards_of(11).missing() == [0, 1, 2]
    for _ in range(2):
        tokenize(replace(ROWS, shard_size=10), ENCODER, "messages")
        assert len(cache) == 26


@pytest.mark.parametrize("cores", [1, 2])
def test_a_row_that_cannot_be_used_is_named_and_the_rest_is_kept(cores, monkeypatch):
    monkeypatch.setattr(tokens.devices, "cores", lambda: cores)
    rows = Rows([{"text": "a"}] * 10 + [{"text": 5}], "here", "11 texts", shard_size=4)
    with pytest.raises(UserError, match=r"^row 10 of here has no text, but int$"):
        tokenize(rows, ENCODER, "text")
    assert Shards(rows, ENCODER, "text").missing() == [2]
    stream, segments = tokenize(Rows(rows.rows[:3], "here", "3 texts"), ENCODER, "text")
    assert stream.is_target is None and segments["row"].tolist() == [0, 1, 2]


# --------------------------------------------------------------------------------------- streams


def token_stream(path, tokenizer, size, micro_batch, *, lanes=8, share=(0, 1), **options):
    """A stream in blocks of `size`; `options`: its buffer, the position of its share, or settings."""
    buffer = options.pop("buffer", tokens.BUFFER)
    share = Share(lanes, micro_batch, *share, options.pop("position", None))
    return tokens.open_stream(path, TokenSettings(tokenizer, size, **options), share, buffer)


def test_a_validation_split_is_held_out_up_to_some_blocks(tmp_path, tokenizer, monkeypatch):
    def held_out(tokenizer=tokenizer):
        return load_held_out(str(folder), TokenSettings(tokenizer, 16))

    (folder := tmp_path / "data").mkdir()
    for split, count in (("train", 20), ("val", 90)):
        rows = [{"text": f"{split} text {number}"} for number in range(count)]
        write_rows(folder / f"{split}.jsonl", rows)
    whole = held_out()
    said = tokenizer.decode(whole.splits["val"].__getitems__([0])["input_ids"][0].tolist())
    assert whole.kind == "text" and "val text" in said and "train" not in said
    monkeypatch.setattr(tokens, "HELD_OUT_BLOCKS", 2)
    some = held_out()
    assert 16 < some.splits["val"].tokens < 4 * 16 < whole.splits["val"].tokens
    assert f"of which {some.splits['val'].tokens:,} tokens are held out" in some.description
    write_rows(folder / "val.jsonl", [{"text": "a"}] * 3)
    with pytest.raises(UserError, match="has no token to predict in what is held out"):
        held_out(make_tokenizer(eos_token=None))


def test_what_cannot_be_streamed_is_one_line(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    with pytest.raises(UserError, match=r"has no document that is held out .* too small to stream"):
        load_held_out(path, TokenSettings(tokenizer, 16))
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
