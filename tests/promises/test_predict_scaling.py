"""predict_scaling.py: what it prints and writes. Its formulas have unit tests."""

import json

from harness.launches import run

PREDICT = "scripts/tools/predict_scaling.py"


def test_prints_the_comparison_and_what_to_use(tmp_path):
    model = "--parameters 7e9 --layers 32 --step_seconds 1 --processes 16"
    links = "--latency 1e-5 --bandwidth 25e9 --inside_latency 1e-6 --inside_bandwidth 300e9"
    done = run(None, PREDICT, f"{model} {links}", output_dir=tmp_path)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    link = "10.0 us and 25.00 GB/s between processes"
    assert lines[0] == f"7,000,000,000 parameters, 1 s per step on one process, {link}"
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert len(written["rows"]) == 10
    for row in written["rows"]:
        weak = f"{row['weak_seconds'] * 1e3:.2f} ms {row['weak_efficiency']:.1%}"
        strong = f"{row['strong_seconds'] * 1e3:.2f} ms {row['strong_efficiency']:.1%}"
        assert f"{row['processes']} {weak} {strong}" in lines
    rows = written["comparison"]
    assert [row["kind"] for row in rows] == ["DDP", "FSDP", "HSDP"]
    for row in rows:
        sizes = (row[f"{name}_bytes"] / 2**30 for name in ("memory", "sent", "network"))
        shown = " ".join(f"{size:.2f} GiB" for size in sizes)
        time = f"{row['seconds'] * 1e3:.2f} ms {row['efficiency']:.1%}"
        assert f"{row['kind']} {shown} {time}" in lines and row["efficiency"] < 1
    assert "16 processes, 8 on each machine" in done.stdout
    assert "HSDP is the fastest" in done.stdout and "use FSDP with 2 processes" in done.stdout


def test_predicts_from_what_was_measured(tmp_path):
    sizes = {1024: 4e-5, 2**26: 2**26 / 1e10}
    rows = [{"bytes": n, "seconds": s, "bus_bandwidth": n / s} for n, s in sizes.items()]
    measured = {"processes": [{"host": "a"}, {"host": "a"}], "all_reduce": rows}
    (tmp_path / "topology.json").write_text(json.dumps(measured))
    arguments = f"--parameters 11e6 --step_seconds 0.1 --topology {tmp_path}/topology.json"
    done = run(None, PREDICT, arguments, output_dir=tmp_path)
    assert "20.0 us and 10.00 GB/s" in done.stdout and "no need for FSDP" in done.stdout
    assert "measured within one machine" in done.stdout + done.stderr
    predicted = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert [row["processes"] for row in predicted] == [2**i for i in range(3, 13)]
    assert predicted[0]["weak_efficiency"] > 0.95 > 0.5 > predicted[-1]["strong_efficiency"]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "topology.json").write_text("[]")
    arguments = f"--step_seconds 0.1 --topology {tmp_path}/topology.json"
    done = run(None, PREDICT, arguments, output_dir=tmp_path / "out", check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    assert "is not a result of check_topology.py" in done.stderr
    assert done.stderr.startswith("error: ") and not (tmp_path / "out").exists()
