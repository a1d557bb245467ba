"""What a run writes besides its results: an error in it is only a warning."""

import contextlib
import sys

from utils.run.output import one_line


@contextlib.contextmanager
def optional(what):
    """A block that writes `what` (str): an error costs that and a warning, not the run."""
    try:
        yield
    except Exception as error:
        reason = one_line(str(error).strip() or type(error).__name__)
        line = f"warning: {what} is missing ({type(error).__name__}: {reason})"
        print(line, file=sys.stderr, flush=True)
