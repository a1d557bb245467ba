"""Arguments from files: `@FILE` on a command line stands for the flags in it."""

import shlex
from pathlib import Path

from utils.run.domains import shown
from utils.run.failures import UserError


def expand(words, flags):
    """Replaces each `@FILE` by the arguments in it, where a flag could be; not where a value is.

    Args:
        words (list[str]): a command line. What follows `--` stays as it is.
        flags (dict): the flags, such as `--lr`, each with its action of argparse.

    Raises:
        UserError: a file cannot be read, or a line of it is not a flag and its value.
    """
    expanded, values = [], 0  # values that the last flag still needs
    for place, word in enumerate(words):
        if word == "--":
            return expanded + words[place:]
        if values == 0 and word.startswith("@"):
            expanded += _read(word[1:])
            continue
        values = _needed(flags[word]) if word in flags else max(0, values - 1)
        expanded.append(word)
    return expanded


def _needed(action):
    """How many words that follow a flag are certainly its values."""
    if isinstance(action.nargs, int):
        return action.nargs
    return 1 if action.nargs in (None, "+") else 0


def _split(line):
    """The words of a line, as in a shell: a # begins a comment only where a word could begin."""
    lexer, words = shlex.shlex(line, posix=True), []
    lexer.whitespace_split, lexer.commenters = True, ""
    while not line[lexer.instream.tell() :].lstrip().startswith("#"):
        word = lexer.get_token()
        if word is None:
            break
        words.append(word)
    return words


def _read(name):
    """The arguments in a file. Each line has a flag and its value, quoted as in a shell."""
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the arguments in @{name}: {reason}") from None
    arguments = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = _split(line)
        except ValueError as error:
            raise UserError(f"@{name}, line {number}: {error}") from None
        if words and (words[0][:2] != "--" or any(word[:2] == "--" for word in words[1:])):
            raise UserError(
                f"@{name}, line {number}: must be one flag and its value, such as --lr 0.1, not "
                f"{shown(line.strip())}"
            )
        arguments += words
    return arguments
