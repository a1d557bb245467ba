"""Loads text as bytes, into memory, and splits it into windows.

A window has `block_size + 1` bytes: the inputs are all but the last, the targets are all but the
first.
"""

import random
import sys

import torch

from utils.data.sources import READERS, load_table, loading, local_path
from utils.run.failures import UserError
from utils.run.process import is_main

# Files that the `datasets` library writes about a data set.
METADATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"}
ALTERNATIVES = (
    "use a Hub id such as karpathy/tiny_shakespeare, a local text file or folder, or "
    "--dataset synthetic"
)


class Windows(torch.utils.data.Dataset):
    """Consecutive windows of a text. Returns whole batches to a `DataLoader`.

    A batch is a dict: `inputs` and `targets` int64 [batch, block_size], `ids` int64 [batch].

    Args:
        text: uint8 [bytes].
        seed (int | None): for training, the seed of the offset at which the windows of an epoch
            start. None, for evaluation: every byte except the first is a target exactly once;
            targets past the end are -100, which the loss ignores.
    """

    def __init__(self, text, block_size, seed=None):
        self.text, self.block_size, self.seed = text, block_size, seed
        # In shared memory, because the persistent workers of a loader would otherwise keep the
        # offset of the first epoch.
        self.shift = torch.zeros((), dtype=torch.int64).share_memory_()
        full, rest = divmod(len(text) - 1, block_size)
        self.count = full + (rest > 0)
        if seed is not None:  # an offset uses up to block_size - 1 bytes
            self.count = (len(text) - block_size) // block_size

    def set_offset(self, epoch):
        """Sets the offset for `epoch`, a deterministic function of the seed and the epoch.

        The name is not `set_epoch`, because on some topologies Accelerate calls a method of that
        name.
        """
        if self.seed is not None:
            self.shift.fill_(random.Random(f"{self.seed} {epoch}").randrange(self.block_size))

    def __len__(self):
        return self.count

    def __getitems__(self, indices):
        ids = torch.tensor(indices)
        starts = ids[:, None] * self.block_size + self.shift
        places = starts + torch.arange(self.block_size + 1)
        windows = self.text[places.clamp(max=len(self.text) - 1)].long()
        targets = windows[:, 1:].masked_fill(places[:, 1:] >= len(self.text), -100)
        # Contiguous: a batch is then copied to the GPU from pinned memory, without a wait.
        return {"inputs": windows[:, :-1].contiguous(), "targets": targets, "ids": ids}


def load_text(name, column, block_size, seed=0):
    """Loads a text and splits it: nine tenths for training, the last tenth for evaluation.

    A local `.txt` file, or the `.txt` files of a folder sorted by name, are read byte for byte. Of
    any other source, the rows of `column` are joined; if there are several, each ends with a
    newline.

    Args:
        name (str): a Hub id, a file, a folder with files of one kind, or `synthetic`.
        column (str): the column of a table that has the text.
        block_size (int): bytes per window.
        seed (int): of `synthetic`.

    Returns:
        tuple: uint8 [training bytes], uint8 [held-out bytes].

    Raises:
        UserError: the text cannot be found or read, has no such column, or is too short for
            `block_size`.
    """
    if name == "synthetic":
        text = synthetic_text(seed)
    elif (files := local_files(name)) and is_plain(files[0]):
        try:
            text = b"".join(file.read_bytes() for file in files)
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    else:
        splits = load_column(name, column, files)
        order = [split for split in ("train", "validation", "test") if split in splits]
        order += [split for split in splits if split not in order]
        text = b"".join(_join(splits[split][column], f"--dataset {name}") for split in order)
    if b"\0" in text and is_main():
        line = f"warning: --dataset {name} does not look like text: it has zero bytes"
        print(line, file=sys.stderr, flush=True)
    if len(text) == 0:
        raise UserError(f"--dataset {name} is empty; {ALTERNATIVES}")
    cut = len(text) * 9 // 10
    if cut < 2 * block_size:
        needed = -(-2 * block_size * 10 // 9)
        raise UserError(
            f"--dataset {name} has {len(text):,} bytes, too few for --block_size {block_size}: it "
            f"needs {needed:,}, or use --block_size {cut // 2} or less"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[:cut], data[cut:]


def synthetic_text(seed, sentences=4000):
    """Generates sentences from 60 random words; after each word come only four others.

    Returns:
        bytes: about 35 per sentence. A model that learns the words and their order has a far lower
        loss than one that knows only the frequency of each byte.
    """
    rng = random.Random(f"text {seed}")

    def syllables():
        count = rng.choice((1, 2, 2, 3))
        return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(count))

    words = [syllables() for _ in range(60)]
    after = {word: rng.choices(words, k=4) for word in words}
    lines = []
    for _ in range(sentences):
        sentence = [rng.choice(words)]
        for _ in range(rng.randint(4, 9)):
            sentence.append(rng.choice(after[sentence[-1]]))
        lines.append(" ".join(sentence).capitalize() + ".\n")
    return "".join(lines).encode()


# ---------------------------------------------------------------------------------------- reading


def local_files(name):
    """Lists the files of a local data set.

    Returns:
        list[Path]: all of one kind, sorted by name; empty if `name` may be a Hub id.

    Raises:
        UserError: there is no such path, or its files cannot be read as one text.
    """
    path = local_path(name, ALTERNATIVES)
    if path is None:
        return []
    if path.is_file():
        if path.suffix.lower() in COMPRESSED:
            raise UserError(f"--dataset {name} is compressed: unpack it first")
        return [path]
    files = [file for file in path.rglob("*") if file.suffix.lower() in READERS]
    files = sorted(file for file in files if file.name not in METADATA)
    for file in files:
        if file.suffix.lower() != files[0].suffix.lower():
            raise UserError(
                f"--dataset {name} holds both {files[0].name} and {file.name}: give files of one "
                "format, or one file"
            )
    if not files:
        known = ", ".join(READERS)
        raise UserError(f"--dataset {name} holds no file that ends in {known}; {ALTERNATIVES}")
    return files


def is_plain(file):
    """Whether a file is read byte for byte: one that is not a table."""
    return READERS.get(file.suffix.lower(), "text") == "text"


def load_column(name, column, files, streaming=False):
    """Loads a table that has a column of text.

    Args:
        name, files, streaming: as for `sources.load_table`.
        column (str): the column.

    Returns:
        dict: the rows of each split.

    Raises:
        UserError: it cannot be loaded, or has no such column.
    """
    splits = load_table(name, files=files or None, streaming=streaming, alternatives=ALTERNATIVES)
    first_split = next(iter(splits.values()))
    with loading(name, ALTERNATIVES):  # a stream may know its columns only with its first row
        columns = first_split.column_names or list(next(iter(first_split), {column: None}))
    if column not in columns:
        listed = ", ".join(columns)
        raise UserError(
            f"--dataset {name} has no column {column}: give --text_column, one of {listed}"
        )
    return splits


def encode(text, number, where, failure=UserError):
    """The bytes of a row. Raises `failure` if it is not text."""
    if not isinstance(text, str):
        raise failure(f"row {number} of {where} is not text but {type(text).__name__}")
    return text.encode()


def _join(texts, where):
    encoded = [encode(text, number, where) for number, text in enumerate(texts)]
    return encoded[0] if len(encoded) == 1 else b"".join(text + b"\n" for text in encoded)
