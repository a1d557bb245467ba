"""What the control groups of a process say, of CPU time and of memory."""

import math

import pytest

from utils.run import cgroups


@pytest.fixture
def group(tmp_path):
    """`group(path)`: where a process of this group, below `.root`, is looked for."""
    root, own = tmp_path / "root", tmp_path / "own"
    (root / "X:b" / "job").mkdir(parents=True)

    def is_in(path="X:b/job"):
        own.write_text(f"3:cpu:/other\n0::/{path}\n")
        return dict(root=root, membership=own)

    is_in.root = root
    return is_in


def test_the_quota_is_the_least_of_all_groups(group):
    """The path of a group may have colons."""
    assert cgroups.cpu_quota(**group()) == math.inf
    (group.root / "X:b" / "job" / "cpu.max").write_text("150000 100000\n")
    assert cgroups.cpu_quota(**group()) == 1.5
    (group.root / "X:b" / "cpu.max").write_text("max 100000\n")
    assert cgroups.cpu_quota(**group()) == 1.5
    (group.root / "cpu.max").write_text("50 100\n")
    (group.root.parent / "cpu.max").write_text("1 100\n")  # beside the groups
    assert cgroups.cpu_quota(**group()) == 0.5
    assert cgroups.cpu_quota(**group("elsewhere/in/the/host")) == 0.5  # as in a container


def test_the_processes_that_the_kernel_ended_are_those_of_the_innermost_group(group):
    assert cgroups.memory_kills(**group()) == 0
    events = "low 0\noom 5\noom_kill {}\noom_group_kill 0\n"
    (group.root / "memory.events").write_text(events.format(4))
    assert cgroups.memory_kills(**group()) == 4
    (group.root / "X:b" / "job" / "memory.events").write_text(events.format(2))
    assert cgroups.memory_kills(**group()) == 2
    (group.root / "X:b" / "job" / "memory.events").write_text("low 0\n")
    assert cgroups.memory_kills(**group()) == 0


@pytest.mark.parametrize("lines", [None, "3:cpu:/other\n", ""])
def test_without_groups_of_version_2_there_is_no_limit(lines, tmp_path):
    where = {"root": tmp_path, "membership": tmp_path / "own"}
    (tmp_path / "cpu.max").write_text("1 100")
    if lines is not None:
        (tmp_path / "own").write_text(lines)
    assert cgroups.cpu_quota(**where) == math.inf and cgroups.memory_kills(**where) == 0
