"""predict_scaling.py: the formulas for cases with known results, and the script itself."""

import json
from types import SimpleNamespace

import pytest
from harness.launches import load_script, run

from scripts.predict_scaling import (
    Link,
    all_reduce_seconds,
    buckets,
    compare,
    fit_link,
    predict,
    sharded_seconds,
    step_seconds,
)
from utils.run.failures import UserError

PREDICT = "scripts/predict_scaling.py"


def test_all_reduce():
    assert all_reduce_seconds(1, 1e9, 1e-5, 1e9) == 0
    # Two processes: each sends half of the message and receives half of the sum, in two messages.
    assert all_reduce_seconds(2, 1e9, 1e-5, 1e9) == pytest.approx(1 + 2e-5)
    # For a long message the ring is faster, for a short one the tree.
    ring = 2 * 1023 * 1e-6 + 2 * 4 * 1023 / 1024
    assert all_reduce_seconds(1024, 4e9, 1e-6, 1e9) == pytest.approx(ring)
    assert all_reduce_seconds(1024, 4, 1e-6, 1e9) == pytest.approx(40e-6, rel=0.05)


@pytest.mark.parametrize("processes", [2, 3, 8, 64])
def test_the_fitted_link_predicts_what_it_was_fitted_to(processes):
    link = dict(latency=2e-5, bandwidth=3e9)
    rows = []
    for size in (4, 2**30):
        seconds = all_reduce_seconds(processes, size, **link)
        bandwidth = size / seconds * 2 * (processes - 1) / processes
        rows.append({"seconds": seconds, "bus_bandwidth": bandwidth})
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


def test_a_sharded_step_hides_communication_behind_computation():
    # Three layers, 1 s forward and 2 s backward each. Over fast links, the first gather of each
    # pass and the last reduction are not hidden.
    assert sharded_seconds(3, 9.0, gather=0.5, reduce=0.25) == pytest.approx(9 + 2 * 0.5 + 0.25)
    # Slow links: forward 2 + 2 * 2 + 1; backward 2 + 2 * (2 + 3) + 2 + 3.
    assert sharded_seconds(3, 9.0, gather=2.0, reduce=3.0) == pytest.approx(7 + 17)
    # The other link is the slowest: forward 1 + 2 * 1 + 1; backward 1 + 2 * 5 + 2 + 1 + 5.
    assert sharded_seconds(3, 9.0, gather=1.0, reduce=1.0, average=5.0) == pytest.approx(4 + 19)


MODEL = SimpleNamespace(
    parameters=10**9, layers=10, step_seconds=1.0, per_machine=8, mixed_precision="bf16"
)


def test_compares_ddp_fsdp_and_hsdp_on_two_machines():
    """10^9 parameters: 4 GB of gradients, 2 GB of gathered weights, 16 GB with Adam; no latency."""
    inside, between = Link(0.0, 400e9), Link(0.0, 50e9)
    ddp, fsdp, hsdp = compare(SimpleNamespace(**vars(MODEL), processes=16), inside, between)
    assert ddp["memory_bytes"] == pytest.approx(20e9)
    assert fsdp["memory_bytes"] == pytest.approx(16e9 / 16 + 0.8e9)
    assert hsdp["memory_bytes"] == pytest.approx(16e9 / 8 + 0.8e9)
    assert ddp["sent_bytes"] == ddp["network_bytes"] == pytest.approx(2 * 4e9 * 15 / 16)
    assert fsdp["sent_bytes"] == fsdp["network_bytes"] == pytest.approx((2 * 2e9 + 4e9) * 15 / 16)
    assert hsdp["network_bytes"] == pytest.approx(2 * 4e9 / 2)
    assert hsdp["sent_bytes"] == pytest.approx((2 * 2e9 + 4e9) * 7 / 8 + 4e9 / 8)
    # A layer of 0.2 GB is gathered in 3.75 ms and its gradient of 0.4 GB reduced in 7.5 ms. Inside
    # a machine both are 8/7 * 8 times as fast, and the shard of the gradient on each process, an
    # eighth, is averaged in 8 ms with an eighth of the bandwidth.
    assert fsdp["seconds"] == pytest.approx(1 + 2 * 3.75e-3 + 7.5e-3)
    assert hsdp["seconds"] == pytest.approx(1 + 2 * 0.4375e-3 + 0.875e-3 + 8e-3)
    assert hsdp["efficiency"] == pytest.approx(1 / hsdp["seconds"])
    assert ddp["seconds"] == step_seconds(16, 1.0, 4 * 10**9, *between)


