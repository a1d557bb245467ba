"""Streamed documents: the same batches on any number of processes, from any position."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from test_conversations import make_tokenizer, say

from utils.language import token_stream as module
from utils.language.documents import open_documents
from utils.language.token_stream import TokenStream, load_held_out
from utils.run.failures import RunFailed, UserError

LANES, BLOCK = 6, 48


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations of different lengths, some without an answer, in three files."""
    folder = tmp_path_factory.mktemp("chats")
    for part in range(3):
        rows = [
            {
                "messages": say(
                    f"u ask {part} {number}",
                    "a " + "word " * (0 if number % 9 == 5 else 1 + number % 7),
                )
            }
            for number in range(150)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"part-{part}.jsonl").write_text(text)
    return str(folder)


def batches(name, tokenizer, processes, count, position=None):
    """The blocks of `count` global batches, and the position that a checkpoint would store."""
    options = dict(lanes=LANES, buffer=4, seed=0, position=position)
    readers = [
        iter(TokenStream(name, tokenizer, BLOCK, 12 // processes, share=(p, processes), **options))
        for p in range(processes)
    ]
    found = []
    for _ in range(count):
        parts = [next(reader) for reader in readers]
        position = {lane: place for part in parts for lane, place in part["position"].items()}
        blocks = [
            (inputs, targets, positions)
            for part in parts
            for inputs, targets, positions in zip(
                part["input_ids"].tolist(),
                part["targets"].tolist(),
                part["position_ids"].tolist(),
                strict=True,
            )
        ]
        found.append(sorted(blocks))
    return found, json.loads(json.dumps(position))


@pytest.mark.slow
def test_any_number_of_processes_streams_the_same_blocks_from_any_position(chats, tokenizer):
    whole, _ = batches(chats, tokenizer, 1, 40)
    assert batches(chats, tokenizer, 3, 40)[0] == whole
    for stop in (1, 2, 3, 17, 35):
        before, position = batches(chats, tokenizer, 2, stop)
        assert before + batches(chats, tokenizer, 6, 40 - stop, position)[0] == whole, stop
        middle, position = batches(chats, tokenizer, 2, 3, position)  # resumed twice
        rest, _ = batches(chats, tokenizer, 2, 37 - stop, position)
        assert before + middle + rest == whole, stop


def test_held_out_documents_are_never_trained_on(chats, tokenizer):
    held = load_held_out(chats, tokenizer, BLOCK)
    blocks = held.splits["val"]
    answered = set(map(repr, blocks.prompts(100)))
    assert held.kind == "messages" and len(answered) >= 2 and "fingerprint" in held.description

    def prompts(rows):
        return {
            tuple(inputs[start : start + 12])
            for inputs, _, positions in rows
            for start in [i for i, place in enumerate(positions) if place == 0]
        }

    trained = prompts(block for batch in batches(chats, tokenizer, 1, 60)[0] for block in batch)
    for ids, _ in blocks.prompts(100):
        assert tuple(ids[:12]) not in trained


def test_a_validation_split_is_held_out_as_a_whole(tmp_path, tokenizer):
    for split, count in (("train", 20), ("val", 5)):
        rows = [{"text": f"{split} text {number}"} for number in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(text)
    held = load_held_out(str(tmp_path), tokenizer, 16)
    said = tokenizer.decode(held.splits["val"].__getitems__([0])["input_ids"][0].tolist())
    assert held.kind == "text" and "val text" in said and "train" not in said


def test_what_cannot_be_streamed_is_one_line(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(UserError, match="leave out --streaming"):
        open_documents(str(tmp_path))
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' * 3)
    with pytest.raises(UserError, match=r"has 3 documents, none .* too small to stream"):
        load_held_out(str(tmp_path), tokenizer, 16)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": 5}\n')
    stream = TokenStream(str(tmp_path), tokenizer, 16, 1, share=(0, 1), lanes=1, buffer=4)
    with pytest.raises(RunFailed, match=r"row 2 of --dataset .*\(train\)") as error:
        next(iter(stream))
    assert error.value.rank_variable is None  # each process says what it alone met
    with pytest.raises(UserError, match="which 2 processes cannot share"):
        TokenStream(str(tmp_path), tokenizer, 16, 1, share=(0, 2), lanes=3)
    with pytest.raises(UserError, match="must be a multiple of 8, not 4: change --batch_size"):
        TokenStream(str(tmp_path), tokenizer, 16, 4, share=(0, 1), lanes=8)
    with pytest.raises(UserError, match="--subset de: only a Hub id has subsets"):
        open_documents(str(tmp_path), "de")


def test_held_out_documents_fill_some_blocks_only(chats, tokenizer, monkeypatch):
    whole = load_held_out(chats, tokenizer, BLOCK, loss_on="all")
    monkeypatch.setattr(module, "HELD_OUT_BLOCKS", 2)
    some = load_held_out(chats, tokenizer, BLOCK, loss_on="all")
    assert 2 * BLOCK <= some.splits["val"].tokens < whole.splits["val"].tokens
    assert f"of which {some.splits['val'].tokens:,} tokens are held out" in some.description


@pytest.mark.parametrize("held_out", [False, True])
def test_options_of_a_stream_decide_about_its_blocks(held_out, tmp_path, tokenizer, monkeypatch):
    """Which documents share a block, which tokens are targets, and what is left out."""
    monkeypatch.setattr(module, "HELD_OUT_ONE_IN", 2)
    turns = [(f"u {number}", "a " + "long" * (30 * (number % 4 == 0))) for number in range(160)]
    rows = [json.dumps({"messages": say(user, f"{answer} so")}) for user, answer in turns]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))

    def read(**options):
        if held_out:
            blocks = load_held_out(str(tmp_path), tokenizer, 64, **options).splits["val"]
            batch = blocks.__getitems__(list(range(len(blocks))))
        else:
            options |= dict(lanes=1, buffer=20)
            batch = next(iter(TokenStream(str(tmp_path), tokenizer, 64, 12, **options)))
        texts = tokenizer.batch_decode(batch["input_ids"])
        return texts, (batch["targets"] >= 0).sum().item()

    texts, targets = read()
    assert max(text.count("user") for text in texts) > 1 and any("long" in text for text in texts)
    assert read(loss_on="all")[1] > targets
    assert {text.count("user") for text in read(packed=False)[0]} == {1}
    assert not any("long" in text for text in read(too_long="drop")[0])


def test_a_subset_is_streamed(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 4)
    asked, real = [], module.open_documents

    def opened(name, subset):
        asked.append(subset)
        return real(name)

    monkeypatch.setattr(module, "open_documents", opened)
    monkeypatch.setattr(module, "HELD_OUT_ONE_IN", 1)
    load_held_out(str(tmp_path), tokenizer, 16, subset="de")
    TokenStream(str(tmp_path), tokenizer, 16, 2, subset="de", lanes=2)
    assert asked == ["de"] * 3


def test_a_stream_is_as_the_arguments_say():
    made = []

    class Recorded(TokenStream):
        def __init__(self, *args, **options):
            made.append((args, options))

    args = SimpleNamespace(batch_size=64, gradient_accumulation_steps=2, block_size=128)
    args.mixture, args.subset, args.loss_on = [3.0, 1.0], "de", "all"
    args.too_long, args.seed = "drop", 5
    second = SimpleNamespace(num_processes=4, process_index=1)
    position = {"0": {"readers": [None]}}
    Recorded.from_args(args, second, "tokenizer", False, ["a", "b"], position)
    expected = dict(weights=[3.0, 1.0], subset="de", loss_on="all", too_long="drop", packed=False)
    expected |= dict(seed=5, share=(1, 4), position=position)
    assert made == [((["a", "b"], "tokenizer", 128, 8), expected)]
    second.num_processes = 3
    with pytest.raises(UserError, match="which 3 processes cannot share"):
        Recorded.from_args(args, second, "tokenizer", False, ["a", "b"])


def test_a_buffer_is_shuffled_by_the_seed_and_other_lanes_begin_elsewhere(tmp_path, tokenizer):
    for name in "ab":
        rows = [{"text": f"{name} {number} of some text"} for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [str(tmp_path / f"{name}.jsonl") for name in "ab"]

    def read(sources, seed, count, **options):
        stream = iter(TokenStream(sources, tokenizer, 16, 2, seed=seed, buffer=20, **options))
        blocks = [block for _ in range(count) for block in next(stream)["input_ids"].tolist()]
        return [tokenizer.decode(block) for block in blocks]

    (lane,) = TokenStream(names, tokenizer, 16, 2, weights=[1.0, 1.0], lanes=1).lanes.values()
    none = {"readers": [None, None], "documents": [0, 0], "tokens": [0, 0], "epochs": [0, 0]}
    assert lane.position == none | {"buffers": 0, "taken": 0}
    first, again, other = (read(names[0], seed, 10, lanes=1) for seed in (0, 0, 1))
    assert first == again != other and sorted(first) == sorted(other)
    stream = TokenStream(names, tokenizer, 16, 8, weights=[1.0, 1.0], lanes=8, buffer=0.01)
    batch = next(iter(stream))
    assert 0 < batch["source"].sum() < 8  # documents of both
    assert batch["ids"].tolist() == list(range(8))
    alike = TokenStream(names, tokenizer, 16, 8, weights=[2.0, 6.0], lanes=8, buffer=4)
    quarters = TokenStream(names, tokenizer, 16, 8, weights=[0.25, 0.75], lanes=8, buffer=4)
    one, two = next(iter(alike)), next(iter(quarters))
    assert one["input_ids"].equal(two["input_ids"])


def test_held_out_texts_of_one_token_are_too_short(tmp_path):
    tokenizer = make_tokenizer(eos_token=None)
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text('{"text": "a"}\n' * 3)
    with pytest.raises(UserError, match="has no token to predict in what is held out"):
        load_held_out(str(tmp_path), tokenizer, 16)


def test_a_stream_continues_where_a_pass_ends(tmp_path, tokenizer):
    """Also if no row is left of the pass, or only rows without documents."""
    rows = [{"text": f"text {number} of some"} for number in range(4)] + [{"text": ""}] * 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(count, position=None):
        # A buffer is one document, so that some begin behind the last one.
        options = dict(lanes=1, buffer=1, share=(0, 1), position=position)
        found, passes = [], []
        for batch in TokenStream(str(tmp_path), tokenizer, 8, 1, **options):
            found.append(batch["input_ids"].tolist())
            passes += batch["position"]["0"]["epochs"]
            if len(found) == count:
                assert {later - before for before, later in pairwise(passes)} <= {0, 1}
                return found, json.loads(json.dumps(batch["position"]))

    whole, position = read(30)
    assert position["0"]["epochs"][0] > 1 and position["0"]["buffers"] > 1
    for stop in range(1, 20):
        before, position = read(stop)
        assert before + read(30 - stop, position)[0] == whole, stop
