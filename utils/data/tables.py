"""Loads rows with the `datasets` library, for images and for text, and tells splits by their names.

The name of a folder, a file or a table is that of a split if it is exactly one of `WORDS`, in upper
or lower case. Of the files in which a split is stored, the part before the number counts:
`train-00000-of-00002`.
"""

import contextlib
import glob
import hashlib
import re
from pathlib import Path

from utils.run.failures import UserError, full_disk

SPLITS = ("train", "val", "test")
WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# The reader of the `datasets` library for each kind of file.
READERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
}
STRIPPED = r"(?i)\.[a-z0-9]+(\.(gz|bz2|xz))?$"  # the suffix of a file, as in train.txt.gz
MOST_COLUMNS = 10_000  # of a CSV file
# Files that the `datasets` library writes about a data set.
METADATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}


# ---------------------------------------------------------------------------------------- splits


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
    """Raises UserError if names have the words of several splits, and are no splits: train_images.

    Args: split_of_name (dict): name -> split or None. A name without such a word allows any other.
    """
    words = {name: re.findall("train|val|dev|test", name.lower()) for name in split_of_name}
    almost = [name for name, split in split_of_name.items() if split is None]
    if almost and all(words.values()) and len({WORDS[match[-1]] for match in words.values()}) > 1:
        first = min(almost)
        raise UserError(
            f"--dataset {place}: rename {first}: to {WORDS[words[first][-1]]} if it is a split "
            "(only that name is one), or to a name without this word in it"
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


def files_by_split(root, files):
    """Finds out from names, by the rule of `splits`, which files are those of which split.

    A file says its split itself (`train-00000-of-00002.parquet`, `val.txt`), or its folder does.

    Args:
        files (list[str]): paths relative to `root`.

    Returns:
        dict[str, list[Path]]: split -> files; all are `train` if no name says a split.

    Raises:
        UserError: some names say a split and others do not, or not exactly; or none says train.
    """
    split_of_file, splits = {}, {}
    for file in files:
        parts = re.sub(STRIPPED, "", file).split("/")
        split = next(filter(None, map(split_of, reversed(parts))), None)
        split_of_file[file] = split
        splits.setdefault(split, []).append(Path(root) / file)
    refuse_almost_splits(root, split_of_file)
    if len(splits) == 1:
        return {"train": next(iter(splits.values()))}
    if None in splits:
        split, other = next(filter(None, splits)), splits[None][0].name
        raise UserError(
            f"--dataset {root}: by its name, {splits[split][0].name} is one of its splits, and "
            f"{other} is not: rename or remove one of them (train.*, val.* and test.* are splits)"
        )
    if "train" not in splits:
        raise UserError(
            f"--dataset {root} has no train split, only {' and '.join(splits)}: name one train"
        )
    return {split: splits[split] for split in SPLITS if split in splits}


def name_splits(name, tables, left_out):
    """The tables that are used, by split; a single one is `train`, whatever its name.

    The others are added to `left_out`. Raises UserError if two are called the same, such as valid
    and validation.
    """
    if len(tables) == 1:
        return {"train": next(iter(tables.values()))}
    by_split, others = one_each(name, tables)
    for other in others:
        left_out.add("splits of other names", other)
    return {split: tables[own_name] for split, own_name in by_split.items()}


# ------------------------------------------------------------------------------------------ rows


def local_path(name, alternatives):
    """The path called `name` on this machine (Path); None: it may be a Hub id.

    Raises UserError, which ends with `alternatives`, if it can only be a path and nothing is there.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    suffixes = {*READERS, ".txt", ".npz"}
    if name.startswith((".", "/", "~")) or path.suffix.lower() in suffixes:
        raise UserError(f"--dataset {name}: there is no such file or folder; {alternatives}")
    return None


def load_table(name, *, subset=None, files=None, streaming=False, alternatives="", as_lines=False):
    """Loads rows with the `datasets` library.

    All values of CSV files are strings, exactly as they are written: 007 and NA are text.

    Args:
        name (str): a Hub id, a folder in the Hub's layout, or a file with one of the suffixes in
            `READERS`.
        subset (str | None): the name of a configuration of a Hub id.
        files (dict[str, list[Path]] | None): by split, load these instead; all are of one kind.
        streaming (bool): read rows as they are needed, instead of all of them now.
        alternatives (str): what else the user can give; an error message ends with it.
        as_lines (bool): of files: a row for each line, in the column `text`.

    Returns:
        datasets.DatasetDict | datasets.IterableDatasetDict: by split; a single file is `train`.

    Raises:
        UserError: it cannot be loaded, or a file of it is no table.
    """
    import datasets  # here, because it takes a second, and folders of images do not need it

    datasets.disable_progress_bars()
    path = local_path(name, alternatives)
    if not path:
        alternatives = f"there is no such file or folder here; {alternatives}".removesuffix("; ")
    if files is None and path and path.is_file():
        files = {"train": [path]}
    source = dict(path=str(path or name), name=subset)
    if files:
        suffix = next(iter(files.values()))[0].suffix.lower()
        for file in (file for paths in files.values() for file in paths):
            if "::" in str(file):  # the library takes what follows for a path in an archive
                raise UserError(f"--dataset {name}: rename {file}, because of the `::`")
        # The library takes names for patterns. It knows files by their time of change; and here by
        # their sizes, because images of containers give all files the same time.
        named = {
            split: [glob.escape(str(file)) for file in paths] for split, paths in files.items()
        }
        sizes = [file.stat().st_size for paths in files.values() for file in paths]
        version = hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]
        reader = "text" if as_lines else READERS[suffix]
        source = dict(path=reader, name=version, data_files=named)
        if reader == "csv":
            texts = dict.fromkeys(range(MOST_COLUMNS), str)  # of columns by their numbers
            source |= dict(converters=texts, keep_default_na=False)
            source |= dict(sep="\t" if suffix == ".tsv" else ",")
    with loading(name, alternatives):
        tables = datasets.load_dataset(**source, streaming=streaming)
        for table in tables.values() if source["path"] == "csv" else ():
            # pandas takes the first fields of longer rows for their names.
            if "__index_level_0__" in (table.column_names or next(iter(table), {})):
                raise UserError(
                    f"--dataset {name}: rows have more fields than there are names of columns: "
                    "name each column, and quote a text that contains the separator"
                )
    return tables


def describes_itself(folder):
    """Whether a folder in the Hub's layout says in its README.md which files are which split."""
    page = Path(folder) / "README.md"
    if not page.is_file():
        return False
    head = page.read_text(errors="replace")[:10_000]
    return head.startswith("---") and re.search(r"^(configs|dataset_info):", head, re.M) is not None


@contextlib.contextmanager
def loading(name, alternatives):
    """Raises UserError, with one line, instead of any error but that of a full disk."""
    try:
        yield
    except Exception as error:  # errors of datasets, fsspec, pyarrow or the network
        if full_disk(error) or isinstance(error, UserError):
            raise
        ending = f"; {alternatives}" if alternatives else ""
        raise UserError(f"cannot load --dataset {name} ({first_line(error)}){ending}") from None


def first_line(error):
    """The first line of what caused an error, without a period."""
    text = str(error.__cause__ or error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
