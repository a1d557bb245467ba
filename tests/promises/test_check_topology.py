"""check_topology.py: the tests cause the problems that it reports."""

import json
import re

import pytest
from harness.launches import run, some_slow

CHECK = "scripts/tools/check_topology.py"
PROBLEMS = {
    "one_gpu@1": "rank 0 and rank 1 share one GPU of",
    "other_torch@1:1": "different versions of torch",
    "absent@1:1": "rank 1 of 2 did not start within 3 s",
}


def test_without_problems(tmp_path):
    three = ("--num_processes", "3")
    done = run("2cpu", CHECK, "--max_bytes 16384", output_dir=tmp_path, launcher=three)
    assert "error:" not in done.stdout + done.stderr
    assert "3 processes on 1 machine can communicate" in done.stdout
    assert re.findall(r"^(\d) {2}", done.stdout, re.M) == ["0", "1", "2"]
    topology = json.loads((tmp_path / "topology.json").read_text())
    assert [row["bytes"] for row in topology["all_reduce"]] == [2**10, 2**12, 2**14]
    for row in topology["all_reduce"]:
        assert row["bus_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"] * 2 * 2 / 3)
    assert [path.name for path in tmp_path.iterdir()] == ["topology.json"]


@pytest.mark.parametrize("fault", some_slow(PROBLEMS, "absent@1:1"))
def test_reports_the_problem(fault, tmp_path):
    config, options = "2gpu" if "gpu" in fault else "2cpu", dict(faults=fault, check=False)
    done = run(config, CHECK, "--timeout 3", output_dir=tmp_path, **options)
    (error,) = re.findall(r"^error:.*", done.stdout + done.stderr, re.M)
    assert done.returncode != 0 and PROBLEMS[fault] in error, done.stderr
    assert 'check_topology.py", line' not in done.stderr
