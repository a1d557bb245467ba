"""The formulas of predict_scaling.py for cases with known results, and its advice."""

from types import SimpleNamespace

import pytest
from harness.launches import load_script

from utils.run.failures import UserError

script = load_script("predict_scaling")
Link, step_seconds = script.Link, script.step_seconds


@pytest.mark.parametrize("processes", [2, 3, 8, 64])
def test_the_fitted_link_predicts_what_it_was_fitted_to(processes):
    link, rows = Link(2e-5, 3e9), []
    for size in (4, 2**30):
        seconds = script.all_reduce_seconds(processes, size, link)
        bandwidth = size / seconds * 2 * (processes - 1) / processes
        rows.append({"seconds": seconds, "bus_bandwidth": bandwidth})
    assert script.fit_link(rows, processes) == pytest.approx(link, rel=0.02)


def test_hidden_communication_takes_no_time():
    fast, slow = Link(0.0, 1e15), Link(0.0, 1e8)
    assert step_seconds(8, 1.0, 10**8, fast) == pytest.approx(1.0)
    # The first bucket is sent before the second is computed; from then on the link is never idle.
    made = 1 / 3 + 2 / 3 * 26 * 2**20 / 10**8
    rest = (10**8 - 2**20) * 2 * 7 / 8 / 1e8
    assert step_seconds(8, 1.0, 10**8, slow) == pytest.approx(made + rest, rel=1e-6)


def test_predicts_weak_and_strong_scaling():
    link = Link(1e-5, 10e9)
    rows = script.predict(SimpleNamespace(parameters=10**8, step_seconds=0.8), link)
    assert [row["processes"] for row in rows] == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    for row in rows:
        n = row["processes"]
        weak, strong = (step_seconds(n, 0.8 / share, 4 * 10**8, link) for share in (1, n))
        assert (row["weak_seconds"], row["strong_seconds"]) == (weak, strong)
        assert row["weak_efficiency"] == pytest.approx(0.8 / weak)
        assert row["strong_efficiency"] == pytest.approx(0.8 / n / strong)


def test_says_how_far_ddp_scales_and_whether_its_memory_is_enough():
    args = SimpleNamespace(parameters=2 * 2**30, memory_gib=40.01 / script.ROOM)
    few = dict(processes=8, weak_efficiency=0.8, strong_efficiency=0.125)
    many = dict(processes=4096, weak_efficiency=0.4, strong_efficiency=0.125)
    weak, strong, memory = script.summarize(args, [few, many]).splitlines()
    kept = "With the same batch per process DDP keeps 80% of its efficiency up to"
    assert weak.startswith(f"{kept} 8 processes. Beyond that, use a larger batch per process")
    assert "for fewer than 8 processes only. Beyond that, use a larger global batch" in strong
    assert memory.endswith("states take 40.0 of 57.1571 GiB: no need for FSDP.")
    many["weak_efficiency"] = 0.85
    assert script.summarize(args, [few, many]).startswith(f"{kept} 4,096 processes.\n")
    args.memory_gib = 39.99 / script.ROOM
    assert "take 40 GiB, too much" in script.summarize(args, [few])
    assert script.summarize(args, [few]).endswith("use FSDP (accelerate_configs/4gpu_fsdp.yaml).")


LINK = "--latency 1e-5 --bandwidth 1e9"
NEEDS = "give --step_seconds, and --topology or both --latency and --bandwidth"
INVALID = ["[]", "{}", '{"processes": [{"host": "a"}], "all_reduce": [{"seconds": 1}]}', "no"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", NEEDS),
        (LINK, NEEDS),
        ("--step_seconds 1", NEEDS),
        ("--step_seconds 1 --latency 1e-5", NEEDS),
        (f"--step_seconds 1 {LINK} --topology t", NEEDS),
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
