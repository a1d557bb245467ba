"""Turns rows of a data set into tokens, and finds which of them a model learns to write.

Answers are the turns of the role `assistant`, or the completion, each with the token that ends it.
They are found by rendering: the messages before an answer, with what asks for one
(`add_generation_prompt`), and then the messages up to the answer. The first text must be the
beginning of the second; the rest is what the model writes when it is used. Few templates have the
marks `{% generation %}`, with which this would be simpler.

A template may render earlier turns differently when others follow; some drop the reasoning. The
conversation then becomes several documents, each of which is what the model reads and writes at
that turn. The date in a template is always `TODAY`: the same data gives the same tokens every day.

Each part of a document is tokenized by itself, so the tokens before an answer are those that the
model is given when it is used. Strings such as <|im_end|> in a text or message are plain text: only
the template writes special tokens.
"""

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.language.documents import KINDS, SEGMENT, read_segments, segments
from utils.language.rows import check_unicode
from utils.run.failures import UserError

ANSWERS, ALL = "answers", "all"  # the values of `loss_on`
# Private characters of Unicode, around the names of special tokens while messages are rendered. The
# `sanitize_control_tokens` of `apply_chat_template` returns only the tokens of the whole text, in
# which a line break that ends the prompt and one that begins the answer may be one token.
OPEN, CLOSE = "\uf8f0", "\uf8f1"
TODAY = datetime.datetime(2026, 1, 1)
# How templates ask for the date, as those of Llama 3.2 and SmolLM3 do.
CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}  # of other formats
KEYS = {"role", "content", "tool_calls", "weight", "train"}  # of messages, which are read here


class Part(NamedTuple):
    """A part of a document that is tokenized by itself.

    as_text: whether the names of special tokens in it are plain text.
    """

    text: str
    as_text: bool
    is_answer: bool = False


class Document(NamedTuple):
    """Tokens of a document, or of a segment of a long text.

    tokens: int32 [tokens].
    is_target: uint8 [tokens]; of a text, None: every token is a target.
    bytes: of a text, the UTF-8 bytes of its tokens, without a first one that nothing predicts.
    begins: whether this is where a document begins.
    """

    tokens: np.ndarray
    is_target: np.ndarray | None
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
        return row, len(self.tokens), targets, self.bytes, digest, self.begins


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
        tokens, ended = [*self._bos] if draft.begins else [], True
        learned = [0] * len(tokens)
        for is_answer, group in itertools.groupby(pairs, lambda pair: pair[0].is_answer):
            run, end = [token for _, tokens_of_part in group for token in tokens_of_part], 0
            if is_answer:
                end, ended = (len(run), True) if draft.ends else self._end(run)
            tokens += run
            learned += [1] * end + [0] * (len(run) - end)
        if draft.ends or not ended:
            tokens += self._eos
            learned += [1] * len(self._eos)
        is_target = np.array(learned, np.uint8) | np.uint8(self.loss_on == ALL)
        return Document(np.array(tokens, np.int32), is_target)

    def _finish_text(self, draft, tokens):
        text = draft.parts[0].text
        before, after = self._bos if draft.begins else [], self._eos if draft.ends else []
        size = len(text.encode())
        if draft.begins and not before:  # exact, unless several tokens make the first character
            size -= len(self.tokenizer.decode(tokens[:1]).encode())
        whole = np.array([*before, *tokens, *after], np.int32)
        return Document(whole, None, size, draft.begins)

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


# ---------------------------------------------------------------------------------- chat templates


def special_tokens(tokenizer):
    """The special tokens of a tokenizer: name -> number (dict)."""
    added = tokenizer.added_tokens_decoder.items()
    special = {str(token): number for number, token in added if token.special}
    return special | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


