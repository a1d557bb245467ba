"""Loads text as bytes, mapped into memory, and splits it into windows.

A window has `block_size + 1` bytes: the inputs are all but the last, the targets are all but the
first.
"""

import random
from typing import NamedTuple

import torch

from utils.data.sharing import cached, map_bytes
from utils.language.rows import ALTERNATIVES, check_unicode, checksum, open_rows, reading
from utils.run.failures import UserError


class Text(NamedTuple):
    """A text, uint8 [bytes], to train on and held out; lines about it.

    `description` has a checksum.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    description: str
    details: list


class Windows(torch.utils.data.Dataset):
    """Consecutive windows of a text. Returns whole batches to a `DataLoader`.

    A batch is a dict: `inputs` and `targets` int64 [batch, block_size], `ids` int64 [batch].

    Args:
        text: uint8 [bytes].
        seed (int | None): for training, of the offset at which the windows of an epoch start; a
            sampler then yields (epoch, id). None, for evaluation: every byte except the first is a
            target exactly once; targets past the end are -100, which the loss ignores.
    """

    def __init__(self, text, block_size, seed=None):
        self.text, self.block_size, self.seed = text, block_size, seed
        # An offset uses up to block_size - 1 bytes.
        used = len(text) - 1 if seed is None else len(text) - block_size
        self.count = -(-used // block_size) if seed is None else used // block_size

    def select(self, indices):
        """Those at `indices` (int64 array)."""
        return torch.utils.data.Subset(self, indices.tolist())

    def __len__(self):
        return self.count

    def __getitems__(self, keys):
        offset = 0
        if self.seed is not None:
            epoch, keys = keys[0][0], [index for _, index in keys]
            offset = random.Random(f"{self.seed} {epoch}").randrange(self.block_size)
        ids = torch.tensor(keys)
        places = ids[:, None] * self.block_size + offset + torch.arange(self.block_size + 1)
        windows = self.text[places.clamp(max=len(self.text) - 1)].long()
        targets = windows[:, 1:].masked_fill(places[:, 1:] >= len(self.text), -100)
        # Contiguous: a batch is then copied to the GPU from pinned memory, without a wait.
        return {"inputs": windows[:, :-1].contiguous(), "targets": targets, "ids": ids}


def load_text(name, column, block_size, seed=0):
    """Loads a text for training, and one for evaluation: the `val` split or else the last tenth.

    Plain text files are read byte for byte, those of a folder sorted by name. Of any other source,
    the rows of `column` are joined, each with a newline at its end. A `test` split is not read. A
    plain file is mapped into memory. Any other text is first written to the cache of the `datasets`
    library, once per machine: call this function on one process first.

    Args:
        name (str): a Hub id, a file, a folder with files of one kind, or `synthetic`.
        column (str): the column of a table that has the text.
        block_size (int): bytes per window, of which a text has at least two.
        seed (int): of `synthetic`.

    Returns:
        Text. Raises UserError if it cannot be found or read, has no such column, or is too short.
    """
    texts, details = read_splits(name, column, seed)
    text, held_out = texts["train"], texts.get("val")
    if len(text) == 0:
        raise UserError(f"--dataset {name} is empty; {ALTERNATIVES}")
    cut = len(text) * 9 // (10 if held_out is None else 9)
    if cut < 2 * block_size:
        raise UserError(
            f"--dataset {name} has {len(text):,} bytes, too few for --block_size {block_size}: use "
            f"--block_size {cut // 2} or less"
        )
    if held_out is not None and len(held_out) < 2:
        raise UserError(f"--dataset {name}: its val split has {len(held_out)} bytes: too few")
    train, rest = text[:cut], text[cut:] if held_out is None else held_out
    short = checksum(text.numpy(), b"" if held_out is None else held_out.numpy())
    description = f"{len(train):,} bytes to train on, {len(rest):,} held out (fingerprint {short})"
    return Text(train, rest, description, details)


def read_splits(name, column, seed=0, **options):
    """Reads the texts of the splits that are used; args and errors are those of `load_text`.

    Returns:
        tuple: split -> uint8 [bytes]; lines about all splits. `options` are those of `open_rows`.
    """
    if name == "synthetic":
        text = bytearray(synthetic_text(seed))
        return {"train": torch.frombuffer(text, dtype=torch.uint8)}, []
    needs = f"{column}: give --text_column, if the text has another name"
    table, texts = open_rows(name, {"text": (column,)}, needs, **options), {}
    for split, rows in table.splits.items():
        if rows.in_memory:
            texts[split] = _read_files([row["text"] for row in rows], rows.fingerprint)
        else:
            texts[split] = cached("text", _join(rows, column), [column, rows.fingerprint])
    return texts, table.details


def _read_files(files, version):
    """The text of plain files, uint8 [bytes]."""
    if len(files) > 1:
        return cached("text", (_map(file).numpy() for file in files), version)
    return _map(files[0])


def _map(file):
    with reading(file):
        return map_bytes(file)


def _join(rows, column):
    """Yields the text of each row with a newline at its end, as bytes."""
    for number, row in enumerate(rows):
        text, where = row.get(column), f"row {number} of {rows.where}"
        if not isinstance(text, str):
            raise UserError(f"{where} is not text but {type(text).__name__}")
        check_unicode(text, where)
        yield (text if text.endswith("\n") else f"{text}\n").encode()


def synthetic_text(seed, sentences=4000):
    """Sentences (bytes) of 60 random words, of which only four come after each.

    A model that learns their order has a far lower loss than one that knows the bytes' frequencies.
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
