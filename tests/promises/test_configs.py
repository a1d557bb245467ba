"""Every YAML starts its number of processes on this machine, and default batch sizes divide evenly
over them.
"""

import json
import re

import pytest
import yaml
from harness.launches import ROOT, run

ALL = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
PROBE = "tests/harness/probe_processes.py"
CONFIGS = [path for path in ALL if "node" not in path.name]


def slow_if_large(path):
    marks = [pytest.mark.slow] * path.name.startswith("8")
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [slow_if_large(path) for path in CONFIGS])
def test_starts_as_many_processes_as_it_says(path, tmp_path):
    processes = int(re.search(r"num_processes: (\d+)", path.read_text())[1])
    done = run(str(path), PROBE, [str(tmp_path)])
    reports = [json.loads(file.read_text()) for file in tmp_path.iterdir()]
    assert sorted(rank["rank"] for rank in reports) == list(range(processes))
    assert {rank["processes"] for rank in reports} == {processes}
    # They can communicate.
    assert {rank["sum"] for rank in reports} == {processes * (processes + 1) // 2}
    assert {rank["sharded"] for rank in reports} == {"fsdp" in path.stem}
    if "cpu" in path.stem:
        assert {rank["device"] for rank in reports} == {"cpu"} and "NO GPU" not in done.stderr
    if "gpu" in path.stem and reports[0]["device"] == "cpu":
        assert done.stderr.count("NO GPU FOUND") == 1
        assert f"{path.name} runs on the CPU" in done.stderr


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_default_batches_divide_over_its_processes(path):
    """Otherwise the first run of a new user would end with an error."""
    processes = int(re.search(r"num_processes: (\d+)", path.read_text())[1])
    for script in (ROOT / "scripts").glob("train_*.py"):
        sizes = re.findall(r'\bbatch_size(?:=|".*?default=)(\d+)', script.read_text())
        assert sizes and not [size for size in sizes if int(size) % processes], script.name


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_port_is_free_and_the_precision_is_a_string(path):
    """Accelerate would replace a fixed port that is in use, but not for two launches that start in
    the same moment; it reads an unquoted no as false.
    """
    fields = yaml.safe_load(path.read_text())
    assert isinstance(fields["mixed_precision"], str)
    assert "node" in path.name or fields["num_processes"] == 1 or fields["main_process_port"] == 0
