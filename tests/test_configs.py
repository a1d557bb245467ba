"""Every YAML starts its number of processes on this machine, and default batch sizes divide evenly over them."""

import json
import re

import pytest
from conftest import ROOT, Started, run

ALL = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
CONFIGS = [path for path in ALL if "node" not in path.name]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_starts_as_many_processes_as_it_says(path, tmp_path):
    processes = int(re.search(r"num_processes: (\d+)", path.read_text())[1])
    done = run(str(path), "tests/probe_processes.py", [str(tmp_path)])
    reports = [json.loads(file.read_text()) for file in tmp_path.iterdir()]
    assert sorted(rank["rank"] for rank in reports) == list(range(processes))
    assert {rank["processes"] for rank in reports} == {processes}
    assert {rank["sum"] for rank in reports} == {processes * (processes + 1) // 2}  # they can communicate
    if "cpu" in path.stem:
        assert {rank["device"] for rank in reports} == {"cpu"} and "NO GPU" not in done.stderr
    if "gpu" in path.stem and reports[0]["device"] == "cpu":
        assert done.stderr.count("NO GPU FOUND") == 1
        assert f"{path.name} runs on the CPU" in done.stderr


def test_two_launches_at_once_find_any_free_port(tmp_path):
    both = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        both.append(Started("2cpu", "tests/probe_processes.py", [str(tmp_path / name)]))
    outcomes = [started.finish() for started in both]
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert [len(list((tmp_path / name).iterdir())) for name in ("one", "other")] == [2, 2]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_default_batches_divide_over_its_processes(path):
    """Otherwise the first run of a new user would end with an error."""
    processes = int(re.search(r"num_processes: (\d+)", path.read_text())[1])
    for script in (ROOT / "scripts").glob("train_*.py"):
        sizes = re.findall(r'\bbatch_size(?:=|".*?default=)(\d+)', script.read_text())
        assert sizes and not [size for size in sizes if int(size) % processes], script.name