def test_compares_ddp_and_fsdp_on_one_machine_in_float32():
    """In float32 FSDP sends 1.5 times as much (Rajbhandari et al.); nothing leaves the machine."""
    one = SimpleNamespace(**vars(MODEL) | dict(mixed_precision="no"), processes=4)
    ddp, fsdp = compare(one, Link(1e-5, 400e9), Link(1.0, 1.0))
    assert fsdp["sent_bytes"] == pytest.approx(1.5 * ddp["sent_bytes"])
    assert ddp["network_bytes"] == fsdp["network_bytes"] == 0
    layer = 3e-5 + 3 / 4 * 4e8 / 400e9
    assert fsdp["seconds"] == pytest.approx(1 + 3 * layer)


def test_predicts_weak_and_strong_scaling():
    model = SimpleNamespace(parameters=10**8, step_seconds=0.8)
    link = Link(1e-5, 10e9)
    rows = predict(model, link)
    assert [row["processes"] for row in rows] == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    for row in rows:
        n = row["processes"]
        weak, strong = (step_seconds(n, 0.8 / share, 4 * 10**8, *link) for share in (1, n))
        assert (row["weak_seconds"], row["strong_seconds"]) == (weak, strong)
        assert row["weak_efficiency"] == pytest.approx(0.8 / weak)
        assert row["strong_efficiency"] == pytest.approx(0.8 / n / strong)


def test_tables_have_the_units_that_they_name(capsys):
    script, gib = load_script("predict_scaling"), 2**30
    args = SimpleNamespace(parameters=2 * gib, step_seconds=0.5, memory_gib=80.0, worthwhile=0.9)
    args.layers, args.mixed_precision, args.processes, args.per_machine = 32, "bf16", 16, 8
    row = {"processes": 8, "weak_seconds": 0.0015, "weak_efficiency": 0.9}
    rows = [row | {"strong_seconds": 2.0, "strong_efficiency": 0.125}]
    rows.append(rows[0] | {"processes": 4096, "weak_efficiency": 0.4})
    script.print_prediction(args, Link(2e-5, 3e9), rows)
    shown = capsys.readouterr().out
    assert "2,147,483,648 parameters, 0.5 s per step on one process, 20.0 us and 3.00 GB/s" in shown
    line = ["8", "1.50", "ms", "90.0%", "2000.00", "ms", "12.5%"]
    assert [text.split() for text in shown.splitlines()][4] == line
    said = script.summarize(args, rows).splitlines()
    assert said[0].startswith(
        "With the same batch per process DDP keeps 90% of its efficiency up to 8 "
    )
    assert "Beyond that, use a larger batch per process" in said[0]
    assert "for fewer than 8 processes only. Beyond that, use a larger global batch" in said[1]
    assert said[2].startswith(
        "With DDP, weights, gradients, their buckets and Adam states take 40.0 of 80 GiB"
    )
    rows[1]["weak_efficiency"] = 0.95
    assert script.summarize(args, rows).splitlines()[0].endswith("up to 4,096 processes.")
    args.memory_gib = 40.01 / script.ROOM
    assert script.summarize(args, rows).endswith("no need for FSDP.")
    args.memory_gib = 39.99 / script.ROOM
    assert "take 40 GiB, too much" in script.summarize(args, rows)
    kinds = {"DDP": (40, 1, 1, 0.3), "FSDP": (3, 2, 2, 0.2), "HSDP": (5, 3, 0.5, 0.1)}
    names = ("memory_bytes", "sent_bytes", "network_bytes")
    compared = [
        {name: size * gib for name, size in zip(names, sizes, strict=True)}
        | {"kind": kind, "seconds": seconds, "efficiency": 0.5}
        for kind, (*sizes, seconds) in kinds.items()
    ]
    configs = {"HSDP": "2node_8gpu_fsdp", "FSDP": "8gpu_fsdp"}
    room = f"leaves {1 - script.ROOM:.0%} of"
    # The memory that is enough for a kind is that of its states, and room for activations.
    for memory, best in ((100, "HSDP"), (5.01, "HSDP"), (4.99, "FSDP"), (2.99, None)):
        args.memory_gib = memory / script.ROOM
        script.print_comparison(args, compared)
        shown = capsys.readouterr().out
        last = shown.splitlines()[-1]
        if best:
            assert last.startswith(f"{best} is the fastest that {room}") and configs[best] in last
        else:
            assert last.startswith(f"None of these {room}") and "use more processes" in last
    assert "16 processes, 8 on each machine" in shown
    ddp = "DDP 40.00 GiB 1.00 GiB 1.00 GiB 300.00 ms 50.0%"
    assert ddp in [" ".join(text.split()) for text in shown.splitlines()]
    args.memory_gib, compared[0]["seconds"] = 100, 0.05
    script.print_comparison(args, compared)
    assert "adapt accelerate_configs/8gpu.yaml" in capsys.readouterr().out


