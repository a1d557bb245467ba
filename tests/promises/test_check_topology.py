"""check_topology.py: the tests cause every problem that it reports."""

import json
import re

import pytest
from harness.launches import load_script, run, some_slow

from utils.run.failures import UserError

CHECK = "scripts/check_topology.py"
QUICK = "--max_bytes 65536 --seconds_per_size 0.05"


def errors_of(done):
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]


def test_without_problems(tmp_path):
    done = run("2cpu", CHECK, QUICK, output_dir=tmp_path, launcher=("--num_processes", "3"))
    assert not errors_of(done) and "3 processes on 1 machine can communicate" in done.stdout
    assert re.findall(r"^(\d) {2}", done.stdout, re.M) == ["0", "1", "2"]
    topology = json.loads((tmp_path / "topology.json").read_text())
    assert [row["bytes"] for row in topology["all_reduce"]] == [2**10, 2**12, 2**14, 2**16]
    for row in topology["all_reduce"]:
        assert row["bus_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"] * 2 * 2 / 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["allreduce.png", "topology.json"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("one_gpu@1", "rank 0 and rank 1 share GPU 0 of"),
        ("other_torch@1:1", "different versions of torch"),
        ("clock_ahead@1:1", "s off rank 0's: synchronize both with NTP"),
    ],
)
def test_reports_the_problem(fault, words, tmp_path):
    config = "2gpu" if "gpu" in fault else "2cpu"
    done = run(config, "tests/harness/wrapped.py", [fault, CHECK], output_dir=tmp_path, check=False)
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    assert any(words in line for line in errors_of(done)), done.stderr
    assert len(errors_of(done)) == 1 and 'check_topology.py", line' not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_starts_is_named(absent, tmp_path):
    arguments = [f"absent@1:{absent}", CHECK, "--timeout", "2"]
    done = run("2cpu", "tests/harness/wrapped.py", arguments, output_dir=tmp_path, check=False)
    assert len(errors_of(done)) == 1
    assert f"error: rank {absent} of 2 did not start within 2 s" in errors_of(done)[0]


@pytest.mark.parametrize("unreachable", some_slow([0, 1], 1))
def test_a_rank_that_starts_but_cannot_be_reached(unreachable, tmp_path):
    arguments = [f"unreachable@1:{unreachable}", CHECK, "--timeout", "3"]
    done = run("2cpu", "tests/harness/wrapped.py", arguments, output_dir=tmp_path, check=False)
    assert len(errors_of(done)) == 1
    words = "all processes reached rank 0, but not each other over gloo within 3 s"
    assert words in errors_of(done)[0]


@pytest.mark.slow
def test_folders_that_are_not_shared(machines, tmp_path):
    """On the second machine, the same paths are different folders."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").write_bytes(b"x" * 100)
    both = []
    for machine in machines:
        mount = ("sh", "-c", 'mount -t tmpfs none "$0"; exec "$@"', str(tmp_path))
        hide = mount if machine.rank else ()
        arguments = f"--dataset {tmp_path / 'data'}"
        both.append(machine.started(CHECK, arguments, tmp_path / "out", enter=hide))
    outcomes = [started.finish() for started in both]
    printed = outcomes[0][1]
    assert [code for code, _ in outcomes] == [1, 1]
    assert f"is a different folder on {machines[1].name} than on {machines[0].name}" in printed
    assert f"1 file(s), 100 bytes on {machines[0].name}, nothing on {machines[1].name}" in printed


def test_each_problem_is_a_line(monkeypatch, capsys):
    script = load_script("check_topology")
    script.refuse([])
    for rank, printed in ((0, "error: one\nerror: two\n"), (1, "")):
        monkeypatch.setattr(script, "RANK", rank)
        with pytest.raises(UserError, match=r"^three$"):
            script.refuse(["one", "two", "three"])
        assert capsys.readouterr().err == printed
