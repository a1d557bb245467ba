"""Conversations made by rule: dates in words, to be written in ISO 8601.

A pretrained model knows the words of dates but not the task; thousands of examples teach it.
"""

import calendar
import datetime
import random

from utils.data.permutation import sample_seed

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