def test_prints_the_comparison_and_what_to_use(tmp_path):
    model = "--parameters 7e9 --layers 32 --step_seconds 1"
    links = "--latency 1e-5 --bandwidth 25e9 --inside_latency 1e-6 --inside_bandwidth 300e9"
    arguments = f"{model} {links} --processes"
    done = run(None, PREDICT, f"{arguments} 16", output_dir=tmp_path)
    assert "HSDP is the fastest" in done.stdout and "use FSDP with 2 processes" in done.stdout
    rows = json.loads((tmp_path / "scaling.json").read_text())["comparison"]
    assert [row["kind"] for row in rows] == ["DDP", "FSDP", "HSDP"]
    assert all(row["efficiency"] < 1 for row in rows)
    wrong = run(None, PREDICT, f"{arguments} 12", output_dir=tmp_path, check=False)
    assert wrong.returncode == 2 and "is not a multiple of --per_machine 8" in wrong.stderr


def test_predicts_from_what_was_measured(tmp_path):
    sizes = {1024: 4e-5, 2**26: 2**26 / 1e10}
    rows = [{"bytes": n, "seconds": s, "bus_bandwidth": n / s} for n, s in sizes.items()]
    measured = {"processes": [{"host": "a"}, {"host": "b"}], "all_reduce": rows}
    (tmp_path / "topology.json").write_text(json.dumps(measured))
    arguments = f"--parameters 11e6 --step_seconds 0.1 --topology {tmp_path}/topology.json"
    done = run(None, PREDICT, arguments, output_dir=tmp_path)
    assert "20.0 us and 10.00 GB/s" in done.stdout and "no need for FSDP" in done.stdout
    predicted = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert [row["processes"] for row in predicted] == [2**i for i in range(3, 13)]
    assert predicted[0]["weak_efficiency"] > 0.95 > 0.5 > predicted[-1]["strong_efficiency"]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


INVALID = ("[]", "{}", '{"processes": [{"host": "a"}], "all_reduce": [{"seconds": 1}]}', "no")


@pytest.mark.parametrize("content", INVALID)
def test_an_invalid_topology_file_is_a_one_line_error(content, tmp_path):
    (tmp_path / "topology.json").write_text(content)
    arguments = f"--step_seconds 0.1 --topology {tmp_path}/topology.json"
    done = run(None, PREDICT, arguments, output_dir=tmp_path, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is not a result of check_topology.py" in done.stderr


def test_says_what_is_missing(tmp_path):
    done = run(None, PREDICT, "--parameters 1e6", output_dir=tmp_path, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: give --step_seconds")


def test_measures_on_real_processes(tmp_path):
    arguments = "--measure --parameters 2e5 --batch 16 --layers 4"
    done = run("2cpu", PREDICT, arguments, output_dir=tmp_path)
    measured = json.loads((tmp_path / "measured_2.json").read_text())
    assert measured["gradient_bytes"] == pytest.approx(8e5, rel=0.02)
    assert 0 < measured["compute_seconds"] <= measured["predicted_overlapped"]
    assert measured["predicted_overlapped"] <= measured["predicted_in_turn"]
    assert "measured" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--latency 1e-5", "give --topology, or both --latency and --bandwidth"),
        ("--latency 1e-5 --bandwidth 1e9 --topology t", "give --topology, or both --latency"),
        (
            "--latency 1e-5 --bandwidth 1e9 --inside_bandwidth 1e9",
            "give --inside_topology, or both",
        ),
    ],
)
def test_half_a_link_is_refused(words, says, monkeypatch, capsys):
    script = load_script("predict_scaling")
    arguments = "--parameters 7e9 --step_seconds 1 --processes 16"
    monkeypatch.setattr("sys.argv", ["predict_scaling.py", *f"{arguments} {words}".split()])
    with pytest.raises(UserError, match=says):
        script.main()
    assert not capsys.readouterr().out


@pytest.mark.parametrize("layers", [1, 2, 8, 32])
@pytest.mark.parametrize("parameters", [5_000_000_000, 7_400_000_000, 30_000_000_000])
def test_the_number_of_processes_that_fsdp_needs_fits_the_comparison(layers, parameters):
    script = load_script("predict_scaling")
    args = SimpleNamespace(**vars(MODEL) | dict(parameters=parameters, layers=layers))
    args.worthwhile, args.memory_gib, args.per_machine = 0.8, 80.0, 2**20
    fits = []
    for args.processes in (2**power for power in range(1, 9)):
        fsdp = compare(args, Link(1e-5, 4e11), Link(1e-5, 4e11))[1]
        fits += [args.processes] if fsdp["memory_bytes"] <= 0.7 * 80 * 2**30 else []
    said = script.summarize(args, predict(args, Link(1e-5, 4e11)))
    expected = f"use FSDP with {fits[0]} processes" if fits else "FSDP does not help, as each of"
    assert expected in said
