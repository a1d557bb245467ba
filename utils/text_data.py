"""Text as bytes: a Hub id, local files or `synthetic` in memory, cut into windows; or a stream too big for that.

A window is `block_size + 1` bytes: the model reads all but the last and predicts all but the first.
"""

import random
import zlib
from functools import partial
from pathlib import Path

import datasets
import datasets.distributed
import torch
from accelerate.utils import gather_object

from utils.exits import RunFailed, UserError

FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
RECORDS = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}  # of `datasets`: no text
COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"}
WAY_OUT = "use a Hub id such as karpathy/tiny_shakespeare, a local text file or folder, or --dataset synthetic"
HELD_OUT_BYTES = 1 << 20  # of a stream, for evaluation
HELD_OUT_ONE_IN = 64  # documents


class Windows(torch.utils.data.Dataset):
    """Consecutive windows of a text, given to a `DataLoader` a whole batch at a time.

    A batch is a dict: `inputs` and `targets` int64 [batch, block_size], `ids` int64 [batch].

    Args:
        text: uint8 [bytes].
        seed (int | None): a number: training windows, cut at another place in each epoch. None: every byte but the
            first is predicted exactly once; in the last window, targets past the end are -100, which no loss counts.
    """

    def __init__(self, text, block_size, seed=None):
        self.text, self.block_size, self.seed, self.shift = text, block_size, seed, 0
        whole, rest = divmod(len(text) - 1, block_size)
        # A shifted epoch needs up to block_size - 1 bytes more.
        self.count = (len(text) - block_size) // block_size if seed is not None else whole + (rest > 0)

    def cut_for(self, epoch):
        """Cuts the text at the places of this epoch: a function of the seed and the epoch, on every process the same.

        Not called `set_epoch`: Accelerate calls that by itself, on some topologies only and with a count of its own.
        """
        if self.seed is not None:
            self.shift = random.Random(f"{self.seed} {epoch}").randrange(self.block_size)

    def __len__(self):
        return self.count

    def __getitems__(self, indices):
        ids = torch.tensor(indices)
        places = ids[:, None] * self.block_size + self.shift + torch.arange(self.block_size + 1)
        windows = self.text[places.clamp(max=len(self.text) - 1)].long()
        targets = windows[:, 1:].masked_fill(places[:, 1:] >= len(self.text), -100)
        return {"inputs": windows[:, :-1], "targets": targets, "ids": ids}


