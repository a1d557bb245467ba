"""benchmark.py: what it writes, not how fast anything is. Its functions have unit tests."""

import json
import os
import re
import signal

import psutil
import pytest
from harness.launches import Started, all_end, run

SCRIPT = "scripts/benchmarks/benchmark.py"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("speed", "no benchmark is called speed: choose from loop_overhead,"),
        ("gpt", "the benchmark gpt needs data: --text"),
    ],
)
def test_bad_input_is_one_line(arguments, says, tmp_path):
    done = run(None, SCRIPT, arguments, output_dir=tmp_path / "out", check=False)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_signal_also_ends_the_processes_that_it_measures(tmp_path):
    started = Started(None, SCRIPT, "scaling_efficiency --quick --rounds 1", output_dir=tmp_path)
    started.wait_for("round 1 of 1")
    measured = []
    # torchrun and its two processes; their second thread watches torchrun.
    while len(measured) < 3 or any(process.num_threads() < 2 for process in measured):
        measured = psutil.Process(started.process.pid).children(recursive=True)
    os.kill(started.process.pid, signal.SIGTERM)
    assert all_end(measured)
    assert started.finish()[0] == 75  # a scheduler may start it again


@pytest.mark.slow
def test_writes_figures_and_a_table(tmp_path):
    done = run(None, SCRIPT, "--quick --rounds 1 startup_ratio", output_dir=tmp_path)
    (row,) = re.findall(r"^\| `startup_ratio` \|.*", (tmp_path / "benchmark.md").read_text(), re.M)
    record = json.loads((tmp_path / "benchmark.json").read_text())
    assert {"hardware", "versions", "date"} <= record.keys()
    parts = ("train_minimal", "train_cifar", "train_gpt")
    assert [*record["figures"]] == [f"startup_ratio/{part}" for part in parts]
    for part, (name, figure) in zip(parts, record["figures"].items(), strict=True):
        assert figure["n"] == 1 and 0 < figure["min"] == figure["median"] == figure["max"]
        assert figure["command"].startswith(f"python {SCRIPT} startup_ratio")
        assert name in done.stdout and f"{part} {figure['median']:.3g}" in row
