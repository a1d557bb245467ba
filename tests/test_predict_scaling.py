"""predict_scaling.py: the formulas for cases with known results, and the script itself."""

import json

import pytest
from conftest import run

from scripts.predict_scaling import all_reduce_seconds, buckets, fit_link, step_seconds

PREDICT = "scripts/predict_scaling.py"


def test_all_reduce():
    assert all_reduce_seconds(1, 1e9, 1e-5, 1e9) == 0
    # Two processes: each sends half of the message and receives half of the sum, in two messages.
    assert all_reduce_seconds(2, 1e9, 1e-5, 1e9) == pytest.approx(1 + 2e-5)
    # For a long message the ring is faster, for a short one the tree.
    assert all_reduce_seconds(1024, 4e9, 1e-6, 1e9) == pytest.approx(2 * 1023 * 1e-6 + 2 * 4 * 1023 / 1024)
    assert all_reduce_seconds(1024, 4, 1e-6, 1e9) == pytest.approx(40e-6, rel=0.05)


@pytest.mark.parametrize("processes", [2, 3, 8, 64])
def test_the_fitted_link_predicts_what_it_was_fitted_to(processes):
    link = dict(latency=2e-5, bandwidth=3e9)
    rows = []
    for size in (4, 2**30):
        seconds = all_reduce_seconds(processes, size, **link)
        rows.append({"seconds": seconds, "bus_bandwidth": size / seconds * 2 * (processes - 1) / processes})
    assert fit_link(rows, processes) == pytest.approx(tuple(link.values()), rel=0.02)


def test_buckets():
    assert buckets(1000) == [1000]
    assert buckets(2**20 + 30 * 2**20) == [2**20, 25 * 2**20, 5 * 2**20]


def test_hidden_communication_takes_no_time():
    fast, slow = dict(latency=0.0, bandwidth=1e15), dict(latency=0.0, bandwidth=1e8)
    assert step_seconds(8, 1.0, 10**8, **fast) == pytest.approx(1.0)
    # The first bucket is sent before the second is computed; from then on the link is never idle.
    made = 1 / 3 + 2 / 3 * 26 * 2**20 / 10**8
    rest = (10**8 - 2**20) * 2 * 7 / 8 / 1e8
    assert step_seconds(8, 1.0, 10**8, **slow) == pytest.approx(made + rest, rel=1e-6)
    assert step_seconds(8, 1.0, 10**8, **slow, overlap=False) == pytest.approx(1 + 2 * 7 / 8)


def test_predicts_from_what_was_measured(tmp_path):
    rows = [{"bytes": size, "seconds": s, "bus_bandwidth": size / s} for size, s in ((1024, 4e-5), (2**26, 2**26 / 1e10))]
    (tmp_path / "topology.json").write_text(json.dumps({"processes": [{"host": "a"}, {"host": "b"}], "all_reduce": rows}))
    arguments = f"--parameters 11e6 --step_seconds 0.1 --topology {tmp_path}/topology.json"
    done = run(None, PREDICT, arguments, output_dir=tmp_path)
    assert "20.0 us and 10.00 GB/s" in done.stdout and "no need for FSDP" in done.stdout
    predicted = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert [row["processes"] for row in predicted] == [2**i for i in range(3, 13)]
    assert predicted[0]["weak_efficiency"] > 0.95 > 0.5 > predicted[-1]["strong_efficiency"]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.parametrize("content", ["[]", "{}", '{"processes": [{"host": "a"}], "all_reduce": [{"seconds": 1}]}', "no"])
def test_an_invalid_topology_file_is_a_one_line_error(content, tmp_path):
    (tmp_path / "topology.json").write_text(content)
    arguments = f"--step_seconds 0.1 --topology {tmp_path}/topology.json"
    done = run(None, PREDICT, arguments, output_dir=tmp_path, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "is not a result of check_topology.py" in done.stderr


def test_says_what_is_missing(tmp_path):
    done = run(None, PREDICT, "--parameters 1e6", output_dir=tmp_path, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: give --step_seconds")


def test_measures_on_real_processes(tmp_path):
    done = run("2cpu", PREDICT, "--measure --parameters 2e5 --batch 16 --layers 4", output_dir=tmp_path)
    measured = json.loads((tmp_path / "measured_2.json").read_text())
    assert measured["gradient_bytes"] == pytest.approx(8e5, rel=0.02)
    assert 0 < measured["compute_seconds"] <= measured["predicted_overlapped"] <= measured["predicted_in_turn"]
    assert "measured" in done.stdout