def load_text(name, column, block_size, seed=0):
    """Loads a text and splits it: the first nine tenths to train on, the last tenth to evaluate on.

    A local `.txt` file, or the `.txt` files of a folder in the order of their names, are taken byte for byte. Of
    anything else the rows of `column`, each ended by a newline, if there is more than one.

    Returns:
        tuple: uint8 [training bytes], uint8 [held-out bytes].

    Raises:
        UserError: it cannot be found or read, lacks the column, or is too short for `block_size`.
    """
    if name == "synthetic":
        text = synthetic_text(seed)
    elif (files := _local_files(name)) and FORMATS.get(files[0].suffix, "text") == "text":
        try:
            text = b"".join(file.read_bytes() for file in files)
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    else:
        splits = _load(name, column, files, streaming=False)
        order = sorted(splits, key=lambda split: (["train", "validation", "test"] + [split]).index(split))
        text = b"".join(_join(splits[split][column], f"--dataset {name}") for split in order)
    if len(text) == 0:
        raise UserError(f"--dataset {name} is empty; {WAY_OUT}")
    cut = len(text) * 9 // 10
    if cut < 2 * block_size:
        needed = -(-2 * block_size * 10 // 9)
        raise UserError(
            f"--dataset {name} has {len(text):,} bytes, too few for --block_size {block_size}: that needs {needed:,}, "
            f"or use --block_size {cut // 2} or less"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[:cut], data[cut:]


def synthetic_text(seed, sentences=4000):
    """Made-up prose: sentences over 60 invented words, each of which is followed by one of four others.

    Returns:
        bytes: about 35 a sentence. A model that knows only how often each byte occurs stays far above one that
        learns the words and their order.
    """
    chance = random.Random(f"text {seed}")
    words = ["".join(chance.choice("bdfgklmnprstvz") + chance.choice("aeiou") for _ in range(chance.choice((1, 2, 2, 3))))
             for _ in range(60)]  # fmt: skip
    after = {word: chance.choices(words, k=4) for word in words}
    lines = []
    for _ in range(sentences):
        sentence = [chance.choice(words)]
        for _ in range(chance.randint(4, 9)):
            sentence.append(chance.choice(after[sentence[-1]]))
        lines.append(" ".join(sentence).capitalize() + ".\n")
    return "".join(lines).encode()


# ------------------------------------------------------------------------------------------------------- streaming


def held_out(document):
    """Whether a document is for evaluation: decided by its bytes, so that any order and any process agree."""
    return zlib.crc32(document) % HELD_OUT_ONE_IN == 0


def load_held_out(name, column, block_size):
    """Reads a stream from its start until `HELD_OUT_BYTES` of held-out documents are found, or to its end.

    Returns:
        uint8 [bytes].

    Raises:
        UserError: it cannot be read, lacks the column, or holds too little text.
    """
    text, documents = bytearray(), 0
    for document in _documents(open_stream(name, column), column, name, UserError):
        documents += 1
        if held_out(document):
            text += document
            if len(text) >= HELD_OUT_BYTES:
                break
    if len(text) < 2:
        raise UserError(
            f"--dataset {name} has {documents} rows and none fell into the 1 in {HELD_OUT_ONE_IN} kept for evaluation: "
            "too small to stream, leave out --streaming"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def open_stream(name, column):
    """The rows of `column` as a `datasets.IterableDataset`, read as they are needed."""
    if name == "synthetic":
        rows = [{column: line} for line in synthetic_text(0).decode().splitlines()]
        return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=8)
    splits = _load(name, column, _local_files(name), streaming=True)
    return splits["train" if "train" in splits else next(iter(splits))].select_columns([column])


class TextStream(torch.utils.data.IterableDataset):
    """This process' share of an endless, shuffled stream of micro-batches that any number of processes reads alike.

    The data is dealt to `lanes` (a fixed number, shards first, else rows), and every global batch takes as many
    windows from each. A process reads only its own lanes, so the global batches stay the same. Choose a number that all
    process counts to come divide; with a multiple of it of files the reading is split too, else each lane reads over all.

    In a lane, `buffer` windows are collected and given out in a drawn order, then the next ones. All that has to be
    remembered is therefore where the buffer began and how many windows were given out: after a restart the same
    buffer is read again. Each batch carries that position of every lane in `position`.

    Args:
        micro_batch (int): windows per batch on this process.
        share (tuple[int, int]): index of this process, number of processes.
        position (dict | None): of all lanes, by their number as a string; as `position` of the batch before.
    """

    def __init__(self, name, column, block_size, micro_batch, *, lanes, buffer, seed, share, position=None):
        process, processes = share
        if lanes % processes or micro_batch * processes % lanes:
            raise UserError(
                f"--stream_lanes {lanes} must be a multiple of the {processes} processes and divide the micro-batch of "
                f"{micro_batch * processes} windows over all of them"
            )
        own = range(process * lanes // processes, (process + 1) * lanes // processes)
        # Opened once per lane: data sets split from one another share, and spoil, the state of their reader.
        self.lanes = {}
        for lane in own:
            rows = datasets.distributed.split_dataset_by_node(open_stream(name, column), lane, lanes)
            self.lanes[str(lane)] = _Lane(rows, name, column, block_size, buffer, f"{seed} {lane}")
        for number, lane in self.lanes.items():
            lane.position = (position or {}).get(number) or lane.position
        self.micro_batch = micro_batch

    @classmethod
    def from_args(cls, args, accelerator, position=None):
        """The share of this process, as the command line says, continued at `position`."""
        micro_batch = args.batch_size // args.gradient_accumulation_steps // accelerator.num_processes
        share = (accelerator.process_index, accelerator.num_processes)
        options = dict(lanes=args.stream_lanes, buffer=args.shuffle_buffer, seed=args.seed, share=share, position=position)
        return cls(args.dataset, args.text_column, args.block_size, micro_batch, **options)

    def __iter__(self):
        readers = {number: iter(lane) for number, lane in self.lanes.items()}
        while True:
            rows = [next(reader) for reader in readers.values() for _ in range(self.micro_batch // len(readers))]
            windows = torch.stack(rows).long()
            yield {
                "inputs": windows[:, :-1],
                "targets": windows[:, 1:],
                "ids": torch.arange(len(rows)),
                "position": {number: dict(lane.position) for number, lane in self.lanes.items()},
            }


def gather_position(batch):
    """The position of a stream after `batch`, gathered from all processes, for a checkpoint; None without a stream."""
    if "position" not in batch:
        return None
    return dict(gather_object(list(batch["position"].items())))


class _Lane:
    """Endless windows from one part of the stream; `position` is where it is: plain numbers and strings."""

    def __init__(self, rows, name, column, block_size, buffer, seed):
        self.rows, self.name, self.column, self.block_size, self.buffer, self.seed = (
            rows,
            name,
            column,
            block_size,
            buffer,
            seed,
        )
        # Where the buffer began (the state of `rows`, hex of bytes read but not used), its number, windows given out of it.
        self.position = {"rows": None, "rest": "", "buffers": 0, "taken": 0}

    def __iter__(self):
        if self.position["rows"] is not None:
            self.rows.set_epoch(self.position["rows"]["epoch"])  # otherwise the state is silently not used
            self.rows.load_state_dict(self.position["rows"])
        documents = self._documents()
        while True:
            start = self.position
            text = bytearray.fromhex(start["rest"])
            used = self.buffer * self.block_size
            while len(text) < used + 1:
                text += next(documents)
            windows = torch.frombuffer(text[: used + 1], dtype=torch.uint8).unfold(0, self.block_size + 1, self.block_size)
            order = list(range(self.buffer))
            random.Random(f"{self.seed} {start['buffers']}").shuffle(order)
            next_start = {
                "rows": self.rows.state_dict(),
                "rest": text[used:].hex(),
                "buffers": start["buffers"] + 1,
                "taken": 0,
            }
            for taken in range(start["taken"], self.buffer):
                self.position = {**start, "taken": taken + 1} if taken + 1 < self.buffer else next_start
                yield windows[order[taken]]

    def _documents(self):
        """The training documents, from where `rows` is, again and again."""
        empty_passes = 0
        while empty_passes < 2:  # the rest of a pass that is continued may well be empty
            empty_passes += 1
            for document in _documents(self.rows, self.column, self.name, partial(RunFailed, speaker=None)):
                if not held_out(document):
                    empty_passes = 0
                    yield document
            # Also what keeps `rows` from going back to the state that was loaded into it.
            self.rows.set_epoch(self.rows.epoch + 1)
        raise RunFailed(f"--dataset {self.name}: a part of the stream holds no text: use fewer --stream_lanes", speaker=None)


# --------------------------------------------------------------------------------------------------------- reading


def _local_files(name):
    """The files of the one format that is there, in the order of their names; none if `name` is not a local path."""
    path = Path(name).expanduser()
    if not path.exists():
        if name.startswith((".", "/", "~")) or path.suffix in FORMATS:
            raise UserError(f"--dataset {name}: there is no such file or folder; {WAY_OUT}")
        return []
    if path.is_file():
        if path.suffix in COMPRESSED:
            raise UserError(f"--dataset {name} is compressed: unpack it first")
        # A file of any other name is taken for text: bytes are bytes.
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in FORMATS and file.name not in RECORDS)
    for other in files:
        if other.suffix != files[0].suffix:
            raise UserError(
                f"--dataset {name} holds both {files[0].name} and {other.name}: name a folder of one kind, or a file"
            )
    if files:
        return files
    raise UserError(f"--dataset {name} holds no file that ends in {', '.join(FORMATS)}; {WAY_OUT}")


def _load(name, column, files, streaming):
    """`datasets.load_dataset` of a Hub id (no `files`) or local files, checked to have the column: a dict of splits."""
    datasets.disable_progress_bars()
    source = (
        dict(path=FORMATS.get(files[0].suffix, "text"), data_files={"train": [str(file) for file in files]})
        if files
        else dict(path=name)
    )
    try:
        splits = datasets.load_dataset(**source, streaming=streaming)
        some = next(iter(splits.values()))
        columns = some.column_names or list(next(iter(some), {column: None}))
    except Exception as error:  # the library raises its own, fsspec's, pyarrow's and the network's
        raise UserError(f"cannot load --dataset {name} ({_first_line(error)}); {WAY_OUT}") from None
    if column not in columns:
        raise UserError(f"--dataset {name} has no column {column}: give --text_column, one of {', '.join(columns)}")
    return splits


def _documents(rows, column, name, failure):
    """The rows as bytes, each ended by a newline; `failure` is raised, with one line, if they cannot be read."""
    number = 0
    try:
        for row in rows:
            yield _encode(row[column], number, f"--dataset {name}", failure) + b"\n"
            number += 1
    except UserError:
        raise
    except Exception as error:
        raise failure(f"--dataset {name} cannot be read after row {number}: {_first_line(error)}") from None


def _join(texts, where):
    encoded = [_encode(text, number, where, UserError) for number, text in enumerate(texts)]
    return encoded[0] if len(encoded) == 1 else b"".join(text + b"\n" for text in encoded)


def _encode(text, number, where, failure):
    if not isinstance(text, str):
        raise failure(f"row {number} of {where} is not text but {type(text).__name__}")
    return text.encode()


def _first_line(error):
    text = str(error.__cause__ or error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
