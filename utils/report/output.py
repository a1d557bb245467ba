"""What scripts and tools write besides results: extras, tables, and the folder of their output."""

import contextlib
from pathlib import Path

from utils.run.failures import UserError
from utils.run.output import one_line, warn


@contextlib.contextmanager
def optional(what):
    """A block that writes `what` (str): an error costs that and a warning, not the run."""
    try:
        yield
    except Exception as error:
        reason = one_line(str(error).strip() or type(error).__name__)
        warn(f"{what} is missing ({type(error).__name__}: {reason})")


def columns(rows):
    """Formats rows of strings as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@contextlib.contextmanager
def writing_to(folder):
    """Makes the folder of a script's output, and yields its path.

    Raises:
        UserError: an OSError in the block, as one line.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write to {folder}: {reason}; give another --output_dir") from None
