"""Turns texts and conversations into tokens, and finds which of them a model learns to write.

Of a conversation these are the answers: the turns of the role `assistant`, or the completion, each
with the token that ends it. They are found by rendering: the messages before an answer, with what
asks for one (`add_generation_prompt`), and then the messages up to the answer. The first text must
be the beginning of the second; the rest is what the model writes when it is used. This needs no
`{% generation %}` marks, which few templates have. Each part is tokenized by itself, so the tokens
before an answer are those that the model is given when it is used.

A template may render earlier turns differently when others follow; some drop the reasoning. What
the model reads before an answer is then no continuation of what it read before: the conversation
becomes several documents, each of which is what the model reads and writes at that turn.

Strings such as <|im_end|> in a text or message are plain text: only the template writes special
tokens.

Where a template writes the date, that is always `TODAY`: the same data gives the same tokens on
every day and machine.
"""

import datetime
import functools
import itertools
import json
import re
from typing import NamedTuple

import numpy as np

from utils.run.failures import UserError

ANSWERS, ALL = "answers", "all"  # the values of `loss_on`
# Private characters of Unicode, around the names of special tokens while messages are rendered. The
# method `apply_chat_template(..., sanitize_control_tokens=True)` of `transformers` also does that,
# but returns only the tokens of the whole text. Here the parts before and after the beginning of an
# answer are tokenized by themselves: a line break that ends the prompt and one that begins the
# answer may be one token of the whole.
OPEN, CLOSE = "\uf8f0", "\uf8f1"
TODAY = datetime.datetime(2026, 1, 1)
# How templates ask for the date, as those of Llama 3.2 and SmolLM3 do.
CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
PROBE = "wxyz"  # a content, to see what a template makes of it


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


class Part(NamedTuple):
    """A part of a document that is tokenized by itself.

    as_text: whether the names of special tokens in it are plain text.
    """

    text: str
    as_text: bool
    is_answer: bool = False


class Draft(NamedTuple):
    """A document, or a segment of a text, before it is tokenized.

    where: names it, in messages.
    begins, ends: whether BOS is to come before it, and EOS after it. A template writes its own.
    """

    parts: list
    where: str
    is_text: bool
    begins: bool
    ends: bool