class ChatTemplate:
    """The chat template of a tokenizer of the `transformers` library."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        longest_first = sorted(special_tokens(tokenizer), key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._name = re.compile(pattern)
        self._marked = re.compile(f"{OPEN}({pattern}){CLOSE}|[{OPEN}{CLOSE}]")

    def split(self, messages, where, *, tools=None, together=False):
        """Renders a conversation.

        Args:
            messages (list[dict]): as `check_messages` returns them, at least one.
            where (str): names the conversation, in messages.
            tools (list | None): the tools that the template is told.
            together (bool): all messages are one document, which is as an answer.

        Returns:
            list: the parts (list) of each document; [] if there is no answer.

        Raises:
            UserError: there is no template, it cannot render the conversation, or the text that
                asks for an answer is not the beginning of the text with the answer.
        """
        # A role is a name that the template knows.
        messages = [{**self._mark(message), "role": message["role"]} for message in messages]
        tools, documents = self._mark(tools), []
        if together:
            chains = [[(self._render(messages, False, tools, where), True)]]
        else:
            chains = self._chains(messages, tools, where)
        for texts in chains:
            documents.append([part for pair in texts for part in self._parts(*pair)])
        return documents

    def ask(self, text):
        """The parts (list) of a first turn, with what asks for an answer; errors as of `split`."""
        turn = [{"role": "user", "content": self._mark(text)}]
        return [*self._parts(self._render(turn, True, None, "the prompt"), False)]

    def _parts(self, text, is_answer):
        """Yields a `Part` for what the template or a message says, and for each marked name."""
        for number, piece in enumerate(self._marked.split(text)):
            if piece or is_answer:
                yield Part(piece or "", number % 2 == 1, is_answer)

    def _chains(self, messages, tools, where):
        """A list for each document: texts, alternately before an answer and an answer."""
        chains, before = [], None
        for index, message in enumerate(messages):
            # Nobody asked for an answer that nothing precedes.
            if message["role"] != "assistant" or index == 0 or _is_empty(message):
                continue
            if message.get("weight") == 0 or message.get("train") is False:
                continue  # as in the data of other trainers: it is read, and not learned
            prompt = self._render(messages[:index], True, tools, where)
            whole = self._render(messages[: index + 1], False, tools, where)
            if not whole.startswith(prompt):
                raise UserError(
                    f"the chat template does not begin message {index} of {where} with what asks "
                    "for an answer: use --loss_on all, or another --chat_template"
                )
            answer = (whole[len(prompt) :], True)
            if before is not None and prompt.startswith(before):
                chains[-1] += [(prompt[len(before) :], False), answer]
            else:
                chains.append([(prompt, False), answer])
            before = whole
        return chains

    def _render(self, messages, ask, tools, where):
        if not self._tokenizer.chat_template:
            raise UserError(
                f"{where} is a conversation, and the tokenizer has no chat template: give "
                "--chat_template FILE"
            )
        try:
            template = _without_clock(self._tokenizer.get_chat_template(tools=tools))
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=ask,
                tokenize=False,
            )
        except Exception as error:  # of Jinja, or what a template raises
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"the chat template cannot render {where}: {reason[0]}") from None
        if ascii(OPEN)[1:-1] in text:  # the template wrote Python or JSON, in ASCII
            raise UserError(
                f"the chat template hides the name of a special token in {where}: remove the name"
            )
        check_unicode(text, where)
        return text

    def _mark(self, value):
        """Marks the names of special tokens in the texts of messages."""
        if isinstance(value, str):
            value = value.replace(OPEN, "").replace(CLOSE, "")
            return self._name.sub(f"{OPEN}\\g<0>{CLOSE}", value)
        if isinstance(value, list):
            return [self._mark(inner) for inner in value]
        if isinstance(value, dict):
            return {key: self._mark(inner) for key, inner in value.items()}
        return value


def _is_empty(message):
    return not (message["content"] or "").strip() and not message.get("tool_calls")


@functools.cache
def _without_clock(template):
    """A template with `TODAY` in place of the date that it asks for."""
    return CLOCK.sub(lambda call: json.dumps(TODAY.strftime(call[2])), template)


# ------------------------------------------------------------------------------- messages of a row


def check_messages(messages, where):
    """The messages of a row, checked.

    Returns:
        list[dict]: each with `role` (str) and `content`: str, also of a list of texts; None only
        next to `tool_calls`. Raises UserError if they are something else; `where` names the row.
    """
    if not isinstance(messages, (list, tuple)):
        raise UserError(f"the messages of {where} are no list, but {type(messages).__name__}")
    return [_check(message, f"message {i} of {where}") for i, message in enumerate(messages)]


def unread_keys(rows, template, most=1000):
    """The keys (list) of messages that nothing reads, in the first `most` rows."""
    values = [row.get("messages") for row in itertools.islice(rows, most) if row]
    messages = [message for value in values for message in value or []]
    keys = {str(key) for message in messages if isinstance(message, dict) for key in message}
    read = KEYS | set(re.findall(r"\w+", str(template)))
    return sorted(key for key in keys if not set(re.findall(r"\w+", key)) <= read)


def _check(message, where):
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{where} has no role and content")
    if message["role"] in ROLES:
        raise UserError(
            f"{where} has the role {message['role']}: call it {ROLES[message['role']]}, since "
            "answers are those of assistant"
        )
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
    is_call = content is None and message.get("tool_calls")
    if not isinstance(content, str) and not is_call:
        raise UserError(f"{where} has no text as content, but {repr(content)[:40]}")
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [_as_object(call) for call in message["tool_calls"]]}
    return {**message, "content": content}


def _as_object(call):
    """A tool call; its arguments, if they are JSON, as an object, which templates write."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    try:
        function = {**function, "arguments": json.loads(arguments)}
    except (TypeError, ValueError):  # an object, or some other text
        return call
    return {**call, "function": function} if "function" in call else function


def check_tools(tools, where):
    """The tools of a row: a list, or JSON of one. Raises UserError if they are something else."""
    if isinstance(tools, str) and tools:
        with contextlib.suppress(ValueError):
            tools = json.loads(tools)
    if tools and not isinstance(tools, list):
        raise UserError(f"the tools of {where} are no list, or JSON of one")
    return tools or None
