"""Who is waited for when a process ends, and who is told. (Launches show all else.)"""

import os

import pytest
from harness.launches import ROOT, run

from utils.run import entry, process
from utils.run.failures import RunFailed, UserError

# Stands for a tensor that a thread of gloo frees during Python's finalization.
ABORTS = f"""
import atexit, os, sys
sys.path.insert(0, {str(ROOT)!r})
from utils.run import entry, process
class Tensor:
    __del__ = lambda self, abort=os.abort: abort()
sys.tensor = Tensor()
process.handle_signals()
atexit.register(print, "one of a library", end="")
entry.run(lambda: print("done"))
"""


class Ended(Exception):
    pass


@pytest.fixture
def ends(monkeypatch):
    """`ends(error)`: what `entry.run` does with an error of `main`: its calls, and the exit code."""

    def run(error):
        def end(code):
            calls.append(code)
            raise Ended

        def main():
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "_exit", end)
            with pytest.raises(Ended):
                entry.run(main)
        return calls

    calls = []
    process.before_exit(lambda seconds: calls.append(("waits", seconds)))
    yield run
    process.before_exit(None)
    process.record_with(None)


def test_a_process_that_is_done_skips_finalization_and_no_exit_function(tmp_path):
    (tmp_path / "script.py").write_text(ABORTS)
    ended = run(None, "script.py", root=tmp_path, cold=True)
    assert ended.stdout == "done\none of a library" and not ended.stderr


@pytest.mark.parametrize(
    ("error", "code", "seconds"),
    [
        (SystemExit(process.PREEMPTED), 75, process.SAVE_SECONDS),
        (process.Interrupted(), 75, 29),
        (OSError("x"), 1, process.SAVE_SECONDS),
        (UserError("x"), 2, process.SAVE_SECONDS),
        (RunFailed("x"), 1, process.SAVE_SECONDS),
    ],
)
def test_a_process_ends_when_nothing_is_written(error, code, seconds, ends, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    assert ends(error) == [("waits", seconds), code]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), UserError("it is damaged")])
def test_a_status_that_cannot_be_written_costs_a_warning(error, ends, capfd):
    def record(reason, retry):
        raise error

    process.record_with(record)
    assert ends(OSError("x"))[-1] == 1
    warning = f"warning: the run's status was not written: {error}"
    assert capfd.readouterr().err.endswith(f"\nOSError: x\n{warning}\n")
