"""The shards of a data set: the same tokens in any number of them, made by any number of processes."""

from dataclasses import replace

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")

from harness.chats import make_tokenizer, say

from utils.data.cache_files import path_in_cache
from utils.language import tokenizing
from utils.language.conversations import Encoder
from utils.language.rows import Rows
from utils.language.tokenizing import Shards, tokenize
from utils.run.failures import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the files; whoever tokenizes has one core."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizing.devices, "cores", lambda: 1)
    return tmp_path / "cache" / "tokens"


CHATS = [{"messages": say(f"u {number} hello", f"a what {number}")} for number in range(25)]
ENCODER = Encoder(make_tokenizer())
ROWS = Rows([*CHATS, {"messages": []}], "here", "26 rows")
TENS = replace(ROWS, shard_size=10)


def shards_of(size):
    return Shards(replace(ROWS, shard_size=size), ENCODER, "messages")


def equal(one, other):
    pairs = zip([*one[0], one[1]], [*other[0], other[1]], strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("size", "cores"), [(1, 1), (7, 2), (13, 1), (26, 2)])
def test_shards_have_the_tokens_of_all_rows(size, cores, folder, monkeypatch):
    monkeypatch.setattr(tokenizing.devices, "cores", lambda: cores)
    whole = tokenize(ROWS, ENCODER, "messages")
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.unlink()
    assert equal(tokenize(replace(ROWS, shard_size=size), ENCODER, "messages"), whole)
    (same,) = folder.iterdir()  # those of the shards are removed
    assert same == file and same.read_bytes() == content
    stream, segments = whole
    assert stream.is_target.any() and len(stream.tokens) == segments["length"].sum()
    assert segments["row"].tolist() == list(range(26)) and segments["length"][25] == 0
    assert len(set(segments["digest"].tolist())) == 26


def test_what_is_done_is_not_done_again(folder, monkeypatch):
    shards = shards_of(10)
    assert shards.missing() == [0, 1, 2] and shards[1] == 1 and shards.missing() == [0, 2]
    before = shards.file(1).stat().st_mtime_ns
    drafted, draft = [], Encoder.draft
    monkeypatch.setattr(Encoder, "draft", lambda *a: drafted.append(a[-1]) or draft(*a))
    assert shards[1] == 1 and shards.file(1).stat().st_mtime_ns == before
    assert shards_of(11).missing() == [0, 1, 2]
    tokenize(TENS, ENCODER, "messages")
    numbers = [int(where.split()[1]) for where in drafted]
    assert numbers == [*range(10), *range(20, 26)] and len(list(folder.iterdir())) == 1
    tokenize(TENS, ENCODER, "messages")
    assert len(drafted) == 16


def test_each_machine_begins_elsewhere(monkeypatch):
    shards = shards_of(5)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    for machine, numbers in enumerate(([0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 0, 1], [4, 5, 0, 1, 2, 3])):
        monkeypatch.setenv("GROUP_RANK", str(machine))
        assert shards.missing() == numbers


def test_another_machine_may_join_the_shards(monkeypatch):
    whole, cached, shards = [], tokenizing.cached, shards_of(10)

    def overtaken(kind, parts, version):
        if not whole and version == shards.version:
            whole.append(None)
            whole.append(tokenize(TENS, ENCODER, "messages"))
        return cached(kind, parts, version)

    monkeypatch.setattr(tokenizing, "cached", overtaken)
    result = tokenize(TENS, ENCODER, "messages")
    assert equal(result, whole[1]) and len(result[1]) == 26

    def vanished(kind, parts, version):  # in the middle of joining
        shards.file(2).unlink()
        list(parts)

    path_in_cache("tokens", shards.version).unlink()
    monkeypatch.setattr(tokenizing, "cached", cached)
    for number in range(3):
        shards[number]
    monkeypatch.setattr(tokenizing, "cached", vanished)
    with pytest.raises(FileNotFoundError):  # nobody has joined them
        tokenize(TENS, ENCODER, "messages")


@pytest.mark.parametrize("cores", [1, 2])
def test_a_row_that_cannot_be_used_is_named_and_the_rest_is_kept(cores, monkeypatch):
    monkeypatch.setattr(tokenizing.devices, "cores", lambda: cores)
    rows = Rows([{"text": "a"}] * 10 + [{"text": 5}], "here", "11 texts", shard_size=4)
    with pytest.raises(UserError, match=r"^row 10 of here has no text, but int$") as raised:
        tokenize(rows, ENCODER, "text")
    assert raised.value.rank_variable == "RANK"
    assert Shards(rows, ENCODER, "text").missing() == [2]
    stream, segments = tokenize(Rows(rows.rows[:3], "here", "3 texts"), ENCODER, "text")
    assert stream.is_target is None and segments["row"].tolist() == [0, 1, 2]
