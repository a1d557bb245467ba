"""What is asked of a data set of tokens: which rows, how they become blocks."""

from dataclasses import dataclass

from utils.language.conversations import ANSWERS, pad_id_of
from utils.language.packing import cut_text, pack_conversations


@dataclass(frozen=True)
class TokenSettings:
    """How the rows of a data set become blocks of tokens.

    Args:
        tokenizer: of the `transformers` library.
        block_size (int): positions of a block.
        subset (str | None): a configuration of a Hub id.
        val_fraction (float): the share of the rows that is held out if the data has neither a
            split `val` nor `test`; of a single text, its last part.
        seed (int): decides which rows are held out, the order of a stream, and `synthetic`.
        loss_on (str): `answers` or `all`: which tokens of a conversation are targets.
        too_long (str): `truncate`, `drop` or `error`: conversations longer than a block.
        packed (bool): False: each block has positions of one document only.
    """

    tokenizer: object
    block_size: int
    subset: str | None = None
    val_fraction: float = 0.1
    seed: int = 0
    loss_on: str = ANSWERS
    too_long: str = "truncate"
    packed: bool = True

    @classmethod
    def from_args(cls, tokenizer, packed, args):
        """The settings that the command-line arguments give."""
        return cls(
            tokenizer,
            block_size=args.block_size,
            subset=args.subset,
            val_fraction=args.val_fraction,
            seed=args.seed,
            loss_on=args.loss_on,
            too_long=args.too_long,
            packed=packed,
        )

    def pack(self, stream, documents, kind):
        """Makes blocks of documents.

        Args:
            stream (Stream), documents (Documents): the tokens, and where each document is.
            kind (str): see `documents.KINDS`.

        Returns:
            tuple: `Blocks`; dict[str, int], how many conversations were cut off or left out.
        """
        place = stream, documents, self.block_size, pad_id_of(self.tokenizer)
        if kind == "text":
            return cut_text(*place, packed=self.packed), {}
        return pack_conversations(*place, too_long=self.too_long, packed=self.packed)
