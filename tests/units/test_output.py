"""What `utils.run.output` does where standard output cannot be written."""

import os
import sys

import pytest
from harness.worlds import in_forks

from utils.run import output


def direct(number, path, flags=os.O_RDWR | os.O_CREAT):
    target = os.open(path, flags)
    os.dup2(target, number)
    os.close(target)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", None])
def test_each_line_is_written_at_once_to_its_own_stream(encoding, tmp_path):
    """Letters that the encoding lacks are escaped."""

    def process(_rank):
        for number, name in ((1, "out"), (2, "err")):
            direct(number, tmp_path / name)
        sys.stdout = open(1, "w", encoding=encoding, closefd=False) if encoding else None  # noqa: SIM115
        print("before")
        output.protect()
        output.protect()  # drops the first streams; the descriptors stay open
        print("é\udce9")
        print("a warning", file=sys.stderr)
        assert sys.__stdout__ is sys.stdout and sys.__stderr__ is sys.stderr
        return sys.stdout.encoding, *((tmp_path / name).read_text() for name in ("out", "err"))

    shown = ("\\xe9" if encoding == "ascii" else "é") + "\\udce9\n"
    before = "before\n" if encoding else ""
    assert in_forks(process) == [(encoding or "utf-8", before + shown, "a warning\n")]


def test_what_cannot_be_written_is_dropped():
    def process(_rank):
        direct(1, "/dev/full")
        output.protect()
        print("long" * 100_000)
        print("é")
        sys.stdout.flush()
        # It counts bytes, not numbers.
        return sys.stdout.buffer.raw.write(memoryview(b"12345678").cast("i"))

    assert in_forks(process) == [8]


def test_descriptors_that_are_closed_are_taken(tmp_path):
    """The next file to be opened would get the number of standard output, and what is printed."""

    def process(_rank):
        for number in range(3):
            os.close(number)
        output.protect()
        os.write(1, b"dropped")
        os.write(2, b"dropped")
        return [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]

    assert in_forks(process) == [["/dev/null"] * 3]


def test_what_a_terminal_would_obey_is_escaped(capsys):
    assert output.one_line("a\n\x1b[2J\u202e\ud800é") == "a\\n\\x1b[2J\\u202e\\ud800é"
    output.notice("look")
    assert capsys.readouterr().err == "*** look ***\n"
