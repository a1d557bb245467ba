"""Starts Python programs by forking a process that has imported torch and the like: a tenth of a second, not four.

A server imports the libraries once and forks for every program that a test starts; the launchers among those programs
fork their own processes in turn. Only `exec` and the imports are left out: everything that `accelerate launch` and
torchelastic do (environment, sessions, signals, restarts) is done by their own code, on real processes with the parents,
arguments and environment that /proc shows of any other. `test_harness.py` holds such a process beside one that was
started by `exec`.

Nothing of this project is imported by the server, so a copied script finds its own `utils`.
"""

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ADDRESS = "WARM_SERVER"  # the environment variable that names the server's socket
TESTS = Path(__file__).resolve().parent
# Without them, /proc could not show a program's own arguments and environment in place of the server's.
ARGUMENT_BYTES, ENVIRONMENT_BYTES = 16_384, 65_536
HEAVY = [
    "torch._dynamo",
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "torchvision",
    "accelerate.commands.accelerate_cli",
    "datasets",
    "matplotlib.pyplot",
    "psutil",
    "pytest",
    "tqdm",
]


# ------------------------------------------------------------------------------------------------------- the tests' side


@contextlib.contextmanager
def server(environment):
    """Runs a server with `environment`; gives the address to set as `WARM_SERVER`."""
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder, "socket"))
        padding = {"PADDING": "x" * ENVIRONMENT_BYTES}
        process = subprocess.Popen(
            [sys.executable, __file__, address, "x" * ARGUMENT_BYTES],
            env=environment | padding,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for pytest
        )
        process.stdout.readline()  # it listens now; whoever asks waits until the libraries are imported
        try:
            yield address
        finally:
            process.stdin.close()
            process.wait()


class Program:
    """A program forked by the server, used as `subprocess.Popen` is: `pid`, `returncode`, `wait`.

    Args:
        words: arguments of Python: a script or `-m` and a module, and its arguments.
        stdout, stderr: open files.
    """

    def __init__(self, words, environment, stdout, stderr, cwd=None, start_new_session=False):
        self.args, self.returncode = words, None
        request = {"words": words, "environment": environment, "cwd": cwd or os.getcwd(), "session": start_new_session}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[ADDRESS])
        socket.send_fds(self._socket, [b"!"], [stdout.fileno(), stderr.fileno()])
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._socket.makefile("r")
        self.pid = int(self._answers.readline())

    def wait(self, timeout=None):
        """The exit code, or minus the signal that killed it. Raises TimeoutError."""
        if self.returncode is None:
            self._socket.settimeout(timeout)
            self.returncode = os.waitstatus_to_exitcode(int(self._answers.readline()))
            self._socket.close()
        return self.returncode

    def kill(self):
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def run(words, environment, timeout, cwd=None):
    """Like `subprocess.run([sys.executable, *words], ...)`, with all that was printed."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        program = Program(words, environment, stdout, stderr, cwd)
        try:
            program.wait(timeout)
        except TimeoutError:
            program.kill()
            raise
        finally:
            for file in (stdout, stderr):
                file.seek(0)
        return subprocess.CompletedProcess(words, program.returncode, stdout.read(), stderr.read())


# ------------------------------------------------------------------------------------------------------ the server's side


def serve(address):
    """Forks a program for every connection, until standard input ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("listening", flush=True)
    for name in HEAVY:
        importlib.import_module(name)
    subprocess._fork_exec = _fork_instead(subprocess._fork_exec)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the supervisors below
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _supervise(connection)
        connection.close()


def _supervise(connection):
    """Starts what is asked for, says its process id, waits for it, and says how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(connection, 1, 2)
    request = json.loads(connection.makefile("r").readline())
    pid = os.fork()
    if pid == 0:
        if request["session"]:
            os.setsid()
        _become(request["words"], request["environment"], request["cwd"], [os.open(os.devnull, os.O_RDONLY), *files])
    with contextlib.suppress(BrokenPipeError):  # whoever asked has gone
        connection.sendall(f"{pid}\n".encode())
        connection.sendall(f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def _fork_instead(fork_exec):
    """In place of what `subprocess.Popen` calls to fork and execute: a fork alone, if the program is this Python."""

    def fork(args, executables, close_fds, keep, cwd, environment, *rest):
        words = [os.fsdecode(word) for word in args]
        if words[0] != sys.executable or words[1:2] == ["-c"] or not close_fds:
            return fork_exec(args, executables, close_fds, keep, cwd, environment, *rest)
        reads_from, _, _, writes_to, _, complains_to = rest[:6]
        files = [mine if asked == -1 else asked for mine, asked in enumerate((reads_from, writes_to, complains_to))]
        session = rest[9]
        lines = os.environb.items() if environment is None else (line.split(b"=", 1) for line in environment)
        variables = {os.fsdecode(name): os.fsdecode(value) for name, value in lines}
        everything = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # ours, and not for the child
        pid = os.fork()
        if pid == 0:
            if session:
                os.setsid()
            _become(words[1:], variables, cwd, files, keep=[fd for fd in keep if fd not in rest[6:8]])
        signal.pthread_sigmask(signal.SIG_SETMASK, everything)
        return pid

    return fork


def _become(words, environment, cwd, files, keep=()):
    """Makes this forked process what `python WORDS` would be after its imports, runs it, and ends."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    files = [os.dup(file) if file < 3 else file for file in files]
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in keep:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(descriptor)
    if cwd:
        os.chdir(cwd)
    _show([sys.executable, *words], environment)
    os.environ.clear()
    os.environ.update(environment)
    unbuffered = words[0] == "-u" or bool(environment.get("PYTHONUNBUFFERED"))
    words = words[words[0] == "-u" :]
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stdout.reconfigure(write_through=unbuffered)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    libraries = [path for path in sys.path if path not in ("", str(TESTS), str(TESTS.parent))]
    module = words[1] if words[0] == "-m" else None
    sys.argv = words[1:] if module else words
    sys.path[:] = [os.getcwd() if module else os.path.dirname(os.path.abspath(words[0])), *libraries]
    try:
        if module:
            sys.modules.pop(module, None)  # imported by the server, it would be said to run twice
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
        if not isinstance(leaving.code, (int, type(None))):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _show(words, environment):
    """Has /proc show these arguments and this environment of the process, as far as there is room."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    first, last, first_variable, last_variable = map(int, fields[45:49])
    for start, end, lines in (
        (first, last, words),
        (first_variable, last_variable, [f"{name}={value}" for name, value in environment.items()]),
    ):
        text = b"".join(os.fsencode(line) + b"\0" for line in lines)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    serve(sys.argv[1])
