"""Finds the documents of a data set for a language model: conversations, prompts or texts.

Those of `synthetic` are made by rule: dates in words, to be written in ISO 8601. A pretrained model
knows the words of dates but not the task; thousands of examples teach it.
"""

import calendar
import contextlib
import datetime
import mmap
import os
import random

from utils.data.loaders import sample_seed
from utils.language.rows import Rows, Table, open_rows, reading
from utils.run.failures import UserError

SEGMENT = 250_000  # bytes of a text that are tokenized at once, at most
FILE_SEGMENTS, SHORTEST = 100, 1000  # of a file that is not very short; bytes of one, about
KINDS = {"messages": ("messages",), "prompt": ("prompt", "completion"), "text": ("text",)}
USED = (("train",), ("val", "test"))
WANTED = "messages (role and content), prompt and completion, or text"


def find_documents(name, settings, *, streaming=False):
    """Finds the documents of a data set, as a `Table`. Its columns decide of which kind they are.

    If it has a split `val`, or else `test`, that is held out; otherwise a part of `train` is to be.

    Args:
        name (str): a Hub id, a file or folder, or `synthetic`. A file of text is one document.
        settings (TokenSettings): `subset`; `seed` of `synthetic`.
        streaming (bool): rows are read as they are needed.

    Raises:
        UserError: they cannot be found or read, or have no columns of a known kind.
    """
    if name == "synthetic" and not streaming:
        splits, seed = make_conversations(settings.seed), settings.seed
        for split, rows in splits.items():
            where = f"--dataset synthetic ({split})"
            splits[split] = Rows(rows, where, f"{split} of dates {seed}")
        return Table(splits, "messages", [])
    options = dict(use=USED, subset=settings.subset, streaming=streaming)
    try:
        return open_rows(name, KINDS, WANTED, **options)
    except UserError as error:
        if "Config name is missing" not in str(error):
            raise
        line = f"--dataset {name} has several subsets: give --subset, one of those on its page"
        raise UserError(line) from None


# ------------------------------------------------------------------------------------ plain text


def read_segments(path):
    """Yields the text of a file in segments. Raises UserError if it cannot be read."""
    with reading(path), contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        size = os.path.getsize(path)
        if size:  # else it cannot be mapped
            data = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            yield from segments(data, min(SEGMENT, max(SHORTEST, size // FILE_SEGMENTS)))


def segments(data, size):
    """Yields a text in segments of about `size` bytes that end with a line, if they can.

    Args: data: the bytes of the text, or a map of them.
    """
    start = 0
    for place in range(size, len(data), size):
        end = _end_of_segment(data, start, place)
        yield _decode(data, start, end)
        start = end
    yield _decode(data, start, len(data))


def _end_of_segment(data, start, place):
    """A place after a line, or else before a word, or else between characters."""
    line = data.rfind(b"\n", start, place)
    if line >= 0:
        return line + 1
    blank = data.rfind(b" ", start + 1, place)
    if blank >= 0:
        return blank
    while place < len(data) and data[place] & 0xC0 == 0x80:
        place += 1
    return place


def _decode(data, start, stop):
    return data[start:stop].decode("utf-8" if start else "utf-8-sig")


# ------------------------------------------------------------------------------------- synthetic

COUNT, HELD_OUT = 4000, 200  # conversations
FIRST, LAST = datetime.date(1600, 1, 1), datetime.date(2099, 12, 31)
SYSTEM = "Write each date as YYYY-MM-DD. Answer with the date only."
QUESTIONS = (
    "{}",
    "Which date is {}?",
    "Write {} as an ISO date.",
    "Please convert {} to ISO 8601.",
    "What is {} in digits?",
)
FOLLOW_UPS = ("And {}?", "Now {}.", "{}", "What about {}?")
ONES = (
    *"zero one two three four five six seven eight nine ten eleven twelve".split(),
    *"thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split(),
)
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINALS = {
    **dict(one="first", two="second", three="third", five="fifth", eight="eighth", nine="ninth"),
    **dict(twelve="twelfth", twenty="twentieth", thirty="thirtieth"),
}


def number_in_words(number):
    """A number from 0 to 99, as in `forty-two`."""
    if number < 20:
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens] + (f"-{ONES[ones]}" if ones else "")


def ordinal_in_words(number):
    """A number from 1 to 99, as in `forty-second`."""
    tens, dash, last = number_in_words(number).rpartition("-")
    return tens + dash + ORDINALS.get(last, f"{last}th")


def ordinal(number):
    """A number from 1 to 99, as in `42nd`."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number in (11, 12, 13) else ending}"


def year_in_words(year):
    """A year from 1600 to 2099, as in `nineteen ninety-four`, `nineteen oh five`."""
    century, rest = divmod(year, 100)
    if year // 10 == 200:
        return "two thousand" + (f" and {ONES[rest]}" if rest else "")
    if rest == 0:
        return f"{number_in_words(century)} hundred"
    zero = "oh " if rest < 10 else ""
    return f"{number_in_words(century)} {zero}{number_in_words(rest)}"


def date_in_words(date, rng):
    """One of several ways to say a date."""
    month, day, year = calendar.month_name[date.month], date.day, year_in_words(date.year)
    return rng.choice(
        (
            f"the {ordinal_in_words(day)} of {month}, {year}",
            f"{month} the {ordinal_in_words(day)}, {year}",
            f"the {ordinal(day)} of {month} {date.year}",
            f"{month} {ordinal(day)}, {date.year}",
            f"{day} {month[:3]} {year}",
            f"{month} {day}, {year}",
        )
    )


def make_conversations(seed):
    """Makes conversations about dates that are all different.

    A third have a system turn, a third have two questions.

    Args:
        seed (int): the same seed gives the same conversations on every machine.

    Returns:
        dict[str, list]: `train` and `val`, which share no date: dicts with `messages`.
    """
    rng = random.Random(sample_seed(seed, 0, 0))
    days = rng.sample(range((LAST - FIRST).days + 1), 2 * (COUNT + HELD_OUT))
    conversations = []
    for index in range(COUNT + HELD_OUT):
        messages = [dict(role="system", content=SYSTEM)] if rng.random() < 1 / 3 else []
        asked = days[2 * index : 2 * index + 1 + (rng.random() < 1 / 3)]
        for turn, day in enumerate(asked):
            date = FIRST + datetime.timedelta(day)
            question = rng.choice(FOLLOW_UPS if turn else QUESTIONS)
            messages += [
                dict(role="user", content=question.format(date_in_words(date, rng))),
                dict(role="assistant", content=date.isoformat()),
            ]
        conversations.append(dict(messages=messages))
    return {"train": conversations[:COUNT], "val": conversations[COUNT:]}
