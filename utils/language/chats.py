"""Checks conversations, renders them by a chat template, and finds which parts are answers.

Answers are the turns of the role `assistant`, or the completion, each with the token that ends it.
They are found by rendering: the messages before an answer, with what asks for one
(`add_generation_prompt`), and then the messages up to the answer. The first text must be the
beginning of the second; the rest is what the model writes when it is used. Few templates have the
marks `{% generation %}`, with which this would be simpler.

A template may render earlier turns differently when others follow; some drop the reasoning. The
conversation then becomes several documents, each of which is what the model reads and writes at
that turn. The date in a template is always `TODAY`: the same data gives the same tokens every day.
"""

import datetime
import functools
import itertools
import json
import re
from typing import NamedTuple

from utils.language.rows import check_unicode
from utils.run.failures import UserError

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
            together (bool): all messages are one document, of which only the last answer counts.

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
            chains = [self._whole(messages, tools, where)]
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

    def _whole(self, messages, tools, where):
        """As an element of `_chains`, with all messages, of which only the last answer is one."""
        whole = self._render(messages, False, tools, where)
        answers = [n for n, message in enumerate(messages) if n and message["role"] == "assistant"]
        if answers:
            prompt = self._render(messages[: answers[-1]], True, tools, where)
            if whole.startswith(prompt):
                return [(prompt, False), (whole[len(prompt) :], True)]
        return [(whole, False)]

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
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools or None
    except ValueError:
        raise UserError(f"the tools of {where} are not JSON") from None
    if not isinstance(tools, list | None):
        raise UserError(f"the tools of {where} are not a list")
    return tools or None
