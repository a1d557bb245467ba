"""Checks the rows of a data set for a language model, and hands them to an encoder."""

import json

from utils.language.documents import KINDS, segments_of
from utils.language.rows import check_unicode
from utils.run.failures import UserError


def draft_row(row, encoder, kind, where):
    """The drafts of a row, or of the segments of its text; none if it is empty.

    Args:
        row (dict | None): with the columns of `kind`; None: an empty line.
        encoder (conversations.Encoder): makes the drafts.
        kind (str): see `documents.KINDS`.
        where (str): names the row, in messages.

    Raises:
        UserError: a column is missing or has another type, or the template refuses the row.
    """
    if row is None:
        return []
    columns = KINDS[kind]
    missing = [column for column in columns if column not in row]
    if missing:
        raise UserError(f"{where} has no column {missing[0]}")
    if any(row[column] is None for column in columns):
        return []
    if kind == "text":
        text = row["text"]
        if isinstance(text, str):
            check_unicode(text, where)
            text = segments_of(text)
        elif not hasattr(text, "__next__"):
            raise UserError(f"{where} has no text, but {type(text).__name__}")
        return encoder.draft_text(text, where)
    if kind == "messages":
        messages, first = check_messages(row["messages"], where), 0
    else:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            check_unicode(prompt + completion, where)
            return encoder.draft_completion(prompt, completion, where)
        prompt = check_messages(prompt, where)
        messages, first = prompt + check_messages(completion, where), len(prompt)
    tools = check_tools(row.get("tools"), where)
    return messages and encoder.draft_conversation(messages, where, first=first, tools=tools)


def check_messages(messages, where):
    """The messages of a row, checked.

    Returns:
        list[dict]: each with `role` (str) and `content`: str, also of a list of texts; None only
        next to `tool_calls`.

    Raises:
        UserError: they are something else; `where` names the row.
    """
    if not isinstance(messages, (list, tuple)):
        raise UserError(f"the messages of {where} are not a list, but {type(messages).__name__}")
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
        content = None if content is None else "".join(texts)
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
        raise UserError(f"the tools of {where} are not a list")
    return tools or None
