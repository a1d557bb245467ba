"""Streams the documents of a language model as blocks, and continues exactly after a restart."""

import hashlib
import random
from functools import partial

import numpy as np
import torch

from utils.data.conversations import ANSWERS, Encoder
from utils.data.documents import Rows, open_documents
from utils.data.lanes import LaneStream, check_lanes
from utils.data.messages import draft_row
from utils.data.packing import Stream, cut_text, join_segments, pack_conversations
from utils.data.tables import first_line
from utils.data.tokens import Corpus, packing_options
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
        Corpus: with the split `val` only; the checksum is of its tokens.

    Raises:
        UserError: the stream cannot be read, or none of its documents is held out.
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
    if not held:
        raise UserError(
            f"--dataset {name} has {count} documents, none of which is held out for evaluation (1 "
            f"in {HELD_OUT_ONE_IN} is): too small to stream, run without --streaming"
        )
    blocks = _pack(held, source.kind, encoder, block_size, too_long, packed)
    digest = hashlib.sha256(b"".join(document.tokens.tobytes() for document in held)).hexdigest()
    said = f"a stream, of which {blocks.tokens:,} tokens are held out"
    return Corpus({"val": blocks}, source.kind, f"{said} (fingerprint {digest[:12]})", [])


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

    Args:
        name, tokenizer, block_size, subset, loss_on, too_long, packed: as for `load_held_out`.
        micro_batch, share, position: as for `LaneStream`.
        seed (int): of the order.
    """

    def __init__(
        self,
        name,
        tokenizer,
        block_size,
        micro_batch,
        *,
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
        from datasets.distributed import split_dataset_by_node  # here, because it takes a second

        encoder = Encoder(tokenizer, loss_on=loss_on)

        def open_lane(number):
            source = open_documents(name, subset)
            train = source.splits["train"]
            own = split_dataset_by_node(train.rows, number, lanes)
            rows = Rows(own, train.fingerprint, train.where, train.is_lines)
            pack = partial(
                _pack,
                kind=source.kind,
                encoder=encoder,
                block_size=block_size,
                too_long=too_long,
                packed=packed,
            )
            encode = partial(_documents, encoder=encoder, kind=source.kind)
            use_all = "val" in source.splits
            return _Lane(rows, encode, pack, buffer * block_size, use_all, f"{seed} {number}")

        super().__init__(open_lane, micro_batch, lanes=lanes, share=share, position=position)

    @classmethod
    def from_args(cls, args, accelerator, tokenizer, position=None):
        """Creates the share of this process from the command-line arguments, at `position`."""
        check_lanes(accelerator, LANES)
        micro_batch = args.batch_size // args.gradient_accumulation_steps
        return cls(
            args.dataset,
            tokenizer,
            args.block_size,
            micro_batch // accelerator.num_processes,
            subset=args.subset,
            loss_on=args.loss_on,
            too_long=args.too_long,
            packed=args.packed,
            seed=args.seed,
            share=(accelerator.process_index, accelerator.num_processes),
            position=position,
        )

    def collate(self, samples):
        """Tensors of blocks; `ids` are their places in this batch."""
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return {**batch, "ids": torch.arange(len(samples))}


class _Lane:
    """Yields blocks from one part of the stream without end; `position` can be stored as JSON."""

    def __init__(self, rows, encode, pack, tokens, use_all, seed):
        self.rows, self.encode, self.pack = rows, encode, pack
        self.tokens, self.use_all, self.seed = tokens, use_all, seed
        # The start of the buffer (state of `rows`), its number, and the blocks taken from it.
        self.position = {"rows": None, "buffers": 0, "taken": 0}

    def __iter__(self):
        stream = self.rows.rows
        if self.position["rows"] is not None:
            # Otherwise `datasets` silently ignores the state.
            stream.set_epoch(self.position["rows"]["epoch"])
            stream.load_state_dict(self.position["rows"])
        documents = self._documents()
        while True:
            start, held, tokens = self.position, [], 0
            while tokens < self.tokens:
                # All documents of a row: the state of `rows` is between two rows.
                held += next(documents)
                tokens = sum(len(document.tokens) for document in held)
            blocks = self.pack(held)
            order = list(range(len(blocks)))
            random.Random(f"{self.seed} {start['buffers']}").shuffle(order)
            following = {
                "rows": stream.state_dict(),
                "buffers": start["buffers"] + 1,
                "taken": 0,
            }
            for taken in range(start["taken"], len(order)):
                is_last = taken + 1 == len(order)
                self.position = following if is_last else {**start, "taken": taken + 1}
                yield blocks[order[taken]]
            if not order:  # too long for a block, or nothing to learn
                self.position = following

    def _documents(self):
        """Yields the documents of each row that is trained on, pass after pass."""
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
