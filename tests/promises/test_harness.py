"""A process that the tests start by `fork` ends as one started by `exec`."""

import pytest
from harness.launches import run

LATE = "lambda: (time.sleep(0.1), print('some words'))"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("import sys; sys.exit('some words')", 1),
        ("raise ValueError('some words')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import atexit; atexit.register(print, 'some words')", 0),
        (f"import threading, time; threading.Thread(target={LATE}).start()", 0),
    ],
)
def test_a_forked_process_ends_as_an_executed_one_does(line, code, tmp_path):
    (tmp_path / "script.py").write_text(line)
    forked, executed = (
        run(None, "script.py", root=tmp_path, check=False, cold=cold) for cold in (False, True)
    )
    assert forked.returncode == executed.returncode == code
    assert forked.stdout == executed.stdout
    assert ("some words" in forked.stdout + forked.stderr) == ("some words" in line)
    assert forked.stderr.splitlines()[-1:] == executed.stderr.splitlines()[-1:]
