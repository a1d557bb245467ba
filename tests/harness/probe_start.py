"""Started by a test: writes the state in which a process starts to `<out>/<rank>.json`.

That is its arguments, environment, signal handlers, open files and more.
"""

import json
import os
import signal
import sys
from pathlib import Path

PROJECT = ("utils", "scripts", "tests", "conftest", "warm")
OURS = sorted(name for name in sys.modules if name.split(".")[0] in PROJECT)

import psutil

this = psutil.Process()
executed = this.environ()  # what exec handed to the process, before it changed any
handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
open_files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
output = sys.stdout
state = {
    "argv": sys.argv,
    "path": sys.path,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "environment in /proc": {name: executed[name] for name in executed.keys() & os.environ.keys()},
    "command in /proc": [word for word in this.cmdline() if word],
    "parent's command in /proc": [word for word in this.parent().cmdline() if word],
    "leads a session": os.getsid(0) == os.getpid(),
    "signal handlers": {str(n): repr(handler).split(" at ")[0] for n, handler in handlers.items()},
    "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "open files": open_files[:-1],  # without the one that lists them
    "standard output": [
        output.line_buffering,
        output.write_through,
        output.encoding,
        output.errors,
    ],
    "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    "threads": this.num_threads() if "torch" in sys.modules else 1,
    "modules of this project": OURS,
}
Path(sys.argv[1], f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(state))
