"""Mixes the documents of several sources in fixed proportions: the order depends on the seed and on
how many documents were taken, and on nothing else.
"""

import math
from pathlib import Path

import torch
from torch.nn.functional import one_hot

from utils.language.conversations import Document
from utils.language.lanes import gather_position
from utils.run.seeds import sample_seed

STAGGER = (math.sqrt(5) - 1) / 2  # multiples of it are spread evenly over 0 to 1


def next_source(weights, taken, lane=0):
    """The source that is furthest behind its share of the documents.

    In every run of documents, the number of each source is within 2 of its share: for up to six
    sources, tried in the tests.

    Args:
        weights (list[float]): the share of each source; their sum is 1.
        taken (list[int]): the number of documents taken from each so far.
        lane (int): orders of other lanes are shifted, so that together they are as even.

    Returns:
        int: its index.
    """
    total = sum(taken) + 1
    behind = [
        weight * total - count + lane * (source + 1) * STAGGER % 1
        for source, (weight, count) in enumerate(zip(weights, taken, strict=True))
    ]
    return behind.index(max(behind))


class Shuffled:
    """The documents of a source in memory, pass after pass, each in another order.

    A document is a conversation, or a part of a text that is no longer than a block.

    Args:
        blocks (Blocks): of the source.
        seed (int): of the order.
        source (int): its index among the sources, each of which has orders of its own.

    Attributes:
        kind (str): `text` if every token is a target, or else `messages`.
    """

    def __init__(self, blocks, seed, source=0):
        self._blocks, self._seed, self._source, self._orders = blocks, seed, source, {}
        self.kind = "text" if blocks.stream.is_target(0, 1) is None else "messages"

    def __len__(self):
        return len(self._blocks.pieces.starts)

    def document(self, number):
        """The `Document` of this number, which may be more than there are."""
        epoch, place = divmod(number, len(self))
        if epoch not in self._orders:
            # Lanes do not proceed in step: the orders of the last two passes are kept.
            self._orders = {old: self._orders[old] for old in self._orders if old >= epoch - 1}
            seed = sample_seed(self._seed, epoch, -1 - self._source)
            generator = torch.Generator().manual_seed(seed)
            self._orders[epoch] = torch.randperm(len(self), generator=generator).numpy()
        piece = self._orders[epoch][place]
        stream, pieces = self._blocks.stream, self._blocks.pieces
        start, count = int(pieces.starts[piece]), int(pieces.lengths[piece]) + 1
        return Document(stream.tokens(start, count), stream.is_target(start, count))


class MemoryReader:
    """Yields every `lanes`-th document of a source in memory without end, for one lane.

    Attributes:
        position (int): documents taken so far.
        epoch (int): the number of passes before that of the last document.
    """

    def __init__(self, shuffled, lane, lanes):
        self._shuffled, self._lane, self._lanes, self.position = shuffled, lane, lanes, 0

    @property
    def epoch(self):
        last = max(0, self.position - 1) * self._lanes + self._lane
        return last // len(self._shuffled)

    def seek(self, position):
        """Continues at a position; None: at the beginning."""
        self.position = position or 0

    def __iter__(self):
        while True:
            number = self.position * self._lanes + self._lane
            self.position += 1
            yield [self._shuffled.document(number)]


class SourceLog:
    """What the log says about the sources of a mixture; of a single source nothing.

    Args:
        names (list[str]): the values of `--dataset`.
        position (dict | None): of the stream, when the run starts.
    """

    def __init__(self, names, position=None):
        self._names, self.labels = names, labels(names)
        self._said = [0] * len(names)
        self._announce(position or {}, lambda line: None)

    def figures(self, accelerator, batches, say):
        """Gathers the loss and the tokens seen of each source; call it on every process.

        Args:
            batches (list[dict]): of the newest step. `block_losses` of each: the sums of the losses
                of its blocks, in nats.
            say: prints a line, if a source begins another pass.

        Returns:
            dict: `tokens_seen/LABEL` -> int; `loss/LABEL` -> float, nats per target of the step;
            None if it has no target of that source, or the model computes its own loss.
        """
        if len(self._names) == 1:
            return {}
        totals = 0
        for batch in batches:
            columns = torch.stack([batch["block_losses"], (batch["targets"] >= 0).sum(1)], 1)
            of_source = one_hot(batch["source"], len(self._names)).double()
            totals = totals + of_source.T @ columns.double()
        totals = accelerator.reduce(totals, "sum").tolist()
        losses = [t / count if count and math.isfinite(t) else None for t, count in totals]
        position = gather_position(batches[-1])
        self._announce(position, say)
        seen = [sum(some) for some in zip(*(p["tokens"] for p in position.values()), strict=True)]
        named = {f"tokens_seen/{label}": n for label, n in zip(self.labels, seen, strict=True)}
        return named | {f"loss/{label}": x for label, x in zip(self.labels, losses, strict=True)}

    def _announce(self, position, say):
        for source, name in enumerate(self._names):
            epoch = max((place["epochs"][source] for place in position.values()), default=0)
            if epoch > self._said[source]:
                say(f"--dataset {name} is exhausted and repeats: pass {epoch + 1}")
                self._said[source] = epoch


def labels(names):
    """A short, different label for each name: the last part of a path or Hub id."""
    found = []
    for name in names:
        label = short = Path(name).name or name
        count = 1
        while label in found:
            count += 1
            label = f"{short}_{count}"
        found.append(label)
    return found
