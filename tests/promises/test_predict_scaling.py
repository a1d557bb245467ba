"""predict_scaling.py: what it prints and writes. Its formulas have unit tests."""

import json

from harness.launches import run

PREDICT = "scripts/tools/predict_scaling.py"


def test_predicts_from_what_was_measured(tmp_path):
    sizes = {1024: 4e-5, 2**26: 2**26 / 1e10}
    rows = [{"bytes": n, "seconds": s, "bus_bandwidth": n / s} for n, s in sizes.items()]
    measured = {"processes": [{"host": "a"}, {"host": "a"}], "all_reduce": rows}
    (tmp_path / "topology.json").write_text(json.dumps(measured))
    arguments = f"--parameters 11e6 --step_seconds 0.1 --topology {tmp_path}/topology.json"
    done = run(None, PREDICT, arguments, output_dir=tmp_path)
    assert "20.0 us and 10.00 GB/s" in done.stdout and "no need for FSDP" in done.stdout
    assert "measured within one machine" in done.stdout + done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    predicted = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    for row in predicted:
        weak = f"{row['weak_seconds'] * 1e3:.2f} ms {row['weak_efficiency']:.1%}"
        strong = f"{row['strong_seconds'] * 1e3:.2f} ms {row['strong_efficiency']:.1%}"
        assert f"{row['processes']} {weak} {strong}" in lines
    assert [row["processes"] for row in predicted] == [2**i for i in range(3, 13)]
    assert predicted[0]["weak_efficiency"] > 0.95 > 0.5 > predicted[-1]["strong_efficiency"]
    done = run(None, PREDICT, "--step_seconds 1 --latency 1e-5", check=False)
    assert (
        done.returncode == 2 and "and --topology or both --latency and --bandwidth" in done.stderr
    )
