"""The formulas of predict_scaling.py for cases with known results, and its advice."""

from types import SimpleNamespace

import pytest
from harness.launches import load_script

from utils.run.failures import UserError

script = load_script("predict_scaling")
Link, step_seconds = script.Link, script.step_seconds
GIB = 2**30


@pytest.mark.parametrize("processes", [2, 3, 8, 64])
def test_the_fitted_link_predicts_what_it_was_fitted_to(processes):
    link, rows = Link(2e-5, 3e9), []
    for size in (4, 2**30):
        seconds = script.all_reduce_seconds(processes, size, *link)
        bandwidth = size / seconds * 2 * (processes - 1) / processes
        rows.append({"seconds": seconds, "bus_bandwidth": bandwidth})
    assert script.fit_link(rows, processes) == pytest.approx(link, rel=0.02)


def test_hidden_communication_takes_no_time():
    fast, slow = Link(0.0, 1e15), Link(0.0, 1e8)
    assert step_seconds(8, 1.0, 10**8, *fast) == pytest.approx(1.0)
    # The first bucket is sent before the second is computed; from then on the link is never idle.
    made = 1 / 3 + 2 / 3 * 26 * 2**20 / 10**8
    rest = (10**8 - 2**20) * 2 * 7 / 8 / 1e8
    assert step_seconds(8, 1.0, 10**8, *slow) == pytest.approx(made + rest, rel=1e-6)


def model(**more):
    """Arguments: 4 GB of gradients, 2 GB of gathered weights, 16 GB with Adam."""
    args = dict(parameters=10**9, layers=10, step_seconds=1.0, per_machine=8, processes=16)
    args |= dict(mixed_precision="bf16", worthwhile=0.8, memory_gib=80.0)
    return SimpleNamespace(**args | more)


def test_compares_ddp_fsdp_and_hsdp_on_two_machines():
    inside, between = Link(0.0, 400e9), Link(0.0, 50e9)
    rows = script.compare(model(), inside, between)
    # A layer of 0.2 GB is gathered in 3.75 ms and its gradient of 0.4 GB reduced in 7.5 ms. Inside
    # a machine both are 8/7 * 8 times as fast, and the shard of the gradient on each process, an
    # eighth, is averaged in 8 ms with an eighth of the bandwidth.
    fsdp, hsdp = 1 + 2 * 3.75e-3 + 7.5e-3, 1 + 2 * 0.4375e-3 + 0.875e-3 + 8e-3
    ddp = step_seconds(16, 1.0, 4 * 10**9, *between)
    sent, sharded = 2 * 4e9 * 15 / 16, (2 * 2e9 + 4e9) * 15 / 16
    within = (2 * 2e9 + 4e9) * 7 / 8 + 4e9 / 8
    expected = [
        ("DDP", 20e9, sent, sent, ddp, 1 / ddp),
        ("FSDP", 16e9 / 16 + 0.8e9, sharded, sharded, fsdp, 1 / fsdp),
        ("HSDP", 16e9 / 8 + 0.8e9, within, 2 * 4e9 / 2, hsdp, 1 / hsdp),
    ]
    names = ("kind", "memory_bytes", "sent_bytes", "network_bytes", "seconds", "efficiency")
    for row, (kind, *figures) in zip(rows, expected, strict=True):
        assert row.keys() == set(names) and row["kind"] == kind
        assert [row[name] for name in names[1:]] == pytest.approx(figures)


def test_compares_ddp_and_fsdp_on_one_machine_in_float32():
    """In float32 FSDP sends 1.5 times as much (Rajbhandari et al.); nothing leaves the machine."""
    args = model(mixed_precision="no", processes=4)
    ddp, fsdp = script.compare(args, Link(1e-5, 400e9), Link(1.0, 1.0))
    assert fsdp["sent_bytes"] == pytest.approx(1.5 * ddp["sent_bytes"])
    assert ddp["network_bytes"] == fsdp["network_bytes"] == 0
    layer = 3e-5 + 3 / 4 * 4e8 / 400e9
    assert fsdp["seconds"] == pytest.approx(1 + 3 * layer)


def test_predicts_weak_and_strong_scaling():
    link = Link(1e-5, 10e9)
    rows = script.predict(model(parameters=10**8, step_seconds=0.8), link)
    assert [row["processes"] for row in rows] == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    for row in rows:
        n = row["processes"]
        weak, strong = (step_seconds(n, 0.8 / share, 4 * 10**8, *link) for share in (1, n))
        assert (row["weak_seconds"], row["strong_seconds"]) == (weak, strong)
        assert row["weak_efficiency"] == pytest.approx(0.8 / weak)
        assert row["strong_efficiency"] == pytest.approx(0.8 / n / strong)


