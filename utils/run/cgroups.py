"""What the control groups of this process allow it, and what the kernel did to keep them to that.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst. Imports only the standard library.
"""

import math
from pathlib import Path


def values(file, root="/sys/fs/cgroup", membership="/proc/self/cgroup"):
    """Reads a file of each control group of this process (version 2), the innermost first.

    In a container the path of the group may be that on its host: then the root has the file.
    Returns the contents (list[str]); [] without control groups, as on a Mac.
    """
    try:
        lines = Path(membership).read_text().splitlines()
        path = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    except (OSError, StopIteration):
        return []
    group, contents = Path(root, path), []
    for folder in (group, *group.parents):
        if folder.is_relative_to(root) and (folder / file).exists():
            contents.append((folder / file).read_text())
    return contents


def cpu_quota(**where):
    """The CPU time per second of real time, as a float; infinity without a limit."""
    quotas = [math.inf]
    for content in values("cpu.max", **where):
        quota, period = content.split()
        if quota != "max":
            quotas.append(int(quota) / int(period))
    return min(quotas)


def memory_kills(**where):
    """How many processes of the innermost group the kernel has ended because memory ran out."""
    for content in values("memory.events", **where):
        events = dict(line.split() for line in content.splitlines())
        return int(events.get("oom_kill", 0))
    return 0


KILLS_BEFORE = memory_kills()  # those of other programs in the same container
