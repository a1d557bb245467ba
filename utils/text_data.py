"""Loads text as bytes from a Hub id, local files or `synthetic`: in memory and split into windows, or streamed.

A window has `block_size + 1` bytes: the inputs are all but the last, the targets are all but the first.
"""

import random
import sys
import zlib
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import gather_object

from utils import exits, topology
from utils.exits import RunFailed, UserError

FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
RECORDS = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}  # metadata that `datasets` writes
COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"}
ALTERNATIVES = "use a Hub id such as karpathy/tiny_shakespeare, a local text file or folder, or --dataset synthetic"
HELD_OUT_BYTES = 1 << 20  # bytes of a stream that are held out for evaluation
HELD_OUT_ONE_IN = 64  # 1 in 64 documents of a stream is held out


class Windows(torch.utils.data.Dataset):
    """Consecutive windows of a text. Returns whole batches to a `DataLoader`.

    A batch is a dict: `inputs` and `targets` int64 [batch, block_size], `ids` int64 [batch].

    Args:
        text: uint8 [bytes].
        seed (int | None): for training, the seed of the offset at which the windows of an epoch start. None, for evaluation:
            every byte except the first is a target exactly once; targets past the end are -100, which the loss ignores.
    """

    def __init__(self, text, block_size, seed=None):
        self.text, self.block_size, self.seed = text, block_size, seed
        # In shared memory, because the persistent workers of a loader would otherwise keep the offset of the first epoch.
        self.shift = torch.zeros((), dtype=torch.int64).share_memory_()
        full, rest = divmod(len(text) - 1, block_size)
        # An offset uses up to block_size - 1 bytes.
        self.count = (len(text) - block_size) // block_size if seed is not None else full + (rest > 0)

    def set_offset(self, epoch):
        """Sets the offset for `epoch`. It depends only on the seed and the epoch, so it is the same on every process.

        The name is not `set_epoch`, because on some topologies Accelerate calls a method of that name.
        """
        if self.seed is not None:
            self.shift.fill_(random.Random(f"{self.seed} {epoch}").randrange(self.block_size))

    def __len__(self):
        return self.count

    def __getitems__(self, indices):
        ids = torch.tensor(indices)
        places = ids[:, None] * self.block_size + self.shift + torch.arange(self.block_size + 1)
        windows = self.text[places.clamp(max=len(self.text) - 1)].long()
        targets = windows[:, 1:].masked_fill(places[:, 1:] >= len(self.text), -100)
        return {"inputs": windows[:, :-1], "targets": targets, "ids": ids}


def load_text(name, column, block_size, seed=0):
    """Loads a text and splits it: the first nine tenths for training, the last tenth for evaluation.

    A local `.txt` file, or the `.txt` files of a folder sorted by name, are read byte for byte. From any other source, the
    rows of `column` are joined; if there are several, each ends with a newline.

    Returns:
        tuple: uint8 [training bytes], uint8 [held-out bytes].

    Raises:
        UserError: the text cannot be found or read, has no such column, or is too short for `block_size`.
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
    if b"\0" in text and exits.is_main():
        print(f"warning: --dataset {name} does not look like text: it has zero bytes", file=sys.stderr, flush=True)
    if len(text) == 0:
        raise UserError(f"--dataset {name} is empty; {ALTERNATIVES}")
    cut = len(text) * 9 // 10
    if cut < 2 * block_size:
        needed = -(-2 * block_size * 10 // 9)
        raise UserError(
            f"--dataset {name} has {len(text):,} bytes, too few for --block_size {block_size}: it needs {needed:,}, "
            f"or use --block_size {cut // 2} or less"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[:cut], data[cut:]


def synthetic_text(seed, sentences=4000):
    """Generates sentences from 60 invented words; after each word come only four others.

    Returns:
        bytes: about 35 per sentence. A model that learns the words and their order has a far lower loss than one that knows
        only the frequency of each byte.
    """
    rng = random.Random(f"text {seed}")
    words = ["".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((1, 2, 2, 3))))
             for _ in range(60)]  # fmt: skip
    after = {word: rng.choices(words, k=4) for word in words}
    lines = []
    for _ in range(sentences):
        sentence = [rng.choice(words)]
        for _ in range(rng.randint(4, 9)):
            sentence.append(rng.choice(after[sentence[-1]]))
        lines.append(" ".join(sentence).capitalize() + ".\n")
    return "".join(lines).encode()


# ------------------------------------------------------------------------------------------------------- streaming


def held_out(document):
    """Whether a document is held out for evaluation. Depends only on its bytes, so it is the same on every process."""
    return zlib.crc32(document) % HELD_OUT_ONE_IN == 0


def load_held_out(name, column, block_size):
    """Reads a stream from the start until `HELD_OUT_BYTES` of held-out documents are found, or the stream ends.

    Returns:
        uint8 [bytes].

    Raises:
        UserError: the stream cannot be read, has no such column, or has too little text.
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
            f"--dataset {name} has {documents} rows, none of which is held out for evaluation (1 in {HELD_OUT_ONE_IN} is): "
            "too small to stream, run without --streaming"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def open_stream(name, column):
    """Opens `column` as a `datasets.IterableDataset`, which reads rows as they are needed."""
    import datasets  # here and below, because importing it takes a second, and text in memory needs it rarely

    if name == "synthetic":
        rows = [{column: line} for line in synthetic_text(0).decode().splitlines()]
        return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=8)
    splits = _load(name, column, _local_files(name), streaming=True)
    return splits["train" if "train" in splits else next(iter(splits))].select_columns([column])


