"""Turns rows of a data set into tokens, and finds which of them a model learns to write.

Each part of a document is tokenized by itself, so the tokens before an answer are those that the
model is given when it is used. Strings such as <|im_end|> in a text or message are plain text: only
the template writes special tokens.
"""

import hashlib
import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.language.chats import ChatTemplate, Part, check_messages, check_tools, special_tokens
from utils.language.documents import KINDS, SEGMENT, read_segments, segments
from utils.language.rows import check_unicode
from utils.run.failures import UserError

ANSWERS, ALL = "answers", "all"  # the values of `loss_on`


class Document(NamedTuple):
    """Tokens of a document, or of a segment of a long text.

    tokens: int32 [tokens].
    is_target: uint8 [tokens]; of a text, None: every token is a target.
    answer: the number of tokens before the last answer; -1: there is none.
    bytes: of a text, the UTF-8 bytes of its tokens, without a first one that nothing predicts.
    begins: whether this is where a document begins.
    """

    tokens: np.ndarray
    is_target: np.ndarray | None
    answer: int = -1
    bytes: int = 0
    begins: bool = True

    @property
    def content(self):
        """What makes it equal to another one (bytes)."""
        return self.tokens.tobytes() + (b"" if self.is_target is None else self.is_target.tobytes())

    def segment(self, row):
        """What `packing.SEGMENT` has of it: the row that it is from (int), and more."""
        digest = hashlib.blake2b(self.content, digest_size=8).digest()
        digest = int.from_bytes(digest, "little", signed=True)
        targets = 0 if self.is_target is None else int(self.is_target[1:].sum())
        return row, len(self.tokens), targets, self.answer, self.bytes, digest, self.begins


class Draft(NamedTuple):
    """A document, or a segment of a text, before it is tokenized.

    begins, ends: whether BOS is to come before it, and EOS after it. A template writes its own.
    """

    parts: list
    is_text: bool
    begins: bool
    ends: bool