class Encoder:
    """Encodes texts and conversations with a tokenizer of the `transformers` library.

    Args:
        tokenizer: the tokenizer.
        chat_template (str | None): a Jinja template, instead of that of the tokenizer.
        loss_on (str): `answers`, or `all`: every token of a conversation is a target.
    """

    def __init__(self, tokenizer, chat_template=None, loss_on=ANSWERS):
        self.tokenizer, self.loss_on = tokenizer, loss_on
        own = chat_template or tokenizer.chat_template
        templates = own if isinstance(own, dict) else {"default": own}
        templates = {name: _without_clock(text) for name, text in templates.items() if text}
        self.chat_template = templates.get("default")
        self.tools_template = templates.get("tool_use", self.chat_template)
        added = tokenizer.added_tokens_decoder
        special = {str(token): number for number, token in added.items() if token.special}
        special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        # An unknown character ends nothing. (Some tokenizers have one token for both.)
        unknown = {tokenizer.unk_token_id} - {tokenizer.eos_token_id}
        self._special = np.array(sorted({*special.values()} - unknown), np.int32)
        self._added = np.array(sorted({*special.values(), *added} - unknown), np.int32)
        longest_first = sorted(special, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._name = re.compile(pattern)
        self._marked = re.compile(f"{OPEN}({pattern}){CLOSE}|[{OPEN}{CLOSE}]")
        plain, line, both = self._tokenize(["a", "\n", "\na"], True).input_ids
        # A tokenizer of the kind of SentencePiece puts a space before the first word of a text:
        # not so after a line break, which is removed again.
        self._line = [] if both == line + plain else line
        whole = tokenizer("a").input_ids
        before = [place for place in range(len(whole)) if whole[place:][: len(plain)] == plain]
        self._bos = whole[: before[0]] if before else []
        self._eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    # ------------------------------------------------------------------------------------ drafts

    def draft_text(self, segments, where):
        """Yields a `Draft` for each segment (str) of a text; none for an empty text."""
        begins, before = True, None
        for segment in segments:
            if before is not None and segment:
                yield Draft([Part(before, True)], where, True, begins, False)
                begins = False
            before = segment or before
        if before is not None and (before.strip() or not begins):
            yield Draft([Part(before, True)], where, True, begins, True)

    def draft_completion(self, prompt, completion, where):
        """A list of the `Draft` of a prompt and what follows it, both str; [] if nothing does."""
        parts = [Part(prompt, True), Part(completion, True, True)]
        return [Draft(parts, where, False, True, True)] if completion.strip() else []

    def draft_conversation(self, messages, where, *, first=0, tools=None):
        """Renders a conversation by the chat template.

        Args:
            messages (list[dict]): as `check_messages` returns them, at least one.
            where (str): names the conversation, in messages.
            first (int): answers before this message are not learned.
            tools (list | None): the tools that the template is told.

        Returns:
            list[Draft]: one, or several if the template rewrites earlier turns; [] if there is no
            answer.

        Raises:
            UserError: there is no template, it refuses the conversation, or the text that asks for
                an answer is not the beginning of the text with the answer.
        """
        if not self.chat_template:
            raise UserError(
                f"{where} is a conversation, and the tokenizer has no chat template: give "
                "--chat_template FILE"
            )
        # A role is a name that the template knows.
        messages = [{**self._mark(message), "role": message["role"]} for message in messages]
        tools = self._mark(tools)
        make = self._whole if self.loss_on == ALL else self._chains
        drafts = []
        for texts in make(messages, first, tools, where):
            parts = [part for text, is_answer in texts for part in self._parts(text, is_answer)]
            drafts.append(Draft(parts, where, False, False, False))
        return drafts

    def encode_prompt(self, text, kind):
        """The tokens of what a model is asked, as before an answer or a text that it learned.

        Args:
            text (str): a conversation's first turn, a prompt, or the beginning of a text.
            kind (str): `messages`, `prompt` or `text`.

        Returns:
            list[int].

        Raises:
            UserError: the template refuses it, or there is none.
        """
        if kind != "messages":
            draft = Draft([Part(text, True)], "the prompt", True, True, False)
        elif not self.chat_template:
            raise UserError("the tokenizer has no chat template: give --chat_template FILE")
        else:
            turn = [{"role": "user", "content": self._mark(text)}]
            asked = self._render(turn, True, None, "the prompt")
            draft = Draft([*self._parts(asked, False)], "the prompt", False, False, False)
        (document,) = self.encode([draft])
        return document.tokens.tolist()

    def _parts(self, text, is_answer):
        """Yields a `Part` for what the template or a message says, and for each marked name."""
        for number, some in enumerate(self._marked.split(text)):
            if some or is_answer:
                yield Part(some or "", number % 2 == 1, is_answer)

    def _chains(self, messages, first, tools, where):
        """A list for each document: texts, alternately before an answer and an answer."""
        chains, before = [], None
        for index, message in enumerate(messages):
            # Nobody asked for an answer that nothing precedes.
            if message["role"] != "assistant" or index == 0 or index < first or _is_empty(message):
                continue
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

    def _whole(self, messages, first, tools, where):
        """As `_chains`: one list, with all messages."""
        whole = self._render(messages, False, tools, where)
        roles = [message["role"] for message in messages]
        if "assistant" in roles[1:]:
            last = len(roles) - 1 - roles[::-1].index("assistant")
            prompt = self._render(messages[:last], True, tools, where)
            if whole.startswith(prompt):
                return [[(prompt, False), (whole[len(prompt) :], True)]]
        return [[(whole, False)]]

    @functools.cached_property
    def _ends(self):
        """Ids of tokens that end an answer: special ones, and added ones that a template writes."""
        turns = [("user", PROBE), ("assistant", PROBE)]
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = self._render(messages, False, None, "a message")
        except UserError:  # it takes other conversations only
            return self._added
        if PROBE not in text:
            raise UserError(
                "the chat template does not write contents that are texts: give another "
                "--chat_template"
            )
        after = self._tokenize([text.rpartition(PROBE)[2]], False).input_ids[0]
        return np.union1d(self._special, np.intersect1d(after, self._added))

    def _render(self, messages, ask, tools, where):
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.tools_template if tools else self.chat_template,
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

    # ------------------------------------------------------------------------------------ tokens

    def encode(self, drafts):
        """Tokenizes drafts, all at once: a tokenizer in Rust uses all cores.

        Returns:
            list[Document]: one for each.

        Raises:
            UserError: the tokenizer makes a special token of its name in a text.
        """
        places = [(draft, number) for draft in drafts for number in range(len(draft.parts))]
        found = {}
        for as_text in (True, False):
            chosen = [i for i, (draft, n) in enumerate(places) if draft.parts[n].as_text == as_text]
            if not chosen:
                continue
            # A text after BOS is tokenized as one alone.
            first = [n == 0 and (d.begins or not d.is_text) for d, n in (places[i] for i in chosen)]
            after = [bool(self._line) and not begins for begins in first]
            texts = [places[i][0].parts[places[i][1]].text for i in chosen]
            lines = ["\n" * line + text for line, text in zip(after, texts, strict=True)]
            encoded = self._tokenize(lines, as_text)
            for i, line, text, tokens in zip(chosen, after, texts, encoded.input_ids, strict=True):
                if line and tokens[: len(self._line)] == self._line:
                    tokens = tokens[len(self._line) :]
                elif line:
                    tokens = self._tokenize([text], as_text).input_ids[0]
                found[i] = tokens
        following = iter(sorted(found.items()))
        return [self._finish(draft, [next(following)[1] for _ in draft.parts]) for draft in drafts]

    def _tokenize(self, texts, as_text):
        options = dict(add_special_tokens=False, return_attention_mask=False)
        options["verbose"] = False  # it would warn of texts that are longer than a model can read
        return self.tokenizer(texts, split_special_tokens=as_text, **options)

    def _finish(self, draft, encoded):
        """The document of a draft, the parts of which are `encoded` as these tokens."""
        for part, tokens in zip(draft.parts, encoded, strict=True):
            if part.as_text:
                self._check(part.text, tokens, draft.where)
        if draft.is_text:
            return self._finish_text(draft, encoded[0])
        tokens, learned, answer, ended = self._bos if draft.begins else [], [], -1, True
        for is_answer, some in itertools.groupby(
            zip(draft.parts, encoded, strict=True), lambda pair: pair[0].is_answer
        ):
            before, tokens = len(tokens), [*tokens, *itertools.chain(*(inner for _, inner in some))]
            learned += [False] * (before - len(learned))
            if is_answer:
                answer, (end, ended) = before, self._end(tokens, before)
                learned += [True] * (end - before)
        learned += [False] * (len(tokens) - len(learned))
        if draft.ends or not ended:
            tokens, learned = tokens + self._eos, learned + [True] * len(self._eos)
        is_target = np.array(learned, np.uint8) | np.uint8(self.loss_on == ALL)
        return Document(np.array(tokens, np.int32), is_target, answer)

    def _finish_text(self, draft, tokens):
        text = draft.parts[0].text
        before, after = self._bos if draft.begins else [], self._eos if draft.ends else []
        size = len(text.encode())
        if draft.begins and not before:
            size -= self._first_bytes(text)
        whole = np.array([*before, *tokens, *after], np.int32)
        return Document(whole, None, -1, size, draft.begins)

    def _first_bytes(self, text):
        """The bytes of the first token of a text."""
        head = text[: len(text) - len(text.lstrip()) + 100]  # some tokenizers drop what is blank
        encoded = self._tokenize([head], True)
        if not encoded.encodings:  # a tokenizer written in Python does not say where its tokens are
            return len(self.tokenizer.decode(encoded.input_ids[0][:1]).encode())
        offsets = encoded.encodings[0].offsets
        if not offsets:  # nothing but what is blank
            return 0
        # A character of several bytes may be several tokens, all with its place.
        others = sum(offset == offsets[0] for offset in offsets[1:4])
        return len(text[: offsets[0][1]].encode()) - others

    def _check(self, text, tokens, where):
        """Raises UserError if a name of a special token in a text has become that token."""
        if not self._name.search(text):
            return
        found = np.intersect1d(tokens, self._special)
        found = found[found != self.tokenizer.unk_token_id]
        if len(found):
            name = self.tokenizer.convert_ids_to_tokens(int(found[0]))
            raise UserError(
                f"{where} contains {name}, which this tokenizer cannot tell from its special "
                "token: remove it"
            )

    def _end(self, tokens, start):
        """Where an answer that begins at `start` ends; and whether a token says so.

        That is an added token such as <|im_end|>; templates follow it with a line break.
        """
        ends = self._ends if self.chat_template else self._special
        added = np.flatnonzero(np.isin(tokens[start:], ends))
        end = start + int(added[-1]) + 1 if len(added) else start
        if len(added) and not self.tokenizer.decode(tokens[end:]).strip():
            return end, True
        return len(tokens), False


def _is_empty(message):
    return not (message["content"] or "").strip() and not message.get("tool_calls")


def _without_clock(template):
    """A template with `TODAY` in place of the date that it asks for."""
    return CLOCK.sub(lambda call: json.dumps(TODAY.strftime(call[2])), template)


def check_unicode(text, where):
    """Raises UserError for half of a pair, as in "\\ud800"; `where` names the row."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} is not valid Unicode") from None


def pad_id_of(tokenizer):
    """The token that fills up blocks and batches: that for padding, or else the end, or else 0."""
    choices = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
    return next(token for token in choices if token is not None)