class TextStream(torch.utils.data.IterableDataset):
    """The share of this process of an endless, shuffled stream of micro-batches, the same for any number of processes.

    The data is split into a fixed number of parts, the `lanes` (by files if the number of files is a multiple of it, else by
    rows). Every global batch takes the same number of windows from each lane, and each process reads only its own lanes. So the
    global batches do not depend on the number of processes, which must divide the number of lanes.

    A lane fills a buffer with `buffer` windows, yields them in random order, and then fills the next buffer. Its position is
    the start of the buffer and the number of windows yielded from it: after a restart the same buffer is read again. In each
    batch, `position` has the positions of the lanes of this process after the batch.

    Args:
        micro_batch (int): windows per batch on this process.
        share (tuple[int, int]): index of this process, number of processes.
        position (dict | None): lane number (as a string) -> position, gathered from all processes after the last batch.
    """

    def __init__(self, name, column, block_size, micro_batch, *, lanes, buffer, seed, share, position=None):
        from datasets.distributed import split_dataset_by_node

        process, processes = share
        if lanes % processes or micro_batch * processes % lanes:
            raise UserError(
                f"--stream_lanes {lanes} must be a multiple of the {processes} processes and divide the micro-batch of "
                f"{micro_batch * processes} windows over all of them"
            )
        own = range(process * lanes // processes, (process + 1) * lanes // processes)
        # Open the data set once per lane: lanes that are split from one object would share its reading state.
        self.lanes = {}
        for lane in own:
            rows = split_dataset_by_node(open_stream(name, column), lane, lanes)
            self.lanes[str(lane)] = _Lane(rows, name, column, block_size, buffer, f"{seed} {lane}")
        for number, lane in self.lanes.items():
            lane.position = (position or {}).get(number) or lane.position
        self.micro_batch = micro_batch

    @classmethod
    def from_args(cls, args, accelerator, position=None):
        """Creates the share of this process from the command-line arguments, starting at `position`."""
        possible = topology.possible_processes(accelerator)
        if any(args.stream_lanes % processes for processes in possible):
            raise UserError(
                f"--stream_lanes {args.stream_lanes} must be a multiple of the {topology.either(possible)} processes"
            )
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
    """Yields windows from one part of the stream without end; `position` can be stored as JSON."""

    def __init__(self, rows, name, column, block_size, buffer, seed):
        self.rows, self.name, self.column, self.block_size, self.buffer, self.seed = (
            rows,
            name,
            column,
            block_size,
            buffer,
            seed,
        )
        # Start of the buffer (state of `rows`; unused bytes, as hex), number of the buffer, windows yielded ("taken") from it.
        self.position = {"rows": None, "rest": "", "buffers": 0, "taken": 0}

    def __iter__(self):
        if self.position["rows"] is not None:
            self.rows.set_epoch(self.position["rows"]["epoch"])  # otherwise `datasets` silently ignores the state
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
        """Yields the training documents from the position of `rows` on, and starts again at the end, without end."""
        empty_passes = 0
        while empty_passes < 2:  # the rest of a resumed pass may be empty
            empty_passes += 1
            for document in _documents(self.rows, self.column, self.name, partial(RunFailed, rank_variable=None)):
                if not held_out(document):
                    empty_passes = 0
                    yield document
            # Without this, the next pass would start from the state that was loaded.
            self.rows.set_epoch(self.rows.epoch + 1)
        raise RunFailed(f"--dataset {self.name}: a lane of the stream is empty: use fewer --stream_lanes", rank_variable=None)


# --------------------------------------------------------------------------------------------------------- reading


def _local_files(name):
    """The files of a local path, all of one format, sorted by name; an empty list if `name` is not a local path."""
    path = Path(name).expanduser()
    if not path.exists():
        if name.startswith((".", "/", "~")) or path.suffix in FORMATS:
            raise UserError(f"--dataset {name}: there is no such file or folder; {ALTERNATIVES}")
        return []
    if path.is_file():
        if path.suffix in COMPRESSED:
            raise UserError(f"--dataset {name} is compressed: unpack it first")
        # A file with any other suffix is read as text.
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in FORMATS and file.name not in RECORDS)
    for file in files:
        if file.suffix != files[0].suffix:
            raise UserError(
                f"--dataset {name} holds both {files[0].name} and {file.name}: give files of one format, or one file"
            )
    if files:
        return files
    raise UserError(f"--dataset {name} holds no file that ends in {', '.join(FORMATS)}; {ALTERNATIVES}")


def _load(name, column, files, streaming):
    """Loads `files` (or the Hub id `name`, if there are none) with `datasets`, and checks the column. Returns the splits."""
    import datasets

    datasets.disable_progress_bars()
    source = (
        dict(path=FORMATS.get(files[0].suffix, "text"), data_files={"train": [str(file) for file in files]})
        if files
        else dict(path=name)
    )
    try:
        splits = datasets.load_dataset(**source, streaming=streaming)
        first_split = next(iter(splits.values()))
        columns = first_split.column_names or list(next(iter(first_split), {column: None}))
    except Exception as error:  # errors of datasets, fsspec, pyarrow or the network
        raise UserError(f"cannot load --dataset {name} ({_first_line(error)}); {ALTERNATIVES}") from None
    if column not in columns:
        raise UserError(f"--dataset {name} has no column {column}: give --text_column, one of {', '.join(columns)}")
    return splits


def _documents(rows, column, name, failure):
    """Yields the rows as bytes, each with a final newline; raises `failure` if a row cannot be read."""
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
