"""A process that the tests start by `fork` begins and ends as one started by `exec`."""

import json

import pytest
from harness.launches import run

# Variables that differ between launches: ports, run ids, error files. (_ is set by the shell,
# PADDING by the server.)
OF_ONE_LAUNCH = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PADDING", "_"}
LATE = "lambda: (time.sleep(0.1), print('some words'))"


@pytest.mark.slow
def test_a_forked_process_starts_in_the_same_state_as_an_executed_one(tmp_path):
    """Each of two that a launcher starts."""
    states = {}
    for cold in (False, True):
        out = tmp_path / ("cold" if cold else "warm")
        out.mkdir()
        words = [str(out), "--flag", "a word  with  spaces"]
        run("2cpu", "tests/harness/probe_start.py", words, cold=cold)
        texts = {file.name: file.read_text().replace(str(out), "OUT") for file in out.iterdir()}
        states[cold] = {name: json.loads(text) for name, text in texts.items()}
    assert states[True].keys() == states[False].keys() and len(states[True]) == 2
    for rank, executed in states[True].items():
        forked = states[False][rank]
        for kind in ("environment", "environment in /proc"):
            for name in OF_ONE_LAUNCH:
                alike = (name in executed[kind]) == (name in forked[kind])
                assert alike or name == "PADDING"
                executed[kind].pop(name, None), forked[kind].pop(name, None)
        for fact in executed:
            assert forked[fact] == executed[fact], fact
        assert executed["modules of this project"] == []


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("import sys; sys.exit(3)", 3),
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
