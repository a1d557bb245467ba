"""Long tools keep what they measured: they write after each figure and continue after an interruption."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
from harness.launches import load_script

from utils.run.failures import RunFailed, UserError
from utils.run.measurements import Measurements, clock


def test_a_figure_is_measured_once_until_all_are_finished(tmp_path, capsys):
    path, calls = tmp_path / "new" / "unfinished.json", []

    def measure(value):
        calls.append(value)
        return {"seconds": value}

    kept = Measurements(path, {"rounds": 2})
    assert kept.get("a", lambda: measure(1.5)) == {"seconds": 1.5} and capsys.readouterr().out == ""
    again = Measurements(path, {"rounds": 2})
    assert again.get("a", lambda: measure(9)) == {"seconds": 1.5} and calls == [1.5]
    assert capsys.readouterr().out == f"continues: 1 figures are kept from {path}\n"
    assert again.get("b", lambda: measure(2.5)) == {"seconds": 2.5}
    assert Measurements(path, {"rounds": 2}).values == {
        "a": {"seconds": 1.5},
        "b": {"seconds": 2.5},
    }
    again.finish()
    assert again.values == {} and not path.exists()
    again.finish()


@pytest.mark.parametrize(
    ("owner", "name", "says"),
    [
        ("utils.run.measurements.socket", "gethostname", "another machine"),
        ("utils.run.record", "versions", "another versions"),
        ("utils.run.record", "script_hash", "another script"),
        ("utils.run.record", "git_commit", "another git commit"),
        (None, None, "another arguments"),
    ],
)
def test_figures_of_something_else_are_not_mixed(owner, name, says, tmp_path, monkeypatch, capsys):
    path = tmp_path / "unfinished.json"
    Measurements(path, {"rounds": 2}).keep("a", 1)
    if owner:
        monkeypatch.setattr(f"{owner}.{name}", lambda: "other")
    kept = Measurements(path, {"rounds": 2 if owner else 3})
    out = capsys.readouterr().out
    assert out.startswith("starts over: ") and says in out and out.count("\n") == 1
    assert kept.values == {} and not path.exists()


def test_a_condition_that_is_new_or_gone_counts(tmp_path, capsys):
    path = tmp_path / "a" / "b" / "unfinished.json"
    Measurements(path, {}).keep("a", 1)
    kept = json.loads(path.read_text())
    kept["conditions"]["gpu"] = "H100"
    path.write_text(json.dumps(kept))
    assert Measurements(path, {}).values == {} and "another gpu" in capsys.readouterr().out
    del kept["conditions"]["gpu"], kept["conditions"]["versions"]
    path.write_text(json.dumps(kept))
    assert Measurements(path, {}).values == {} and "another versions" in capsys.readouterr().out


def test_a_damaged_file_is_one_line(tmp_path):
    (tmp_path / "unfinished.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        Measurements(tmp_path / "unfinished.json", {})


def test_the_time_left_reads_well():
    assert [clock(s) for s in (0.4, 59.6, 3725)] == ["0:00:00", "0:01:00", "1:02:05"]


# ---------------------------------------------------------------------------------------- benchmark


class Interrupted(Exception):
    pass


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """benchmark.py with two benchmarks that measure numbers; `.fail_at` interrupts it."""
    script = load_script("benchmark")
    state = SimpleNamespace(script=script, measured=[], fail_at=None, folder=tmp_path / "out")

    @script.kept
    def measure(what):
        if len(state.measured) == state.fail_at:
            raise Interrupted
        state.measured.append(what)
        return [float(len(state.measured)), {"of": what}]

    def made(name):
        def run(args):
            ours = []
            for _ in script._rounds.each():
                (one, about), (two, _) = measure(f"{name} ours"), measure(f"{name} theirs")
                assert about == {"of": f"{name} ours"}
                ours.append(one / two)
            return {name: (ours, "time, ratio")}

        return run

    monkeypatch.setattr(script, "BENCHMARKS", {name: made(name) for name in ("first", "second")})
    monkeypatch.setattr(script, "SECONDS", {"first": 10, "second": 40})
    monkeypatch.setattr(
        sys, "argv", ["benchmark.py", "--rounds", "2", "--output_dir", str(state.folder)]
    )
    return state


def figures(folder):
    return json.loads((folder / "benchmark.json").read_text())["figures"]


def test_an_interrupted_benchmark_continues_with_the_round_that_was_not_finished(benchmark, capsys):
    benchmark.fail_at = 7  # between the two sides of the last round
    with pytest.raises(Interrupted):
        benchmark.script.main()
    assert list(figures(benchmark.folder)) == ["first"]
    assert (benchmark.folder / "benchmark.png").exists()
    benchmark.fail_at, benchmark.measured[:] = None, range(100, 107)
    capsys.readouterr()
    benchmark.script.main()
    out = capsys.readouterr().out
    # Only the round that was not finished, and both of its sides.
    assert benchmark.measured[7:] == ["second ours", "second theirs"]
    assert out.count("(kept)") == 3 and "continues: 3 figures" in out
    values = {
        name: (figure["min"], figure["max"]) for name, figure in figures(benchmark.folder).items()
    }
    assert values == {"first": (1 / 2, 3 / 4), "second": (5 / 6, 8 / 9)}
    # It has finished: the same command measures again.
    benchmark.script.main()
    assert len(benchmark.measured) == 9 + 8


def test_the_time_left_of_a_benchmark(benchmark, monkeypatch, capsys):
    """A round of the second takes four times as long as one of the first."""
    now = iter([0.0, 3.0, 3.0, 8.0, 8.0, 24.0, 24.0, 40.0])
    monkeypatch.setattr(benchmark.script.time, "perf_counter", lambda: next(now))
    benchmark.script.main()
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "round" in line and "of 2" in line
    ]
    assert [line.strip() for line in lines] == [
        "round 1 of 2",
        "round 2 of 2, about 0:00:27 left",  # 3 + 8 x 3
        "round 1 of 2, about 0:00:32 left",  # 8 s for 20: 80 takes 32
        "round 2 of 2, about 0:00:16 left",
    ]


def test_every_benchmark_has_a_share_of_the_time_left():
    script = load_script("benchmark")
    assert script.SECONDS.keys() == script.BENCHMARKS.keys()
    assert script.seconds_of_round("loop_overhead") == script.SECONDS["loop_overhead"] / 4


# ------------------------------------------------------------------------------------ chaos, scaling

RUN = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
time.sleep(0.2)
(folder / "metrics.jsonl").write_text(json.dumps({"split": "train", "step": 1}) + "\\n")
(folder / "model.safetensors").write_text("CONTENT")
(folder / "results.json").write_text(json.dumps({"resumed_from": 5}))
"""


