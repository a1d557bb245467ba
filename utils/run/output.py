"""Standard output that never ends a run, and text from outside that never controls a terminal.

Imports only the standard library: it comes before torch.
"""

import io
import os
import re
import sys


class _DroppingFile(io.FileIO):
    """A file descriptor whose write errors are ignored: what cannot be written is dropped."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError:  # no reader, a full disk, a closed terminal
            return memoryview(data).nbytes


def protect():
    """Replaces standard output and error: whatever cannot be printed is dropped.

    The reader may have exited (`| head`), the disk may be full, or the terminal may be gone.
    Metrics are in metrics.jsonl anyway. Letters that the encoding lacks are printed as escapes.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: without this, the next file to be opened would get its number
            os.open(os.devnull, os.O_RDWR)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None:
            stream.flush()
        raw = _DroppingFile(descriptor, "wb", closefd=False)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding,
            errors="backslashreplace",
            line_buffering=True,  # so that a log file shows every line at once
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


# Control characters, the marks that change the direction of text, and halves of surrogate pairs.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def one_line(text):
    """Escapes what a terminal would obey, such as ESC or a newline: `\\x1b`, `\\n`."""
    return _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], str(text))


def warn(text):
    """Prints a warning."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def notice(text):
    """Prints a line that stands out."""
    print(f"*** {text} ***", file=sys.stderr, flush=True)


def plural(count, noun):
    """A number with its noun: `1 process`, `2 processes`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"
