"""Streams the documents of a language model as blocks, and continues exactly after a restart."""

import hashlib
import random
from functools import partial

import numpy as np
import torch

from utils.data.tables import first_line
from utils.language.conversations import ANSWERS, Encoder
from utils.language.documents import COMPRESSED, Rows, open_documents
from utils.language.lanes import LaneStream, check_lanes
from utils.language.messages import draft_row
from utils.language.mixture import MemoryReader, Shuffled, next_source
from utils.language.packing import Stream, cut_text, join_segments, pack_conversations
from utils.language.text_files import find_files, samples
from utils.language.tokens import Corpus, packing_options
from utils.run.failures import RunFailed, UserError

LANES = 8  # parts of a stream
BUFFER = 64  # blocks among which a lane packs and shuffles
HELD_OUT_BLOCKS = 64  # of a stream, at most
HELD_OUT_ONE_IN = 64  # 1 in 64 documents is held out, if there is no split `val`


def load_held_out(
    name,
    tokenizer,
    block_size,
    *,
    subset=None,
    loss_on=ANSWERS,
    too_long="truncate",
    packed=True,
):
    """Reads the documents of a stream that are held out, at most `HELD_OUT_BLOCKS` blocks.

    They are those of its split `val`, or else 1 in `HELD_OUT_ONE_IN` of `train`.

    Args:
        arguments: as for `tokens.load_tokens`.

    Returns:
        Corpus: with the split `val` only; the checksum is of its tokens, and of local files
        (`samples`).

    Raises:
        UserError: the stream cannot be read, or nothing to learn is held out.
    """
    source, encoder = open_documents(name, subset), Encoder(tokenizer, loss_on=loss_on)
    whole = "val" in source.splits
    rows = source.splits["val" if whole else "train"]
    held, positions, count = [], 0, 0
    for documents in _documents(rows, encoder, source.kind, UserError):
        count += 1
        if whole or is_held_out(documents):
            held += documents
            positions += sum(len(document.tokens) for document in documents)
        if positions >= HELD_OUT_BLOCKS * block_size:
            break
    if not held and not whole:
        raise UserError(
            f"--dataset {name} has {count} documents, none of which is held out for evaluation (1 "
            f"in {HELD_OUT_ONE_IN} is): too small to stream, run without --streaming"
        )
    blocks = held and _pack(held, source.kind, encoder, block_size, too_long, packed)
    if not held or blocks.target_tokens == 0:
        raise UserError(f"--dataset {name} has no token to predict in what is held out")
    files = None if name == "synthetic" else find_files(name, COMPRESSED)
    known = [document.tokens.tobytes() for document in held] + (samples(files) if files else [])
    digest = hashlib.sha256(b"".join(known)).hexdigest()
    said = f"a stream, of which {blocks.tokens:,} tokens are held out"
    return Corpus({"val": blocks}, source.asked, f"{said} (fingerprint {digest[:12]})", [])


def is_held_out(documents):
    """Whether the documents of a row are held out: a deterministic function of their tokens."""
    digest = hashlib.blake2b(digest_size=8)
    for document in documents:
        digest.update(document.tokens.tobytes())
    return int.from_bytes(digest.digest(), "little") % HELD_OUT_ONE_IN == 0


