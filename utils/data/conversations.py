"""Turns a text or a conversation into tokens, and finds which of them a model learns to write.

Of a conversation these are the answers: the turns of the role `assistant`, or the completion, each
with the token that ends it. They are found by rendering: the messages before an answer, with what
asks for one (`add_generation_prompt`), and then the messages up to the answer. The first text must
be the beginning of the second; the rest is what the model writes when it is used. This needs no
`{% generation %}` marks, which few templates have, and agrees with them where there are any.

A template may render earlier turns differently when others follow (some drop the reasoning). What
the model reads before an answer is then no continuation of what it read before: the conversation
becomes several documents, each of which is what the model reads and writes at that turn.

Strings such as <|im_end|> in a text or message are plain text: only the template writes special
tokens.
"""

import json
import re
from typing import NamedTuple

import numpy as np

from utils.run.failures import UserError

ANSWERS, ALL = "answers", "all"  # the values of `loss_on`
SEGMENT = 1_000_000  # characters that are tokenized at once
EMPTY, NO_ANSWER = "empty documents", "conversations without an answer"
# Private characters of Unicode, around special tokens in messages while they are rendered.
OPEN, CLOSE = "\uf8f0", "\uf8f1"


class Document(NamedTuple):
    """Tokens of a document, or of a segment of a long one.

    tokens: int32 [tokens].
    is_target: uint8 [tokens], or None: every token is a target.
    answer: the number of tokens before the last answer; -1: none.
    bytes: the UTF-8 bytes that the tokens say, without a first one that nothing predicts.
    begins: whether this is where a document begins.
    quotes: whether it contains the name of a special token, as text.
    """

    tokens: np.ndarray
    is_target: np.ndarray | None = None
    answer: int = -1
    bytes: int = 0
    begins: bool = True
    quotes: bool = False


class Piece(NamedTuple):
    """A part of a document: its text, and whether the model learns to write it."""

    text: str
    is_answer: bool


