"""Names of splits: the documented words in upper or lower case, and nothing else."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from utils.data.tables import files_by_split, split_of
from utils.run.failures import UserError

WORDS = {
    **dict.fromkeys("train training".split(), "train"),
    **dict.fromkeys("val valid validation dev".split(), "val"),
    **dict.fromkeys("test testing".split(), "test"),
}
CASES = st.sampled_from([str.lower, str.upper, str.title])
SPLIT_WORD = st.builds(lambda word, case: case(word), st.sampled_from(list(WORDS)), CASES)
SHARD = st.sampled_from(["", "-00000-of-00002", "-00001-of-00002-a1b2c3"])
OTHER_WORD = st.sampled_from("tube station bird images 2017 set".split())
JOIN = st.sampled_from(["_", "-", " ", ".", ""])


@st.composite
def almost(draw, word):
    """A name that has a word of a split in it, but is not that word."""
    parts = draw(st.permutations([word, draw(OTHER_WORD)]))
    return draw(JOIN).join(parts)


def split_named(word):
    return WORDS[word.lower()]


@given(SPLIT_WORD, SHARD, st.data())
def test_a_name_is_a_split_if_it_is_exactly_one_of_the_words(word, shard, data):
    assert split_of(word + shard) == split_named(word)
    assert split_of(data.draw(almost(word)) + shard) is None


@given(SPLIT_WORD, SHARD, st.sampled_from(["train", "Training"]))
def test_a_file_is_of_the_split_that_it_names_or_else_of_that_of_its_folder(word, shard, train):
    root, beside = Path("data"), f"{train}/part.csv"
    for file in (f"{word}{shard}.txt.gz", f"{word}/deep/part2.csv"):
        expected = {"train": [root / beside]}
        expected.setdefault(split_named(word), []).insert(0, root / file)
        assert files_by_split(root, [file, beside]) == expected


@given(st.sampled_from(["train", "training"]), st.sampled_from(["val", "dev", "test"]), st.data())
def test_names_that_are_almost_splits_are_refused(train, held_out, data):
    """Unless one of them is without such a word: then they are names like any other."""
    files = [f"{data.draw(almost(train))}.txt", f"{data.draw(almost(held_out))}.txt"]
    with pytest.raises(UserError, match=r"to (val|test|train) if it is a split"):
        files_by_split(Path("data"), files)
    others = [*files, "docs.txt"]
    assert files_by_split(Path("data"), others) == {"train": [Path("data") / f for f in others]}
