"""Tells by its name which split a folder, a file or a table is: the one rule for images and text.

A name is that of a split if it is exactly one of `WORDS`, in upper or lower case. Of the files in
which a split is stored, the part before the number counts: `train-00000-of-00002`.
"""

import re

from utils.run.failures import UserError

SPLITS = ("train", "val", "test")
WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def split_of(name):
    """The split that is called so, without a suffix: `train`, `val` or `test`; None: it is none."""
    return WORDS.get(re.sub(r"-\d+-of-\d+.*", "", name).lower())


def one_each(place, names):
    """Finds the name of each split among the names of folders or tables; `place` is for messages.

    Returns:
        tuple: split -> name, in the order train, val, test; the names that are no splits.

    Raises:
        UserError: two names are the same split, such as valid and validation.
    """
    by_split, others = {}, []
    for name in names:
        split = split_of(name)
        if split is None:
            others.append(name)
        elif split in by_split:
            raise UserError(
                f"--dataset {place}: {by_split[split]} and {name} are both its {split} split: "
                "remove or rename one of them"
            )
        else:
            by_split[split] = name
    return {split: by_split[split] for split in SPLITS if split in by_split}, others


def refuse_almost_splits(place, split_of_name):
    """Raises UserError if all names contain the word of a split, and some are none: train_images.

    Args: split_of_name (dict): name -> split or None.
    """
    words = {name: re.findall("train|val|dev|test", name.lower()) for name in split_of_name}
    almost = [name for name, split in split_of_name.items() if split is None]
    if not almost or not all(words.values()):
        return
    if len({WORDS[found[-1]] for found in words.values()}) > 1:
        first = min(almost)
        split = WORDS[words[first][-1]]
        raise UserError(
            f"--dataset {place}: rename {first}: to {split} if it is a split (only that name is "
            "one), or to a name without this word in it"
        )


def hold_out(keys, fraction):
    """Which of at least two samples are held out: the indices (list) of the lowest keys.

    At least one is held out, and not all. Samples with equal keys, hashes of each, stay together,
    unless all keys are equal. `fraction` (float) is that of the samples.
    """
    count = min(max(1, round(len(keys) * fraction)), len(keys) - 1)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    last = keys[order[count - 1]]
    together = [index for index in order if keys[index] <= last]
    if len(together) == len(keys):
        together = [index for index in order if keys[index] < last]
    return together or order[:count]
