"""Every YAML starts the number of processes that it says, on this machine."""

import json
import re

import pytest
from conftest import ROOT, run

CONFIGS = sorted(path for path in (ROOT / "accelerate_configs").glob("*.yaml") if "node" not in path.name)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_starts_as_many_processes_as_it_says(path, tmp_path):
    promised = int(re.search(r"num_processes: (\d+)", path.read_text())[1])
    done = run(str(path), "tests/probe_processes.py", [str(tmp_path)])
    found = [json.loads(file.read_text()) for file in tmp_path.iterdir()]
    assert sorted(rank["rank"] for rank in found) == list(range(promised))
    assert {rank["processes"] for rank in found} == {promised}
    assert {rank["sum"] for rank in found} == {promised * (promised + 1) // 2}  # they do talk to each other
    if "cpu" in path.stem:
        assert {rank["device"] for rank in found} == {"cpu"} and "NO GPU" not in done.stderr
    if "gpu" in path.stem and found[0]["device"] == "cpu":
        assert done.stderr.count("NO GPU HERE") == 1
        assert f"{path.name} is rehearsed on the CPU" in done.stderr
