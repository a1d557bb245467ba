"""scripts/benchmark.py keeps the rounds that it has finished, and says how much time is left."""

import json
import sys
from types import SimpleNamespace

import pytest
from harness.launches import load_script


class Interrupted(Exception):
    pass


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """benchmark.py with two benchmarks that measure numbers; `.fail_at` interrupts it."""
    script = load_script("benchmark")
    state = SimpleNamespace(script=script, measured=[], fail_at=None, folder=tmp_path / "out")

    class Rounds(script.Rounds):
        def __init__(self, *options):
            super().__init__(*options)
            state.rounds = self

    @script.kept
    def measure(what):
        if len(state.measured) == state.fail_at:
            raise Interrupted
        state.measured.append(what)
        return [float(len(state.measured)), {"of": what}]

    def made(name):
        def run(args):
            ours = []
            for _ in state.rounds.each():
                (one, about), (two, _) = measure(f"{name} ours"), measure(f"{name} theirs")
                assert about == {"of": f"{name} ours"}
                ours.append(one / two)
            return {name: (ours, "time, ratio")}

        return run

    monkeypatch.setattr(script, "Rounds", Rounds)
    monkeypatch.setattr(script, "BENCHMARKS", {name: made(name) for name in ("first", "second")})
    monkeypatch.setattr(script, "SECONDS", {"first": 10, "second": 40})
    words = ["benchmark.py", "--rounds", "2", "--output_dir", str(state.folder)]
    monkeypatch.setattr(sys, "argv", words)
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
    found = figures(benchmark.folder).items()
    values = {name: (figure["min"], figure["max"]) for name, figure in found}
    assert values == {"first": (1 / 2, 3 / 4), "second": (5 / 6, 8 / 9)}
    # It has finished: the same command measures again.
    benchmark.script.main()
    assert len(benchmark.measured) == 9 + 8


def test_the_time_left_of_a_benchmark(benchmark, monkeypatch, capsys):
    """A round of the second takes four times as long as one of the first."""
    now = iter([0.0, 3.0, 3.0, 8.0, 8.0, 24.0, 24.0, 40.0])
    monkeypatch.setattr(benchmark.script.time, "perf_counter", lambda: next(now))
    benchmark.script.main()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if " of 2" in line]
    assert lines == [
        "round 1 of 2",
        "round 2 of 2, about 0:00:27 left",  # 3 + 8 x 3
        "round 1 of 2, about 0:00:32 left",  # 8 s for 20: 80 takes 32
        "round 2 of 2, about 0:00:16 left",
    ]


def test_every_benchmark_has_a_share_of_the_time_left():
    script = load_script("benchmark")
    assert script.SECONDS.keys() == script.BENCHMARKS.keys()
    assert script.seconds_of_round("loop_overhead") == script.SECONDS["loop_overhead"] / 4
