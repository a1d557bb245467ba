"""What `evaluate.py` and the tools have in common: tables, and the folder of their output."""

import contextlib
from pathlib import Path

from utils.run.failures import UserError


def columns(rows):
    """Formats rows of strings as lines of text with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (zip(row, widths, strict=True) for row in rows)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in lines
    )


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
