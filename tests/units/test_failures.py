"""What `utils.run.failures` makes of errors, and to whom it tells them."""

import errno
import json
import pickle

import pytest
import torch

from utils.run import failures
from utils.run.failures import LostContact, RunFailed, UserError


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)


def test_an_error_says_who_prints_it_and_whether_to_try_again():
    for kind in (UserError, RunFailed):
        assert kind("a\nb").rank_variable == "RANK" and str(kind("a\nb")) == r"a\nb"
        assert kind("a", None).rank_variable is None
        assert kind("a", rank_variable="LOCAL_RANK").rank_variable == "LOCAL_RANK"
    assert (RunFailed("a").more, RunFailed("a").retry) == ("", True)
    assert RunFailed("a", retry=False, more="b").retry is False
    # A data loader worker sends its error to the training process as its text.
    again = pickle.loads(pickle.dumps(UserError("a\x1b")))
    assert str(again) == r"a\x1b" and again.rank_variable == "RANK"


def test_the_report_of_the_launcher_has_the_line(tmp_path, monkeypatch):
    failures.report_to_launcher("no file asked for")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    (tmp_path / "error.json").write_text("a traceback " * 100)
    monkeypatch.setattr(failures.time, "time", lambda: 1234.9)
    failures.report_to_launcher("the loss is nan")
    report = {"message": "the loss is nan", "timestamp": "1234"}
    assert json.loads((tmp_path / "error.json").read_text()) == report
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    failures.report_to_launcher("the folder is gone")


WATCHDOG = "to learn where it hangs: utils/README.md"
GLOO = "[/src/gloo/transport/tcp/pair.cc:544] "
ADVICE = ". This is usually due to a failure. Connection refused GLHF, read timed out\nmore"
LOST = "rank 1 lost contact with another process, "
ENDED = (
    f"{LOST}which has ended (the launcher's report names it; exit code -9: mostly out of memory): "
)
WAITED = f"{LOST}and waited for it longer than --timeout ({WATCHDOG}): "
CLOSED = "Connection closed by peer [::1]:4"
NCCL = "NCCL error in: /src/NCCLUtils.cpp:93, invalid usage\nLast error:\n Duplicate GPU\n\n"
HISTC = "_histc_cuda with floating point input"
NONE = f"{HISTC} does not have a deterministic implementation, but you set 'torch.use"
ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you"
FULL = "rank 1: the disk is full: free some space, then run the same command again "
MEMORY = "rank 1 ran out of memory. To use less, cheapest first: a larger --gradient_accum"
DIST = torch.distributed


class SafetensorError(Exception):
    pass


# The error, the start (… and the end) of its line, and whether the same command may succeed.
@pytest.mark.parametrize(
    ("error", "line", "passes"),
    [
        # Lost contact is decided by the type of the error.
        (RuntimeError(f"{GLOO}{CLOSED}{ADVICE}"), f"{ENDED}…: {CLOSED}", True),
        (
            RuntimeError(f"{GLOO}Timed out waiting 1 s\nfor recv"),
            f"{WAITED}…: Timed out waiting 1 s",
            True,
        ),
        (DIST.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0"), WAITED, True),
        (LostContact("timed out waiting for the device"), WAITED, True),
        (RuntimeError(f"{GLOO}anything"), None, True),
        (ValueError(f"{GLOO}{CLOSED}"), None, False),
        (TimeoutError("timed out"), None, False),  # of an HTTP client, say
        # NCCL says what happened in its last line, and before it where.
        (DIST.DistBackendError(NCCL), "rank 1: NCCL: Duplicate GPU", True),
        (RuntimeError(NCCL), None, False),
        # A full disk is told by its number.
        (OSError(errno.ENOSPC, "No space\nmore"), f"{FULL}([Errno {errno.ENOSPC}] No space)", True),
        (SafetensorError("I/O error: No space left on device (os error 28)"), FULL, True),
        (OSError(errno.EACCES, "No space left on device"), None, False),
        # What is not deterministic is named, with the way out.
        (RuntimeError(NONE), f"rank 1: {HISTC} has no det…give --nondeterministic", False),
        (ValueError(NONE), None, False),
        # Memory
        (torch.OutOfMemoryError("CUDA out. Tried\nmore"), f"{MEMORY}…(CUDA out. Tried)", False),
        (MemoryError(), f"{MEMORY}…(MemoryError)", False),
        (RuntimeError(f"{ALLOCATOR}\nmore"), f"{MEMORY}…({ALLOCATOR})", False),
        (ValueError(ALLOCATOR), None, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_a_known_error_is_one_line_and_may_pass_or_not(error, line, passes):
    said = failures.describe(error)
    if line is None:
        assert said is None
    else:
        start, _, end = line.partition("…")
        assert said.startswith(start) and said.endswith(end) and "\n" not in said
    assert failures.may_pass(error) is passes


def test_a_cause_counts_and_an_error_that_was_handled_does_not():
    first, second, third = OSError(errno.ENOSPC, "full"), KeyError("2"), ValueError("3")
    second.__context__, third.__context__, third.__cause__ = first, EOFError("no"), second
    assert failures.describe(third) is None  # the full disk was handled
    second.__cause__ = first  # `raise ... from error`
    assert failures.describe(third) == failures.describe(first) and failures.may_pass(third)


def test_a_short_traceback_has_the_frames_of_the_project_and_the_last_one():
    """Of each error in a chain; how an error is called is its type and its first line."""

    def read():
        json.loads("{")

    def fail():
        try:
            read()
        except ValueError as error:
            raise RuntimeError("it failed\nfor a reason") from error

    with pytest.raises(RuntimeError) as raised:
        fail()
    text = failures.short_traceback(raised.value)
    first, second = text.split("\nThe above exception was the direct cause")
    frames = [line.split(", in ")[1] for line in first.splitlines() if line.startswith("  File")]
    assert frames == ["fail", "read", "raw_decode"] and "decoder.py" in first
    frames = [line.split(", in ")[1] for line in second.splitlines() if line.startswith("  File")]
    assert frames[1:] == ["fail"] and len(frames) == 2
    assert text.endswith("RuntimeError: it failed\nfor a reason\n")
    assert failures.headline(raised.value) == "RuntimeError: it failed"
    assert failures.headline(KeyError()) == "KeyError"
    told = pickle.loads(pickle.dumps(failures.Unexpected("ValueError: odd", "a traceback")))
    assert (failures.headline(told), failures.short_traceback(told)) == (str(told), "a traceback")
    assert failures.in_library(json.__file__) and failures.in_library(torch.__file__)
    assert not failures.in_library(__file__) and failures.in_library("<frozen runpy>")
