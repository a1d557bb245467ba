"""The shards of a data set: the same tokens in any number of them, made by any number of processes."""

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")

from harness.chats import make_tokenizer, say

from utils.data.cache_files import path_in_cache
from utils.language import tokenizing
from utils.language.conversations import Encoder
from utils.language.documents import Files
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


def equal(one, other):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("size", "cores"), [(1, 1), (7, 2), (13, 1), (26, 2)])
def test_shards_have_the_tokens_of_all_rows(size, cores, folder, monkeypatch):
    monkeypatch.setattr(tokenizing.devices, "cores", lambda: cores)
    whole = tokenize(ROWS, ENCODER, "messages")
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.unlink()
    monkeypatch.setattr(tokenizing, "SHARD_ROWS", size)
    assert equal(tokenize(ROWS, ENCODER, "messages"), whole)
    (same,) = folder.iterdir()  # those of the shards are removed
    assert same == file and same.read_bytes() == content
    tokens, index = whole
    assert tokens.dtype.names == ("token", "is_target") and tokens["is_target"].any()
    assert index["row"].tolist() == list(range(26)) and index["length"][25] == 0
    assert len(set(index["digest"].tolist())) == 26


def test_what_is_done_is_not_done_again(folder, monkeypatch):
    monkeypatch.setattr(tokenizing, "SHARD_ROWS", 10)
    shards = Shards(ROWS, ENCODER, "messages")
    assert shards.missing() == [0, 1, 2] and shards[1] == 1 and shards.missing() == [0, 2]
    before = shards.file(1).stat().st_mtime_ns
    drafted, draft = [], Encoder.draft
    monkeypatch.setattr(Encoder, "draft", lambda *a: drafted.append(a[-1]) or draft(*a))
    assert shards[1] == 1 and shards.file(1).stat().st_mtime_ns == before
    tokenize(ROWS, ENCODER, "messages")
    numbers = [int(where.split()[1]) for where in drafted]
    assert numbers == [*range(10), *range(20, 26)] and len(list(folder.iterdir())) == 1
    tokenize(ROWS, ENCODER, "messages")
    assert len(drafted) == 16


def test_each_machine_begins_elsewhere(monkeypatch):
    monkeypatch.setattr(tokenizing, "SHARD_ROWS", 5)
    shards = Shards(ROWS, ENCODER, "messages")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    for machine, numbers in enumerate(([0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 0, 1], [4, 5, 0, 1, 2, 3])):
        monkeypatch.setenv("GROUP_RANK", str(machine))
        assert shards.missing() == numbers


def test_another_machine_may_join_the_shards(monkeypatch):
    monkeypatch.setattr(tokenizing, "SHARD_ROWS", 9)
    whole, cached = [], tokenizing.cached

    def overtaken(kind, parts, version):
        if not whole and version == Shards(ROWS, ENCODER, "messages").version:
            whole.append(None)
            whole.append(tokenize(ROWS, ENCODER, "messages"))
        return cached(kind, parts, version)

    monkeypatch.setattr(tokenizing, "cached", overtaken)
    result = tokenize(ROWS, ENCODER, "messages")
    assert equal(result, whole[1]) and len(result[1]) == 26

    def vanished(kind, parts, version):  # in the middle of joining
        Shards(ROWS, ENCODER, "messages").file(2).unlink()
        list(parts)

    path_in_cache("tokens", Shards(ROWS, ENCODER, "messages").version).unlink()
    monkeypatch.setattr(tokenizing, "cached", cached)
    for number in range(3):
        Shards(ROWS, ENCODER, "messages")[number]
    monkeypatch.setattr(tokenizing, "cached", vanished)
    with pytest.raises(FileNotFoundError):  # nobody has joined them
        tokenize(ROWS, ENCODER, "messages")


@pytest.mark.parametrize("cores", [1, 2])
def test_a_row_that_cannot_be_used_is_named_and_the_rest_is_kept(cores, monkeypatch):
    monkeypatch.setattr(tokenizing, "SHARD_ROWS", 4)
    monkeypatch.setattr(tokenizing.devices, "cores", lambda: cores)
    rows = Rows([{"text": "a"}] * 10 + [{"text": 5}], "here", "11 texts")
    with pytest.raises(UserError, match=r"^row 10 of here has no text, but int$") as raised:
        tokenize(rows, ENCODER, "text")
    assert raised.value.rank_variable == "RANK"
    assert Shards(rows, ENCODER, "text").missing() == [2]
    tokens, index = tokenize(Rows(rows.rows[:3], "here", "3 texts"), ENCODER, "text")
    assert tokens.dtype.names == ("token",) and index["row"].tolist() == [0, 1, 2]


def test_files_are_shards_of_a_certain_size(tmp_path, monkeypatch):
    paths = [tmp_path / f"{number}.txt" for number in range(6)]
    for path, size in zip(paths, (10, 70, 10, 10, 10, 10), strict=True):
        path.write_text("a" * size)
    monkeypatch.setattr("utils.language.documents.SHARD_BYTES", 60)
    files = Files([(path, 0, None) for path in paths[:5]] + [(paths[5], 4, 9)], "here")
    shards = list(files.shards(3))
    assert [len(part) for part in shards] == [2, 3, 1]
    assert [part.first for part in shards] == [0, 2, 5]
    assert [row for part in shards for row in part.parts] == files.parts
    assert {part.where for part in shards} == {"here"}
    cut = Files([(paths[1], 0, 30), (paths[1], 30, None), (paths[0], 0, None)], "here")
    assert [len(part) for part in cut.shards(9)] == [2, 1]