class Encoder:
    """Encodes texts and conversations with a tokenizer of the `transformers` library.

    Args:
        tokenizer: the tokenizer.
        chat_template (str | None): a Jinja template, instead of that of the tokenizer.
        loss_on (str): `answers`, or `all`: every token of a conversation is a target.
    """

    def __init__(self, tokenizer, chat_template=None, loss_on=ANSWERS):
        self.tokenizer, self.loss_on = tokenizer, loss_on
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self.eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        added = tokenizer.added_tokens_decoder
        special = {str(token): number for number, token in added.items() if token.special}
        special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._control = np.array(sorted(set(special.values())), np.int32)
        self._added = np.array(sorted({*special.values(), *added}), np.int32)
        longest_first = sorted(special, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._quoted = re.compile(pattern)
        self._marked = re.compile(f"{OPEN}({pattern}){CLOSE}|[{OPEN}{CLOSE}]")
        plain, bare = self._encode(["a"], False)[0], tokenizer("a").input_ids
        place = next((i for i in range(len(bare)) if bare[i : i + len(plain)] == plain), 0)
        self.bos = bare[:place]
        # A tokenizer of the kind of SentencePiece puts a space before the first word: not so after
        # a line break, which is removed again.
        line, both = self._encode(["\n", "\na"], False)
        self._line = [] if both == line + plain else line

    def _encode(self, texts, as_text=True):
        """Lists of tokens; `as_text`: without looking for special tokens."""
        encoded = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=as_text)
        return encoded.input_ids

    # ------------------------------------------------------------------------------------- texts

    def texts(self, segments, where):
        """Encodes a text: BOS if the tokenizer adds one, the text, EOS.

        Args:
            segments: an iterable of str, in order.
            where (str): names the text, in messages.

        Yields:
            Document: for each segment, one; for an empty text, none.

        Raises:
            UserError: the tokenizer writes a special token for its name.
        """
        begins, segment = True, None
        for following in segments:
            if not following:
                continue
            if segment is not None:
                yield self._text(segment, where, begins, ends=False)
                begins = False
            segment = following
        if segment is not None and not (begins and not segment.strip()):
            yield self._text(segment, where, begins, ends=True)

    def _text(self, text, where, begins, ends):
        tokens = self._encode([text])[0] if begins else self._continue(text, True)
        quotes = self._check(text, tokens, where)
        before = self.bos if begins else []
        size = len(text.encode())
        if begins and not before and tokens:
            size -= self._first_bytes(text)
        tokens = np.array([*before, *tokens, *(self.eos if ends else [])], np.int32)
        return Document(tokens, None, -1, size, begins, quotes)

    def _first_bytes(self, text):
        """The bytes of the first token of a text. Of a character that is several tokens: all."""
        start = text[:100]
        encoded = self.tokenizer(start, add_special_tokens=False, split_special_tokens=True)
        if not encoded.encodings:  # a tokenizer written in Python does not say where a token is
            return len(self.tokenizer.decode(encoded.input_ids[:1]).encode())
        return len(start[: encoded.encodings[0].offsets[0][1]].encode())

    def _check(self, text, tokens, where):
        """Whether a text contains the name of a special token, which is text in its tokens."""
        if not self._quoted.search(text):
            return False
        found = np.intersect1d(tokens, self._control)
        found = found[found != self.tokenizer.unk_token_id]
        if len(found):
            name = self.tokenizer.convert_ids_to_tokens(int(found[0]))
            raise UserError(
                f"{where} contains {name}, which this tokenizer cannot tell from its special "
                "token: remove it from the text"
            )
        return True

    def _continue(self, text, as_text):
        """The tokens of a text that does not begin a document."""
        if not self._line:
            return self._encode([text], as_text)[0]
        tokens = self._encode(["\n" + text], as_text)[0]
        if tokens[: len(self._line)] == self._line:
            return tokens[len(self._line) :]
        return self._encode([text], as_text)[0]

    # ----------------------------------------------------------------------------- conversations

    def completion(self, prompt, completion, where):
        """Encodes a prompt and what follows it, both str: BOS, the prompt, the completion, EOS.

        Returns:
            Document | None: None: there is no completion.
        """
        if not completion.strip():
            return None
        return self._join([Piece(prompt, False), Piece(completion, True)], where, plain=True)

    def conversation(self, messages, where, *, first=0, tools=None):
        """Encodes a conversation by the chat template.

        Args:
            messages (list[dict]): with `role` and `content`, as `check_messages` accepts them.
            where (str): names the conversation, in messages.
            first (int): answers before this message are not learned.
            tools (list | None): what the template is told of tools.

        Returns:
            list[Document]: one, or several if the template rewrites earlier turns; [] if there is
            no answer.

        Raises:
            UserError: the template is missing or refuses the conversation, or what asks for an
                answer is not what precedes it.
        """
        if not self.chat_template:
            raise UserError(
                f"{where} is a conversation, and the tokenizer has no chat template: give "
                "--chat_template FILE"
            )
        messages = [{**message, "content": self._mark(message["content"])} for message in messages]
        if self.loss_on == ALL:
            found = [self._whole(messages, tools, where)]
        else:
            found = self._chains(messages, first, tools, where)
        return [self._join(pieces, where, plain=False) for pieces in found]

    def _chains(self, messages, first, tools, where):
        """The pieces of each document of a conversation."""
        chains, before = [], None
        for index, message in enumerate(messages):
            # An answer that nothing precedes is what the others answer to.
            if message["role"] != "assistant" or index == 0 or index < first or _is_empty(message):
                continue
            prompt = self._render(messages[:index], True, tools, where)
            whole = self._render(messages[: index + 1], False, tools, where)
            if not whole.startswith(prompt):
                raise UserError(
                    f"the chat template does not begin message {index} of {where} with what asks "
                    "for an answer: --loss_on all, or give another --chat_template"
                )
            answer = Piece(whole[len(prompt) :], True)
            if before is not None and prompt.startswith(before):
                chains[-1] += [Piece(prompt[len(before) :], False), answer]
            else:
                chains.append([Piece(prompt, False), answer])
            before = whole
        return chains

    def _whole(self, messages, tools, where):
        """The pieces of a conversation of which everything is learned."""
        whole = self._render(messages, False, tools, where)
        roles = [message["role"] for message in messages]
        if "assistant" in roles[1:]:
            last = len(roles) - 1 - roles[::-1].index("assistant")
            prompt = self._render(messages[:last], True, tools, where)
            if whole.startswith(prompt):
                return [Piece(prompt, False), Piece(whole[len(prompt) :], True)]
        return [Piece(whole, False)]

    def _render(self, messages, ask, tools, where):
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.chat_template,
                add_generation_prompt=ask,
                tokenize=False,
            )
        except Exception as error:  # of Jinja, or of the code of a template
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"the chat template cannot render {where}: {reason[0]}") from None

    def _mark(self, content):
        """Marks the names of special tokens in the content of a message."""
        if isinstance(content, str):
            content = content.replace(OPEN, "").replace(CLOSE, "")
            return self._quoted.sub(f"{OPEN}\\g<0>{CLOSE}", content)
        if isinstance(content, list):
            return [{**part, "text": self._mark(part["text"])} for part in content]
        return content

    def _join(self, pieces, where, plain):
        """The tokens of pieces; `plain`: those of a prompt and its completion, not of a template.

        Each piece is encoded by itself: a prompt as when the model is used, whatever follows it.
        """
        tokens, answer, quotes = list(self.bos if plain else []), -1, False
        is_target, ended = [self.loss_on == ALL] * len(tokens), False
        for piece in pieces:
            if piece.is_answer:
                answer = len(tokens)
            # Alternately what the template or a message says, and the marked name of a token.
            texts = [None, piece.text] if plain else self._marked.split(piece.text)
            for number, text in enumerate(texts):
                if not text:
                    continue
                as_text = number % 2 == 1
                some = self._continue(text, as_text) if tokens else self._encode([text], as_text)[0]
                quotes |= as_text and self._check(text, some, where)
                tokens += some
            end, ended = self._end(tokens, answer) if piece.is_answer else (len(tokens), True)
            learned = end if piece.is_answer or self.loss_on == ALL else len(is_target)
            is_target += [True] * (learned - len(is_target))
            is_target += [self.loss_on == ALL] * (len(tokens) - len(is_target))
        if plain or not ended:
            tokens, is_target = tokens + self.eos, is_target + [True] * len(self.eos)
        tokens, is_target = np.array(tokens, np.int32), np.array(is_target, np.uint8)
        return Document(tokens, is_target, answer, 0, True, quotes)

    def _end(self, tokens, start):
        """Where an answer that begins at `start` ends; and whether a token says so.

        That is an added token such as <|im_end|>; templates follow it with a line break.
        """
        added = np.flatnonzero(np.isin(tokens[start:], self._added))
        end = start + int(added[-1]) + 1 if len(added) else start
        if len(added) and not self.tokenizer.decode(tokens[end:]).strip():
            return end, True
        return len(tokens), False