@pytest.fixture
def chaos(monkeypatch, tmp_path):
    """chaos.py with a command that does next to nothing, and its folder."""
    (tmp_path / "script.py").write_text(RUN)
    words = ["--kills", "3", "--folder", str(tmp_path / "chaos")]
    command = ["--", sys.executable, "-S", str(tmp_path / "script.py")]
    monkeypatch.setattr(sys, "argv", ["chaos.py", *words, *command])
    return load_script("chaos"), tmp_path / "chaos"


def test_an_interrupted_chaos_run_continues(chaos, monkeypatch, capsys):
    script, folder = chaos
    rounds, run_with_kills = [], script.run_with_kills

    def interrupted(args, run, *more):
        rounds.append(run.name)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        more[1]["one process"] += 1  # as if a process had been killed
        return run_with_kills(SimpleNamespace(**vars(args) | {"kills": 0}), run, *more)

    monkeypatch.setattr(script, "run_with_kills", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.main()
    before = (folder / "reference" / "model.safetensors").stat().st_mtime_ns
    script.main()
    assert (folder / "reference" / "model.safetensors").stat().st_mtime_ns == before
    assert rounds == ["round_1", "round_2", "round_2", "round_3"]
    out = capsys.readouterr().out
    assert "continues: 2 figures are kept" in out
    assert "3 kills (3 x one process) in 3 run(s), 3 of which continued from a checkpoint" in out
    assert "left" in out and not (folder / "unfinished.json").exists()


def test_chaos_compares_all_results_but_those_of_a_start(tmp_path):
    script = load_script("chaos")
    for name, seconds, accuracy in (("a", 1, 0.5), ("b", 2, 0.5), ("c", 1, 0.6)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_text("the same")
        (folder / "metrics.jsonl").write_text(json.dumps({"split": "train", "loss": 1}) + "\n")
        figures = {"train_seconds": seconds, "resumed_from": seconds, "val_accuracy": accuracy}
        (folder / "results.json").write_text(json.dumps(figures))
    assert script.compare(tmp_path / "a", tmp_path / "b") is None
    assert script.compare(tmp_path / "a", tmp_path / "c") == "results.json differs"
    (tmp_path / "b" / "metrics.jsonl").write_text("")
    assert script.compare(tmp_path / "a", tmp_path / "b") == "metrics.jsonl differs"


def test_chaos_fails_if_no_run_continued(chaos, monkeypatch):
    script, folder = chaos
    (folder.parent / "script.py").write_text(RUN.replace('"resumed_from": 5', '"resumed_from": 0'))
    with pytest.raises(RunFailed, match="3 kills, and no run continued from a checkpoint: give"):
        script.main()
    monkeypatch.setattr(sys, "argv", [*sys.argv[:6], "accelrate", "launch"])
    with pytest.raises(UserError, match="cannot start accelrate: No such file"):
        script.main()


def test_chaos_starts_over_after_a_difference_and_ends_what_it_launched(chaos, monkeypatch, capsys):
    script, folder = chaos
    launched = []

    def waits(args, run, seconds, kills, rng, log):
        with script.launched(args.command, run, log) as launcher:
            launched.append(launcher)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, "run_with_kills", waits)
        with pytest.raises(KeyboardInterrupt):
            script.main()
    assert launched[0].returncode == -9
    monkeypatch.setattr(script, "compare", lambda *_: "model.safetensors differs")
    with pytest.raises(SystemExit, match="1"):
        script.main()
    assert "model.safetensors differs" in capsys.readouterr().out
    assert (folder / "round_1").exists() and not (folder / "unfinished.json").exists()


def test_an_interrupted_measurement_of_scaling_continues(tmp_path, capsys):
    script, calls = load_script("predict_scaling"), []
    accelerator = SimpleNamespace(num_processes=1, is_main_process=True)
    args = SimpleNamespace(output_dir=str(tmp_path), parameters=10, layers=2, batch=4)

    def figure(name, value):
        def measure():
            calls.append(name)
            if value is None:
                raise KeyboardInterrupt
            return value

        return measure

    first = {"a": figure("a", 1.5), "b": figure("b", None)}
    with pytest.raises(KeyboardInterrupt):
        script.measure_each(accelerator, args, first)
    assert "1 of 2 figures, about 0:00:00 left" in capsys.readouterr().out
    second = {"a": figure("a", 9.0), "b": figure("b", script.Link(1.0, 2.0))}
    assert script.measure_each(accelerator, args, second) == {"a": 1.5, "b": (1.0, 2.0)}
    assert calls == ["a", "b", "b"] and os.listdir(tmp_path) == []
