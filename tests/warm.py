"""Runs `python SCRIPT` in a process forked from one that has imported torch and the like: half a second, not six.

The script starts in it as in any other, with a `sys.argv`, environment and exit code of its own; not so the launcher,
whose processes read its command line.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

TESTS = Path(__file__).resolve().parent
# What the scripts import, but nothing of ours: a copied script must find its own `utils`.
HEAVY = ["torch._dynamo", "torchvision", "accelerate", "datasets", "matplotlib.pyplot", "pytest"]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(HEAVY)


def python(words, environment, timeout):
    """Like `subprocess.run([sys.executable, *words], ...)` with all that was printed."""
    with tempfile.TemporaryDirectory() as folder:
        texts = [Path(folder, name) for name in ("stdout", "stderr")]
        process = context.Process(target=_become, args=(words, environment, texts))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutExpired(words, timeout)
        return CompletedProcess(words, process.exitcode, *(text.read_text() for text in texts))


def _become(words, environment, texts):
    for descriptor, text in enumerate(texts, 1):
        os.dup2(os.open(text, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    sys.path[:] = [os.path.dirname(words[0]), *(path for path in sys.path if path not in ("", str(TESTS), str(TESTS.parent)))]
    runpy.run_path(words[0], run_name="__main__")
