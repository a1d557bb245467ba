"""The errors that end a run, with one-line messages, also for well-known errors of libraries.

Imports only the standard library, because `process` needs it before torch is imported.
"""

import contextlib
import errno
import json
import os
import re
import time
import traceback

from utils.run.output import one_line

# Parts of a path in which no code of a project is.
LIBRARIES = (f"{os.sep}site-packages{os.sep}", os.path.dirname(os.__file__) + os.sep, "<")


class UserError(Exception):
    """Invalid input that the user can correct: one line, and exit code 2.

    Args:
        line (str): what is wrong, and what to do; control characters in it are escaped.
        rank_variable (str | None): the process for which this environment variable is 0 prints the
            message. RANK: every process raises this error. LOCAL_RANK: every process of one machine
            does. None: only this process does, and prints it.
    """

    def __init__(self, line, rank_variable="RANK"):
        super().__init__(one_line(line))
        self.rank_variable = rank_variable


class RunFailed(UserError):
    """The run cannot continue (for example, the loss is not finite): one line, and exit code 1.

    Whether the same command may succeed when it is run again is `retry` (bool); `more` (str) is too
    long for the line: only the run's `status.json` has it.
    """

    def __init__(self, line, rank_variable="RANK", retry=True, more=""):
        super().__init__(line, rank_variable)
        self.retry, self.more = retry, more


class Unexpected(RuntimeError):
    """An unexpected error of one process, raised on all of them: its headline and its traceback."""

    def __str__(self):
        return self.args[0]


class LostContact(TimeoutError):
    """Another process, or the device, did not answer within `--timeout`."""


def report_to_launcher(line):
    """Writes the reason of this process's end for the report of the launcher."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # Without this file, the report only lacks the reason.
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": line, "timestamp": str(int(time.time()))}, file)


def headline(error):
    """The type of an error, and the first line of its text."""
    if isinstance(error, Unexpected):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")


def short_traceback(error):
    """The traceback of an error, without the frames inside libraries but the last one."""
    if isinstance(error, Unexpected):
        return error.args[1]
    report = part = traceback.TracebackException.from_exception(error)
    while part:
        ours = [frame for frame in part.stack[:-1] if not in_library(frame.filename)]
        part.stack[:] = [*ours, *part.stack[-1:]]
        part = part.__cause__ or part.__context__
    return "".join(report.format())


def in_library(path):
    """Whether a file (str) is of Python or of a package, and not of a project."""
    return any(part in path for part in LIBRARIES)


def describe(error):
    """A one-line message for an error whose traceback would not help the user, or None.

    Decides by the type of the error and by where it was raised. The text alone never decides:
    an HTTP client also says "timed out".
    """
    for check in (_out_of_memory, _full_disk, _not_deterministic):
        line = check(error)
        if line:
            return line
    if is_lost_contact(error):
        return _lost_contact(error)
    if _is_distributed(error) and "NCCL" in str(error):
        # The last line says what happened; the first says where in PyTorch.
        last = [line for line in str(error).splitlines() if line.strip()][-1].strip()
        return f"rank {rank()}: NCCL: {last}"
    return None


def may_pass(error):
    """Whether the same command may succeed when it is run again. Most errors only come again."""
    return bool(_full_disk(error) or is_lost_contact(error) or _is_distributed(error))


def is_lost_contact(error):
    """Whether a collective or the rendezvous failed because another process ended or hangs."""
    if "RANK" not in os.environ:
        return False
    if isinstance(error, LostContact):
        return True
    return _is_distributed(error) and bool(re.search(f"{ENDED}|{TIMED_OUT}", str(error)))


# How gloo, NCCL and the store of torch.distributed name the two cases.
ENDED = "Connection closed by peer|Connection reset|Broken pipe|Connection refused|failed to recv"
TIMED_OUT = "[Tt]imed out|[Ww]ait timeout"


def _is_distributed(error):
    """Whether torch.distributed raised an error: by its type, or by the source line of gloo."""
    if any(base.__name__ == "DistError" for base in type(error).__mro__):
        return True
    # A collective that ends in the background raises from wherever its result is awaited.
    return type(error) is RuntimeError and bool(re.match(r"\[\S*\bgloo\b\S*:\d+\]", str(error)))


def _lost_contact(error):
    text = str(error).partition("GLHF")[0]  # how gloo ends the advice that follows its reason
    reason = re.sub(r"^\[\S+:\d+\] ", "", text.splitlines()[0]).partition(". This is ")[0]
    why = "and waited for it longer than --timeout (to learn where it hangs: utils/README.md)"
    if re.search(ENDED, text):
        why = "which has ended (the launcher's report names it; exit code -9: mostly out of memory)"
    return f"rank {rank()} lost contact with another process, {why}: {reason}"


def _out_of_memory(error):
    text = str(error)
    if not (
        type(error).__name__ == "OutOfMemoryError"
        or isinstance(error, MemoryError)
        or (type(error) is RuntimeError and "DefaultCPUAllocator: can't allocate memory" in text)
    ):
        return None
    return (
        f"rank {rank()} ran out of memory. To use less, cheapest first: a larger "
        "--gradient_accumulation_steps, mixed_precision: bf16, --activation_checkpointing, "
        "an FSDP configuration, a smaller --batch_size or model "
        f"({text.splitlines()[0] if text else 'MemoryError'})"
    )


def full_disk(error):
    """The error, or that from which it was raised, that says that a disk is full; None: neither."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if type(error).__name__ == "SafetensorError":  # has no errno
        full = f"(os error {errno.ENOSPC})" in str(error)
    return error if full or error is None else full_disk(error.__cause__)


def _full_disk(error):
    error = full_disk(error)
    if error is None:
        return None
    return (
        f"rank {rank()}: the disk is full: free some space, then run the same command again "
        f"({str(error).splitlines()[0]})"
    )


def _not_deterministic(error):
    match = re.match(r"(.+?) does not have a deterministic implementation", str(error))
    if not (match and type(error) is RuntimeError):
        return None
    return (
        f"rank {rank()}: {match[1]} has no deterministic algorithm on GPUs, so restarts would not "
        "be exact: replace it, or give --nondeterministic"
    )


def rank():
    """The rank of this process, as text; works before torch is imported."""
    return os.environ.get("RANK", "0")