class TokenStream(LaneStream):
    """This process' share of an endless, shuffled stream of micro-batches, as of `Blocks`.

    A lane collects documents for about `BUFFER` blocks, packs them, yields the blocks in random
    order, and then fills the next buffer. Its position is the start of the buffer and the number of
    blocks yielded from it: after a restart the same buffer is read again.

    Of several sources, a lane takes documents in fixed proportions, each in turn; a block has
    documents of one of them. A source that ends begins again.

    Args:
        sources: the name of a data set, as for `load_held_out`, or a list; a data set in memory is
            given as its `Blocks`.
        tokenizer, block_size, subset, loss_on, too_long, packed: as for `load_held_out`.
        weights (list[float] | None): the proportions of the documents; None: of one source.
        micro_batch, share, position: as for `LaneStream`.
        seed (int): of the order.
    """

    def __init__(
        self,
        sources,
        tokenizer,
        block_size,
        micro_batch,
        *,
        weights=None,
        subset=None,
        loss_on=ANSWERS,
        too_long="truncate",
        packed=True,
        seed=0,
        share=(0, 1),
        position=None,
        lanes=LANES,
        buffer=BUFFER,
    ):
        sources = [sources] if isinstance(sources, str) else sources
        encoder = Encoder(tokenizer, loss_on=loss_on)
        weights = weights or [1.0]
        weights = [weight / sum(weights) for weight in weights]
        in_memory = {
            number: Shuffled(source, seed, number)
            for number, source in enumerate(sources)
            if not isinstance(source, str)
        }

        def open_source(number, lane):
            if number in in_memory:
                shuffled = in_memory[number]
                return MemoryReader(shuffled, lane, lanes), shuffled.kind
            return _open_rows(sources[number], subset, encoder, lane, lanes)

        def open_lane(lane):
            opened = [open_source(number, lane) for number in range(len(sources))]
            options = dict(encoder=encoder, block_size=block_size, too_long=too_long, packed=packed)
            packs = [partial(_pack, kind=kind, **options) for _, kind in opened]
            readers = [reader for reader, _ in opened]
            return _Lane(readers, packs, weights, buffer * block_size, lane, f"{seed} {lane}")

        super().__init__(open_lane, micro_batch, lanes=lanes, share=share, position=position)

    @classmethod
    def from_args(cls, args, accelerator, tokenizer, packed, sources, position=None):
        """Creates the share of this process from the command-line arguments, at `position`."""
        check_lanes(accelerator, LANES)
        if any("readers" not in place for place in (position or {}).values()):
            raise UserError(
                "this run with --streaming was begun by an earlier version, whose position in the "
                "data cannot be continued: use another --output_dir"
            )
        micro_batch = args.batch_size // args.gradient_accumulation_steps
        return cls(
            sources,
            tokenizer,
            args.block_size,
            micro_batch // accelerator.num_processes,
            weights=args.mixture,
            subset=args.subset,
            loss_on=args.loss_on,
            too_long=args.too_long,
            packed=packed,
            seed=args.seed,
            share=(accelerator.process_index, accelerator.num_processes),
            position=position,
        )

    def collate(self, samples):
        """Tensors of blocks; `ids` are their places in this batch, `source` where they are from."""
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return {**batch, "ids": torch.arange(len(samples))}


class _Lane:
    """Yields blocks without end; `position` can be stored as JSON.

    Args:
        readers (list): of each source, yields lists of documents.
        packs (list): of each source, makes `Blocks` of documents.
        weights (list[float]): how many of the lists are those of each source.
        tokens (int): of a buffer.
        number (int): of the lane.
        seed (str): of the order.
    """

    def __init__(self, readers, packs, weights, tokens, number, seed):
        self.readers, self.packs, self.weights = readers, packs, weights
        self.tokens, self.number, self.seed = tokens, number, seed
        none = [0] * len(readers)
        # Where the buffer starts: the position of each reader, and how many lists were taken from
        # each; the number of the buffer, and the blocks taken from it. And of each source, the
        # tokens in all blocks so far, and the passes that are complete.
        self.position = {"readers": [None] * len(readers), "documents": none, "buffers": 0}
        self.position |= {"taken": 0, "tokens": none, "epochs": none}

    def __iter__(self):
        for reader, place in zip(self.readers, self.position["readers"], strict=True):
            reader.seek(place)
        documents = [iter(reader) for reader in self.readers]
        passes = max(reader.epoch for reader in self.readers)  # at the last block
        while True:
            start, held, tokens = self.position, [[] for _ in documents], 0
            counts, seen = list(start["documents"]), list(start["tokens"])
            while tokens < self.tokens:
                source = next_source(self.weights, counts, self.number)
                counts[source] += 1
                # All documents of a row: the state of a reader is between two rows.
                found = next(documents[source])
                held[source] += found
                tokens += sum(len(document.tokens) for document in found)
            blocks = [
                pack(some) if some else [] for pack, some in zip(self.packs, held, strict=True)
            ]
            order = [(source, i) for source, some in enumerate(blocks) for i in range(len(some))]
            random.Random(f"{self.seed} {start['buffers']}").shuffle(order)
            epochs = [reader.epoch for reader in self.readers]
            following = {"readers": [reader.position for reader in self.readers]}
            following |= {"documents": counts, "buffers": start["buffers"] + 1, "taken": 0}
            for taken in range(start["taken"], len(order)):
                source, index = order[taken]
                seen[source] += blocks[source].tokens_of(index)
                place = following if taken + 1 == len(order) else {**start, "taken": taken + 1}
                self.position = {**place, "tokens": list(seen), "epochs": epochs}
                yield {**blocks[source][index], "source": torch.tensor(source)}
            if order:
                passes = max(epochs)
            elif max(epochs) > passes + 1:
                raise RunFailed(
                    f"lane {self.number} of {LANES} of the stream has nothing to learn: its "
                    "documents have no answers, or none that fits in a block",
                    retry=False,
                    rank_variable=None,
                )
            else:  # too long for a block, or nothing to learn
                self.position = {**following, "tokens": seen, "epochs": epochs}


