"""Keeps what a long tool has measured, so that it continues where it was interrupted."""

import os
import socket
from datetime import timedelta
from pathlib import Path

from utils.run import record
from utils.run.files import read_json, write_json


class Measurements:
    """Figures in a JSON file that is written after each of them.

    A later start of the tool continues with them if its arguments, the machine, the versions and
    the script are the same. Otherwise it starts over, and says so. Use it on one process only.

    Attributes:
        values (dict): name -> figure, as JSON.
    """

    def __init__(self, path, arguments):
        """Args: arguments (dict): those of the tool that change what it measures."""
        self._path, self.values = Path(path), {}
        self._conditions = {
            "arguments": arguments,
            "machine": f"{socket.gethostname()}, {os.cpu_count()} cores",
            "versions": record.versions(),
            "script": record.script_hash(),
            "git_commit": record.git_commit(),
        }
        kept = read_json(self._path)
        if kept is None:
            return
        names = self._conditions.keys() | kept["conditions"].keys()
        changed = [n for n in sorted(names) if kept["conditions"].get(n) != self._conditions.get(n)]
        if changed:
            reason = ", ".join(changed).replace("_", " ")
            print(f"starts over: another {reason} than when {self._path} was written", flush=True)
            self.finish()
            return
        self.values = kept["values"]
        print(f"continues: {len(self.values)} figures are kept from {self._path}", flush=True)

    def keep(self, name, value):
        """Writes a figure; returns it as it is after a restart."""
        self.values[name] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"conditions": self._conditions, "values": self.values})
        return value

    def get(self, name, measure):
        """The kept figure of this name, or else that of `measure()`, which is then kept."""
        return self.values[name] if name in self.values else self.keep(name, measure())

    def finish(self):
        """Removes the file: the next start measures everything again."""
        self._path.unlink(missing_ok=True)
        self.values = {}


def clock(seconds):
    """A number of seconds as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
