"""Runs the `main` of a script: turns errors into one line and an exit code."""

import faulthandler
import gc
import os
import signal
import sys

from utils.run import failures, process
from utils.run.failures import RunFailed, UserError


def run(main, explain=lambda error: None):
    """Calls `main()` and ends the process.

    Exit codes: 0 done, 1 failed, 2 invalid input, `PREEMPTED` stopped by a signal. An error is
    printed once, by one process, and appears in the final report of the launcher.

    Args: explain: turns an error that only its module knows into a `UserError`; None for others.
    """
    faulthandler.enable()  # prints the stacks if a library crashes
    gc.freeze()  # excludes what the imports created from garbage collection
    gc.enable()
    try:
        if process.state.refusal:
            raise process.state.refusal
        main()
        process.main_ends()
    except SystemExit as error:
        if error.code == process.PREEMPTED:
            failures.report_to_launcher("stopped by a signal, as asked")
            _exit(process.PREEMPTED)  # at once: Python would wait for a loader worker that is stuck
        if not error.code:
            raise
        if isinstance(error.code, str):
            _end_with_message(RunFailed(error.code, retry=False))
        _exit(error.code)
    except process.Interrupted:
        process.exit_at_once(" in an evaluation, which the restart repeats")
    except Exception as error:
        # If a loader worker died, PyTorch's handler of this signal may otherwise raise while the
        # error is formatted.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        error = explain(error) or error
        if isinstance(error, UserError):
            _end_with_message(error)
        _end_with_failure(error)


def _end_with_message(error):
    line = str(error)
    failures.report_to_launcher(line)
    if error.rank_variable and int(os.environ.get(error.rank_variable, 0)) != 0:
        process.wait_for_launcher(10)  # rank 0 prints the same error
    else:
        print(f"error: {line}", file=sys.stderr, flush=True)
        _record(line + getattr(error, "more", ""), getattr(error, "retry", False))
    _exit(1 if isinstance(error, RunFailed) else 2)


def _end_with_failure(error):
    line, retry = failures.describe(error), failures.may_pass(error)
    if line is None:
        process.print_uncaught(error)
        _record(f"{failures.headline(error)}\n{failures.short_traceback(error)}", retry)
    elif failures.is_lost_contact(error):
        # Only the first of the processes that lost contact prints it.
        _record(line, retry, before=f"error: {line}")
        process.wait_for_launcher(5)
    else:
        _end_with_message(RunFailed(line, None, retry))
    _exit(1)


def _record(line, retry, before=None):
    """Records why the run failed; if no process did so before, says what else there is to say."""
    first, more = True, []
    if process.state.failed:
        try:
            first, more = process.state.failed(line, retry)
        except (OSError, UserError) as error:  # for example because the disk is full
            more = [f"warning: the run's status was not written: {error}"]
    if before:
        failures.report_to_launcher("; ".join([line, *more]))
        more = [before, *more]
    if first:
        print("".join(f"{text}\n" for text in more), end="", file=sys.stderr, flush=True)


def _exit(code):
    sys.stdout.flush()
    process.finish_writing(process.SAVE_SECONDS)
    # Not sys.exit: the destructor of a process group may wait forever for processes that exited.
    os._exit(code)
