"""Starts Python programs by forking a process that has imported torch and the like: a tenth of a
second, not four.

A server imports the libraries once and forks for every program that a test starts; the launchers
among those programs fork their own processes in turn. Only `exec` and the imports are left out:
everything that `accelerate launch` and torchelastic do (environment, sessions, signals, restarts)
is done by their own code, on real processes with the parents, arguments and environment that /proc
shows of any other. `test_harness.py` compares how they end, and `--cold` starts all by `exec`.

Nothing of this project is imported by the server, so a copied script finds its own `utils`.
"""

import atexit
import contextlib
import ctypes
import fcntl
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
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000  # from <linux/sched.h>
ADDRESS = "WARM_SERVER"  # the environment variable that names the server's socket
TESTS = Path(__file__).resolve().parents[1]
# Without them, /proc could not show a program's own arguments and environment in place of the
# server's.
ARGUMENT_BYTES, ENVIRONMENT_BYTES = 16_384, 65_536
HEAVY = """
torch._dynamo torch.distributed.checkpoint.format_utils torch.distributed.fsdp
torch.distributed.run torch.utils.tensorboard torchvision accelerate.commands.accelerate_cli
datasets matplotlib.pyplot peft psutil pytest tqdm transformers.generation
transformers.models.llama.modeling_llama
""".split()


# ---------------------------------------------------------------------------------- the tests' side


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
        # It listens now; whoever asks waits until the libraries are imported.
        process.stdout.readline()
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
        machine (str | None): the name of the machine of `machines.py` on which it runs.
    """

    def __init__(
        self, words, environment, stdout, stderr, cwd=None, start_new_session=False, machine=None
    ):
        self.args, self.returncode = words, None
        request = dict(words=words, environment=environment, session=start_new_session)
        request |= dict(cwd=cwd or os.getcwd(), machine=machine)
        if hasattr(os, "sched_getaffinity"):
            request["cores"] = sorted(os.sched_getaffinity(0))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[ADDRESS])
        with open(os.devnull) as stdin:
            _send(self._socket, request, [stdin.fileno(), stdout.fileno(), stderr.fileno()])
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


def _send(connection, request, files):
    socket.send_fds(connection, [b"!"], files)
    connection.sendall(json.dumps(request).encode() + b"\n")


def _receive(connection):
    """A request and its open files, or None at the end of the connection."""
    byte, files, _, _ = socket.recv_fds(connection, 1, 3)
    return (json.loads(connection.makefile("r").readline()), files) if byte else None


# -------------------------------------------------------------------------------- the server's side


def serve(address):
    """Forks a program for every connection, until standard input ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("listening", flush=True)
    for name in HEAVY:
        with contextlib.suppress(ModuleNotFoundError):  # its tests are skipped
            importlib.import_module(name)
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
    request, files = _receive(connection)
    pid = os.fork()
    if pid == 0:
        _become(request, files)
    with contextlib.suppress(BrokenPipeError):  # whoever asked has gone
        connection.sendall(f"{pid}\n".encode())
        connection.sendall(f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def _lend_forks():
    """Has `subprocess.Popen` fork, instead of execute, this Python: for launchers, called before
    anything else runs.

    A launcher has threads, and a fork in the moment in which one of them holds a lock of the C
    library would keep that lock for ever. So a process that has none, made here, forks for it. What
    it forks becomes the launcher's own child, as it has to be: the process between them ends at
    once, and the launcher is the one to adopt orphans.
    """
    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    if os.fork() == 0:
        ours.close()
        for descriptor in range(3):  # whoever reads what the launcher prints must see its end
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        while received := _receive(theirs):
            between = os.fork()
            if between == 0:
                between = os.getpid()
                pid = os.fork()
                if pid == 0:
                    while os.getppid() == between:
                        time.sleep(0.0005)
                    _become(*received)
                theirs.sendall(f"{pid}\n".encode())
                os._exit(0)
            os.waitpid(between, 0)
            for file in received[1]:
                os.close(file)
        os._exit(0)
    theirs.close()
    fork_exec, prctl, answers = subprocess._fork_exec, ctypes.CDLL(None).prctl, ours.makefile("r")

    def fork_instead(args, executables, close_fds, keep, cwd, environment, *rest):
        words = [os.fsdecode(word) for word in args]
        reads_from, _, _, writes_to, _, complains_to, _, told_here = rest[:8]
        other_program = words[0] != sys.executable or words[1:2] == ["-c"]
        if other_program or not close_fds or set(keep) != {told_here}:
            return fork_exec(args, executables, close_fds, keep, cwd, environment, *rest)
        lines = os.environb.items()
        if environment is not None:
            lines = (line.split(b"=", 1) for line in environment)
        numbers = map(int, signal.valid_signals())
        request = {
            "words": words[1:],
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in lines},
            "cwd": cwd or os.getcwd(),
            "session": rest[9],
            "handled": [number for number in numbers if callable(signal.getsignal(number))],
        }
        asked = enumerate((reads_from, writes_to, complains_to))
        files = [own if number == -1 else number for own, number in asked]
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _send(ours, request, files)
        pid = int(answers.readline())
        while _parent(pid) not in (launcher, None):
            time.sleep(0.0005)
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return pid

    subprocess._fork_exec = fork_instead


def _parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _become(request, files):
    """Makes this forked process what `python WORDS` would be after its imports, runs it, and ends."""
    words, environment = request["words"], request["environment"]
    if request["session"]:
        os.setsid()
    if "cores" in request:
        os.sched_setaffinity(0, request["cores"])
    if request.get("machine"):
        _enter(request["machine"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for signum in request.get("handled", ()):  # as `exec` resets every signal that has a handler
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    # From above 2, or one would be overwritten before it is duplicated.
    for descriptor, file in enumerate([fcntl.fcntl(file, fcntl.F_DUPFD, 3) for file in files]):
        os.dup2(file, descriptor)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    os.chdir(request["cwd"])
    if "-m" in words[:2]:
        _lend_forks()
    _show([sys.executable, *words], environment)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # what the server found with its own environment
    unbuffered = words[0] == "-u" or bool(environment.get("PYTHONUNBUFFERED"))
    words = words[words[0] == "-u" :]
    streams = (sys.stdin, sys.stdout, sys.stderr)
    like = [dict(encoding=stream.encoding, errors=stream.errors) for stream in streams]
    sys.stdin = os.fdopen(0, "r", closefd=False, **like[0])
    sys.stdout = os.fdopen(1, "w", closefd=False, **like[1])
    sys.stdout.reconfigure(write_through=unbuffered)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, **like[2])
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    ours = ("", str(TESTS / "harness"), str(TESTS), str(TESTS.parent))
    module = words[1] if words[0] == "-m" else None
    sys.argv = words[1:] if module else words
    first = os.getcwd() if module else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:] = [first, *(path for path in sys.path if path not in ours)]
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


def _enter(machine):
    """Moves this process into the network of a machine, under its name."""
    libc = ctypes.CDLL(None)
    with open(f"/run/netns/{machine}") as network:
        failed = libc.setns(network.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS)
    if failed:
        raise OSError(f"cannot enter the network of {machine}")
    socket.sethostname(machine)


def _show(words, environment):
    """Has /proc show these arguments and this environment of the process, as far as there is room."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    first, last, first_variable, last_variable = map(int, fields[45:49])
    variables = [f"{name}={value}" for name, value in environment.items()]
    for start, end, lines in ((first, last, words), (first_variable, last_variable, variables)):
        text = b"".join(os.fsencode(line) + b"\0" for line in lines)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    serve(sys.argv[1])