class Encoder:
    """Encodes texts and conversations with a tokenizer of the `transformers` library.

    Args: loss_on (str): `answers`, or `all`: every token of a conversation is a target.
    """

    def __init__(self, tokenizer, loss_on=ANSWERS):
        self.tokenizer, self.loss_on = tokenizer, loss_on
        self._chat = ChatTemplate(tokenizer)
        # An unknown character ends nothing. (Some tokenizers have one token for both.)
        unknown = {tokenizer.unk_token_id} - {tokenizer.eos_token_id}
        added = {*special_tokens(tokenizer).values(), *tokenizer.added_tokens_decoder}
        self._ends = np.array(sorted(added - unknown))
        plain, line, both = self._tokenize(["a", "\n", "\na"], True).input_ids
        # A tokenizer of the kind of SentencePiece puts a space before the first word of a text:
        # not so after a line break, which is removed again.
        self._line = [] if both == line + plain else line
        whole = tokenizer("a").input_ids
        before = [place for place in range(len(whole)) if whole[place:][: len(plain)] == plain]
        self._bos = whole[: before[0]] if before else []
        self._eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def draft(self, row, kind, where):
        """The drafts of a row, or of the segments of its text; none if it is empty.

        Args:
            row (dict | None): with the columns of `kind`; None: an empty line.
            kind (str): see `documents.KINDS`.
            where (str): names the row, in messages.

        Raises:
            UserError: a column is missing or has another type, or the template refuses the row; of
                a text, while the drafts are iterated over.
        """
        columns = KINDS[kind]
        missing = [column for column in columns if row is not None and column not in row]
        if missing:
            raise UserError(f"{where} has no column {missing[0]}")
        if row is None or any(row[column] is None for column in columns):
            return []
        if kind == "text":
            return self._draft_text(row["text"], where)
        if kind == "prompt":
            return self._draft_completion(row, where)
        messages, tools = check_messages(row["messages"], where), row.get("tools")
        options = dict(tools=check_tools(tools, where), together=self.loss_on == ALL)
        documents = self._chat.split(messages, where, **options) if messages else []
        return [Draft(parts, False, False, False) for parts in documents]

    def _draft_text(self, text, where):
        """Yields a `Draft` of each segment of a text (str, or Path of a file); none if empty."""
        if isinstance(text, str):
            check_unicode(text, where)
            text = segments(text.encode(), SEGMENT)
        elif isinstance(text, Path):
            text = read_segments(text)
        else:
            raise UserError(f"{where} has no text, but {type(text).__name__}")
        begins, before = True, None
        for segment in text:
            if before is not None and segment:
                yield Draft([Part(before, True)], True, begins, False)
                begins = False
            before = segment or before
        if before is not None and (before.strip() or not begins):
            yield Draft([Part(before, True)], True, begins, True)

    def _draft_completion(self, row, where):
        for name in KINDS["prompt"]:
            if not isinstance(row[name], str):
                raise UserError(
                    f"the {name} of {where} is no text, but {type(row[name]).__name__}: of two "
                    "lists of messages, make one column, messages"
                )
            check_unicode(row[name], where)
        parts = [Part(row["prompt"], True), Part(row["completion"], True, True)]
        return [Draft(parts, False, True, True)] if row["completion"].strip() else []

    def encode_prompt(self, text, kind):
        """The tokens of what a model is asked, as before an answer or a text that it learned.

        Args:
            text (str): a conversation's first turn, a prompt, or the beginning of a text.
            kind (str): `messages`, `prompt` or `text`.

        Returns:
            list[int]. Raises UserError if the template refuses a turn, or there is none.
        """
        if kind == "messages":
            draft = Draft(self._chat.ask(text), False, False, False)
        else:
            draft = Draft([Part(text, True)], True, True, False)
        (document,) = self.encode([draft])
        return document.tokens.tolist()

    def answer_ends(self):
        """The token that ends an answer in the chat template: a list of one int, or of none."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            (document,) = self.encode(self.draft({"messages": turns}, "messages", "a message"))
        except UserError:  # there is no template, or it takes other conversations only
            return []
        last = document.tokens[np.flatnonzero(document.is_target)[-1:]].tolist()
        return [token for token in last if token in self._ends]

    def encode(self, drafts):
        """The `Document` of each draft (list), tokenized at once: a tokenizer uses all cores."""
        parts, after_line = [], []
        for draft in drafts:
            for number, part in enumerate(draft.parts):
                # A text after BOS is tokenized as one alone.
                begins = number == 0 and (draft.begins or not draft.is_text)
                after_line.append(bool(self._line) and not begins)
                parts.append(part)
        encoded = [None] * len(parts)
        for as_text in (True, False):
            chosen = [i for i, part in enumerate(parts) if part.as_text == as_text]
            pairs = [(parts[i].text, after_line[i]) for i in chosen]
            for i, tokens in zip(chosen, self._encode_texts(pairs, as_text), strict=True):
                encoded[i] = tokens
        following = iter(encoded)
        return [self._finish(draft, [next(following) for _ in draft.parts]) for draft in drafts]

    def _encode_texts(self, pairs, as_text):
        """Yields the tokens of texts. `pairs`: each with whether to put it after a line break."""
        if not pairs:
            return
        lines = [f"\n{text}" if after_line else text for text, after_line in pairs]
        encoded = self._tokenize(lines, as_text).input_ids
        for (text, after_line), tokens in zip(pairs, encoded, strict=True):
            if after_line and tokens[: len(self._line)] == self._line:
                tokens = tokens[len(self._line) :]
            elif after_line:
                tokens = self._tokenize([text], as_text).input_ids[0]
            yield tokens

    def _tokenize(self, texts, as_text):
        options = dict(add_special_tokens=False, return_attention_mask=False)
        options["verbose"] = False  # it would warn of texts that are longer than a model can read
        return self.tokenizer(texts, split_special_tokens=as_text, **options)

    def _finish(self, draft, encoded):
        """The document of a draft, the parts of which are `encoded` as these tokens."""
        if draft.is_text:
            return self._finish_text(draft, encoded[0])
        pairs = zip(draft.parts, encoded, strict=True)
        tokens, answer, ended = [*self._bos] if draft.begins else [], -1, True
        learned = [0] * len(tokens)
        for is_answer, group in itertools.groupby(pairs, lambda pair: pair[0].is_answer):
            run, end = [token for _, tokens_of_part in group for token in tokens_of_part], 0
            if is_answer:
                answer = len(tokens)
                end, ended = (len(run), True) if draft.ends else self._end(run)
            tokens += run
            learned += [1] * end + [0] * (len(run) - end)
        if draft.ends or not ended:
            tokens += self._eos
            learned += [1] * len(self._eos)
        is_target = np.array(learned, np.uint8) | np.uint8(self.loss_on == ALL)
        return Document(np.array(tokens, np.int32), is_target, answer)

    def _finish_text(self, draft, tokens):
        text = draft.parts[0].text
        before, after = self._bos if draft.begins else [], self._eos if draft.ends else []
        size = len(text.encode())
        if draft.begins and not before:  # exact, unless several tokens make the first character
            size -= len(self.tokenizer.decode(tokens[:1]).encode())
        whole = np.array([*before, *tokens, *after], np.int32)
        return Document(whole, None, -1, size, draft.begins)

    def _end(self, tokens):
        """The number of tokens of an answer; and whether the last one, such as <|im_end|>, ends it.

        Templates follow it with a line break.
        """
        places = np.flatnonzero(np.isin(tokens, self._ends))
        end = int(places[-1]) + 1 if len(places) else 0
        if end and not self.tokenizer.decode(tokens[end:]).strip():
            return end, True
        return len(tokens), False


def pad_id_of(tokenizer):
    """The token that fills up blocks and batches: that for padding, or else the end, or else 0."""
    choices = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
    return next(token for token in choices if token is not None)