def _is_empty(message):
    content = message["content"]
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return not (content or "").strip() and not message.get("tool_calls")


def check_messages(messages, where):
    """The messages of a row, checked.

    Returns:
        list[dict]: each with `role` (str) and `content` (str, list of texts, or None next to
        `tool_calls`).

    Raises:
        UserError: they are something else; `where` names the row.
    """
    if not isinstance(messages, (list, tuple)):
        raise UserError(f"the messages of {where} are no list, but {type(messages).__name__}")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"message {number} of {where} has no role and content")
        content = message.get("content")
        texts = content if isinstance(content, list) else [content]
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        elif content is None and message.get("tool_calls"):
            texts = []
        if not all(isinstance(text, str) for text in texts):
            kind = "parts that are not text" if isinstance(content, list) else repr(content)[:40]
            raise UserError(f"message {number} of {where} has no text as content, but {kind}")
        for text in texts:
            check_unicode(text, where)
        checked.append({**message, "content": content})
    return checked


def check_tools(tools, where):
    """The tools of a row: a list, or JSON of one. Raises UserError if they are something else."""
    if not tools:
        return None
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        raise UserError(f"the tools of {where} are not JSON") from None
    if not isinstance(tools, list):
        raise UserError(f"the tools of {where} are no list")
    return tools or None


def check_unicode(text, where):
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair, as in "\ud800"
        raise UserError(f"{where} is not valid Unicode") from None