class _RowReader:
    """Yields the documents of each row of a part of a stream that is trained on, without end.

    Attributes:
        position (dict): the state of the rows, between two of them.
        epoch (int): passes that are complete.
    """

    def __init__(self, rows, encode, use_all):
        self.rows, self.encode, self.use_all = rows, encode, use_all

    @property
    def position(self):
        return self.rows.rows.state_dict()

    @property
    def epoch(self):
        return self.rows.rows.epoch

    def seek(self, position):
        """Continues at a position; None: at the beginning."""
        if position is not None:
            # Otherwise `datasets` silently ignores the state.
            self.rows.rows.set_epoch(position["epoch"])
            self.rows.rows.load_state_dict(position)

    def __iter__(self):
        failure = partial(RunFailed, rank_variable=None)  # only this process knows: it prints
        empty_passes = 0
        while empty_passes < 2:  # the rest of a resumed pass may be empty
            empty_passes += 1
            for documents in self.encode(self.rows, failure=failure):
                if documents and (self.use_all or not is_held_out(documents)):
                    empty_passes = 0
                    yield documents
            # Without this, the next pass would start from the state that was loaded.
            self.rows.rows.set_epoch(self.rows.rows.epoch + 1)
        raise failure(f"{self.rows.where}: one of the {LANES} lanes of the stream has no documents")


def _open_rows(name, subset, encoder, lane, lanes):
    """The reader of a lane's part of a stream, and the kind of its documents."""
    from datasets.distributed import split_dataset_by_node  # here, because it takes a second

    source = open_documents(name, subset)
    train = source.splits["train"]
    own = split_dataset_by_node(train.rows, lane, lanes)
    rows = Rows(own, train.fingerprint, train.where, train.is_lines)
    encode = partial(_documents, encoder=encoder, kind=source.kind)
    return _RowReader(rows, encode, "val" in source.splits), source.kind


def _documents(rows, encoder, kind, failure):
    """Yields the documents of each row, a list. Raises `failure` if the rows cannot be read."""
    number = 0
    try:
        for row in rows:
            where = f"row {number} of {rows.where}"
            yield list(encoder.encode(list(draft_row(row, encoder, kind, where))))
            number += 1
    except UserError as error:
        raise failure(str(error)) from None
    except Exception as error:  # of datasets, fsspec, pyarrow or the network
        raise failure(
            f"{rows.where} cannot be read after row {number}: {first_line(error)}"
        ) from None


def _pack(documents, kind, encoder, block_size, too_long, packed):
    """Blocks of documents that are in memory; a text may be divided into segments."""
    tokens = [document.tokens for document in documents]
    is_target = None if kind == "text" else [document.is_target for document in documents]
    columns = [(d.begins, len(d.tokens), d.answer, d.bytes) for d in documents]
    begins, *others = (np.array(column, np.int64) for column in zip(*columns, strict=True))
    found = join_segments(np.flatnonzero(begins), *others)
    # One array, because a document must not lie in several.
    joined = None if is_target is None else [np.concatenate(is_target)]
    stream = Stream([np.concatenate(tokens)], joined)
    options = packing_options(encoder.tokenizer, kind, block_size, too_long, packed)
    if kind == "text":
        return cut_text(stream, found, **options)
    return pack_conversations(stream, found, **options)[0]
