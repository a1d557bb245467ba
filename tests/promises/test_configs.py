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
def test_the_first_run_of_a_new_user_works(path):
    """Default batches divide over the processes. Accelerate reads an unquoted no as false, and
    replaces a fixed port that is in use, but not for two launches that start in the same moment.
    """
    fields = yaml.safe_load(path.read_text())
    for script in (ROOT / "scripts").glob("train_*.py"):
        sizes = re.findall(r'\bbatch_size(?:=|".*?default=)(\d+)', script.read_text())
        wrong = [size for size in sizes if int(size) % fields["num_processes"]]
        assert sizes and not wrong, script.name
    assert isinstance(fields["mixed_precision"], str)
    assert "node" in path.name or fields["num_processes"] == 1 or fields["main_process_port"] == 0
