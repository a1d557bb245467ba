"""Tells by its name which split a folder or a file is: the one rule for images, tables and text.

A name is cut into words: `seg_train2017` has `seg` and `train`. It is that of a split if one of its
words is in `SPLITS` and the others say nothing (`NEUTRAL`). So `Training`, `val_images` and
`train-00000-of-00004` are splits; `train_station` and `test_tube` are not. If several names differ
in nothing but such a word, as `birds_train` and `birds_test` do, they are splits, too.
"""

import re

SPLITS = {
    "train": {"train", "training", "trainset", "traindata"},
    "val": {"val", "valid", "validation", "validate", "validating", "dev", "valset", "devset"},
    "test": {"test", "testing", "testset", "testdata"},
}
NEUTRAL = {
    *"a an the my our all of part seg set sets split splits data dataset datasets".split(),
    *"image images img imgs picture pictures photo photos file files folder text texts".split(),
}
_SPLIT_OF = {word: split for split, words in SPLITS.items() for word in words}


def split_of(name):
    """The split that a single name says: `train`, `val`, `test`, or None."""
    split, others = _read(name)
    return None if others else split


def assign(names):
    """Finds the names that say of which split something is.

    Args:
        names (list[str]): of the folders in one folder, or of files without their suffixes.

    Returns:
        dict[str, str]: name -> split; {}: none of them says one.
    """
    read = {name: _read(name) for name in names}
    exact = {name: split for name, (split, others) in read.items() if split and not others}
    if exact:
        return exact
    groups = {}  # what is left of a name without its split -> the splits with such names
    for split, others in read.values():
        groups.setdefault(others, set()).add(split)
    return {
        name: split
        for name, (split, others) in read.items()
        if split and "train" in groups[others] and len(groups[others] - {None}) > 1
    }


def hold_out(keys, fraction):
    """Which of at least two samples are held out: those with the lowest keys.

    Args:
        keys (list): a hash of each sample.
        fraction (float): of the samples; at least one is held out, and not all.

    Returns:
        list[int]: their indices.
    """
    count = min(max(1, round(len(keys) * fraction)), len(keys) - 1)
    return sorted(range(len(keys)), key=keys.__getitem__)[:count]


def _read(name):
    """The split that a name contains, or None; and its other words, without those in `NEUTRAL`."""
    separated = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)  # TrainSet
    words = [word for word in re.split(r"[\W\d_]+", separated.lower()) if word]
    found = [word for word in words if word in _SPLIT_OF]
    if len(found) != 1:
        return None, tuple(words)
    others = tuple(word for word in words if word not in NEUTRAL and word not in _SPLIT_OF)
    return _SPLIT_OF[found[0]], others
