"""What `utils.run.output` does where standard output cannot be written."""

import os
import sys

import pytest

from utils.run import output


@pytest.fixture
def protected(monkeypatch):
    """Standard output and error are restored after the test, with their descriptors."""
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    kept = [os.dup(number) for number in range(3)]
    yield output.protect
    for name in ("stdout", "stderr"):
        getattr(sys, name).flush()
    for number, copy in enumerate(kept):
        os.dup2(copy, number)
        os.close(copy)


def direct(number, path):
    target = os.open(path, os.O_RDWR | os.O_CREAT)
    os.dup2(target, number)
    os.close(target)


def test_each_line_is_written_at_once_and_to_its_own_stream(protected, tmp_path):
    for number, name in ((1, "out"), (2, "err")):
        direct(number, tmp_path / name)
    protected()
    print("a line")
    print("a warning", file=sys.stderr)
    assert (tmp_path / "out").read_text() == "a line\n"
    assert (tmp_path / "err").read_text() == "a warning\n"
    assert sys.__stdout__ is sys.stdout and sys.__stderr__ is sys.stderr


def test_what_was_printed_before_comes_first(protected, tmp_path, monkeypatch):
    direct(1, tmp_path / "out")
    stream = open(1, "w", closefd=False)  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stream)
    print("before")
    protected()
    print("after")
    assert (tmp_path / "out").read_text() == "before\nafter\n" and not stream.closed


def test_the_descriptors_stay_open_when_a_stream_goes(protected, tmp_path):
    direct(1, tmp_path / "out")
    protected()
    protected()  # drops the first streams
    print("a line")
    assert (tmp_path / "out").read_text() == "a line\n"


def test_quotation_marks_are_no_markup():
    assert output.for_markdown("\"a\" 'b'") == "\"a\" 'b'"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", None])
def test_letters_that_the_encoding_lacks_are_escaped(encoding, protected, tmp_path, monkeypatch):
    direct(1, tmp_path / "out")
    stream = open(1, "w", encoding=encoding, closefd=False) if encoding else None  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stream)
    protected()
    print("é\udce9")
    assert sys.stdout.encoding == (encoding or "utf-8")
    assert (tmp_path / "out").read_text() == ("\\xe9" if encoding == "ascii" else "é") + "\\udce9\n"


def test_what_cannot_be_written_is_dropped(protected):
    direct(1, "/dev/full")
    protected()
    print("long" * 100_000)
    print("é")
    sys.stdout.flush()
    with output._DroppingFile("/dev/full", "wb") as file:
        assert file.write(memoryview(b"12345678").cast("i")) == 8  # bytes, not numbers


def test_descriptors_that_are_closed_are_taken(protected):
    """The next file to be opened would get the number of standard output, and what is printed."""
    for number in range(3):
        os.close(number)
    protected()
    assert [os.readlink(f"/proc/self/fd/{number}") for number in range(3)] == ["/dev/null"] * 3
    os.write(1, b"dropped")
    os.write(2, b"dropped")
