"""benchmark.py: what it writes, not how fast anything is."""

import json
import re

import pytest
from harness.launches import run

SCRIPT = "scripts/benchmarks/benchmark.py"


@pytest.mark.slow
def test_writes_figures_and_a_table(tmp_path):
    done = run(None, SCRIPT, "--quick --rounds 1 startup_ratio", output_dir=tmp_path)
    (row,) = re.findall(r"^\| `startup_ratio` \|.*", (tmp_path / "benchmark.md").read_text(), re.M)
    record = json.loads((tmp_path / "benchmark.json").read_text())
    assert {"hardware", "versions", "date"} <= record.keys()
    parts = [f"train_{name}" for name in "minimal cifar gpt images model_parallel lm".split()]
    assert [*record["figures"]] == [f"startup_ratio/{part}" for part in parts]
    for part, (name, figure) in zip(parts, record["figures"].items(), strict=True):
        assert figure["n"] == 1 and 0 < figure["min"] == figure["median"] == figure["max"]
        assert figure["command"].startswith(f"python {SCRIPT} startup_ratio")
        assert name in done.stdout and f"{part} {figure['median']:.3g}" in row
