"""Names of splits: the documented words in any spelling, and nothing else."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from utils.data import splits
from utils.data.tables import files_by_split
from utils.images.sources import find_images

WORDS = {
    **dict.fromkeys("train training trainset traindata".split(), "train"),
    **dict.fromkeys("val valid validation validate validating dev valset devset".split(), "val"),
    **dict.fromkeys("test testing testset testdata".split(), "test"),
}
NEUTRAL = (
    "a an the my our all of part seg set sets split splits data dataset datasets image images img "
    "imgs picture pictures photo photos file files folder text texts"
).split()
SPLIT_WORD, NEUTRAL_WORDS = st.sampled_from(list(WORDS)), st.lists(st.sampled_from(NEUTRAL))
OTHER_WORD = st.sampled_from(
    "tube station bird teste trains pretrain contest devil evaluation".split()
)


@st.composite
def spelled(draw, words):
    """These words in one of the ways in which people write a name of several."""
    words = draw(st.permutations(words))
    if "a" not in words and draw(st.booleans()):
        name = "".join(map(str.title, words))  # TrainSet
    else:
        case = draw(st.sampled_from([str.lower, str.upper, str.title]))
        name = case(draw(st.sampled_from(["_", "-", " ", ".", "2017"])).join(words))
    return name + draw(st.sampled_from(["", "2", "-00000-of-00004", "_"]))


@given(SPLIT_WORD, NEUTRAL_WORDS, st.data())
def test_any_spelling_of_a_documented_word_is_its_split(word, neutral, data):
    name = data.draw(spelled([word, *neutral]))
    assert splits.split_of(name) == WORDS[word]
    assert splits.assign([name, "cats"]) == {name: WORDS[word]}


@given(st.lists(SPLIT_WORD, max_size=2), OTHER_WORD, NEUTRAL_WORDS, st.data())
def test_any_other_name_says_no_split(words, other, neutral, data):
    assert splits.split_of(data.draw(spelled([*words, other]))) is None
    assert splits.split_of(data.draw(spelled([*words, *words]))) is None or not words
    assert splits.split_of(data.draw(spelled(neutral or ["cat"]))) is None


@given(OTHER_WORD, st.sets(SPLIT_WORD, min_size=1, max_size=3), st.data())
def test_names_that_differ_in_the_split_only_are_splits_if_one_is_train(other, words, data):
    names = {data.draw(spelled([word, other])): WORDS[word] for word in words}
    several = "train" in names.values() and len(set(names.values())) > 1
    assert splits.assign(["docs", *names]) == (names if several else {})
    own = {data.draw(spelled([word, f"{other}{'xyz'[i]}"])) for i, word in enumerate(words)}
    assert splits.assign([*own, other]) == {}  # each says something else
    assert splits.assign(["Train", *names]) == {"Train": "train"}


@given(SPLIT_WORD, st.sampled_from(["train", "training", "trainset"]), st.data())
def test_a_file_is_of_the_split_that_it_names_or_else_of_that_of_its_folder(word, train, data):
    root, beside = Path("data"), f"{train}/part.csv"
    for file in (f"{data.draw(spelled([word]))}.txt.gz", f"{word}/deep/part2.csv"):
        files = files_by_split(root, [file, beside])
        expected = {"train": [root / beside]}
        expected.setdefault(WORDS[word], []).insert(0, root / file)
        assert files == expected


@settings(max_examples=15)
@given(st.sampled_from(["train", "Training", "seg_train"]), SPLIT_WORD, OTHER_WORD, st.data())
def test_a_split_never_swallows_a_class(train, word, other, data):
    """Whatever it is called, beside another one or in a folder of splits."""
    classes = {data.draw(spelled([word, other])), "cat"}
    if data.draw(st.booleans()):
        classes.add(word)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for place in [root / "splits" / train, root / "splits" / "val", root / "classes"]:
            for name in classes - ({word} if place.name == "classes" else set()):
                (place / name).mkdir(parents=True)
                for i in range(2):
                    Image.new("RGB", (4, 4)).save(place / name / f"{i}.png")
        found = find_images(str(root / "splits"))
        assert found.class_names == sorted(classes) and list(found.splits) == ["train", "val"]
        assert all(len(images) == 2 * len(classes) for images in found.splits.values())
        alone = find_images(str(root / "classes"), val_fraction=0.5)
        assert alone.class_names == sorted(classes - {word})