def test_says_how_far_ddp_scales_and_whether_its_memory_is_enough():
    args = model(parameters=2 * GIB, worthwhile=0.9)
    few = dict(processes=8, weak_efficiency=0.9, strong_efficiency=0.125)
    many = dict(processes=4096, weak_efficiency=0.4, strong_efficiency=0.125)
    weak, strong, memory = script.summarize(args, [few, many]).splitlines()
    kept = "With the same batch per process DDP keeps 90% of its efficiency up to"
    assert weak.startswith(f"{kept} 8 processes. Beyond that, use a larger batch per process")
    assert "for fewer than 8 processes only. Beyond that, use a larger global batch" in strong
    taken = "With DDP, weights, gradients, their buckets and Adam states take"
    assert memory == f"{taken} 40.0 of 80 GiB: no need for FSDP."
    many["weak_efficiency"] = 0.95
    assert script.summarize(args, [few, many]).startswith(f"{kept} 4,096 processes.\n")
    args.memory_gib = 40.01 / script.ROOM
    assert script.summarize(args, [few]).endswith("no need for FSDP.")
    args.memory_gib = 39.99 / script.ROOM
    assert "take 40 GiB, too much" in script.summarize(args, [few])


@pytest.mark.parametrize(
    ("memory", "ddp_seconds", "best"),
    # The memory that is enough for a kind is that of its states, and room for activations.
    [
        (100, 0.3, "HSDP 2node_8gpu_fsdp"),
        (5.01, 0.05, "HSDP 2node_8gpu_fsdp"),
        (4.99, 0.05, "FSDP 8gpu_fsdp"),
        (2.99, 0.05, None),
        (100, 0.05, "DDP 8gpu"),
    ],
)
def test_advises_what_is_the_fastest_that_fits(memory, ddp_seconds, best, capsys):
    kinds = {"DDP": (40, ddp_seconds), "FSDP": (3, 0.2), "HSDP": (5, 0.1)}
    rest = dict(sent_bytes=1, network_bytes=1, efficiency=0.5)
    rows = [
        dict(kind=kind, memory_bytes=gib * GIB, seconds=seconds, **rest)
        for kind, (gib, seconds) in kinds.items()
    ]
    script.print_comparison(model(memory_gib=memory / script.ROOM), rows)
    said, room = capsys.readouterr().out.splitlines()[-1], f"leaves {1 - script.ROOM:.0%} of"
    if best:
        kind, config = best.split()
        assert said.startswith(f"{kind} is the fastest that {room}")
        assert said.endswith(f"adapt accelerate_configs/{config}.yaml.")
    else:
        assert said.startswith(f"None of these {room}") and "use more processes" in said


@pytest.mark.parametrize("layers", [1, 2, 8, 32])
@pytest.mark.parametrize("parameters", [5_000_000_000, 7_400_000_000, 30_000_000_000])
def test_the_number_of_processes_that_fsdp_needs_fits_the_comparison(layers, parameters):
    args, link = model(parameters=parameters, layers=layers, per_machine=2**20), Link(1e-5, 4e11)
    fits = []
    for args.processes in (2**power for power in range(1, 9)):
        fsdp = script.compare(args, link, link)[1]
        fits += [args.processes] if fsdp["memory_bytes"] <= 0.7 * 80 * GIB else []
    said = script.summarize(args, script.predict(args, link))
    expected = f"use FSDP with {fits[0]} processes" if fits else "FSDP does not help, as each of"
    assert expected in said


LINK = "--latency 1e-5 --bandwidth 1e9"
BOTH = "or both --latency and --bandwidth"
INVALID = ["[]", "{}", '{"processes": [{"host": "a"}], "all_reduce": [{"seconds": 1}]}', "no"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", f"give --step_seconds, and --topology {BOTH}"),
        (LINK, "give --step_seconds"),
        ("--step_seconds 1", "give --step_seconds"),
        ("--step_seconds 1 --latency 1e-5", f"give --topology, {BOTH}"),
        (f"--step_seconds 1 {LINK} --topology t", f"give --topology, {BOTH}"),
        (f"--step_seconds 1 {LINK} --inside_bandwidth 1e9", "give --inside_topology, or both"),
        (f"--step_seconds 1 {LINK} --processes 12", "12 is not a multiple of --per_machine 8"),
        *((f"--step_seconds 1 --topology {i}", "result of check_topology.py") for i in range(5)),
    ],
)
def test_bad_input_is_refused_before_the_prediction(words, says, tmp_path, monkeypatch, capsys):
    for index, content in enumerate(INVALID):  # topology 4 does not exist
        (tmp_path / str(index)).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["predict_scaling.py", *words.split()])
    with pytest.raises(UserError, match=says):
        script.main()
    assert not capsys.readouterr().out and not (tmp_path / "runs").exists()
