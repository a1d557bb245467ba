"""Started by a test: writes the state of a process at its start (arguments, environment, signals) to `<out>/<rank>.json`."""

import json
import os
import signal
import sys
from pathlib import Path

OURS = sorted(name for name in sys.modules if name.split(".")[0] in ("utils", "scripts", "tests", "conftest", "warm"))

import psutil

this = psutil.Process()
numbers = signal.valid_signals()
state = {
    "argv": sys.argv,
    "path": sys.path,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "environment in /proc": {name: value for name, value in this.environ().items() if name in os.environ},
    "command in /proc": [word for word in this.cmdline() if word],
    "parent's command in /proc": [word for word in this.parent().cmdline() if word],
    "leads a session": os.getsid(0) == os.getpid(),
    "signal handlers": {str(number): repr(signal.getsignal(number)).split(" at ")[0] for number in numbers},
    "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "open files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],  # without the one that lists them
    "standard output": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.encoding, sys.stdout.errors],
    "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    "threads": this.num_threads() if "torch" in sys.modules else 1,
    "modules of this project": OURS,
}
Path(sys.argv[1], f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(state))
