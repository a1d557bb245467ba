"""scripts/benchmarks/benchmark.py keeps the rounds that it has finished, and says how much time is left."""

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
    script, measuring = load_script("benchmark"), load_script("measuring")
    state = SimpleNamespace(script=script, measured=[], fail_at=None, folder=tmp_path / "out")

    @measuring.kept
    def measure(what):
        if len(state.measured) == state.fail_at:
            raise Interrupted
        state.measured.append(what)
        return [float(len(state.measured)), {"of": what}]

    def made(name):
        def run(args, rounds):
            ours = []
            for _ in rounds.each():
                one, about = measure(rounds, f"{name} ours")
                two, _ = measure(rounds, f"{name} theirs")
                assert about == {"of": f"{name} ours"}
                ours.append(one / two)
            return {name: (ours, "time, ratio")}

        return run

    monkeypatch.setattr(script, "BENCHMARKS", {name: made(name) for name in ("first", "second")})
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
    now = iter([0.0, 3.0, 3.0, 8.0, 8.0, 24.0, 24.0, 40.0])
    monkeypatch.setattr(load_script("measuring").time, "perf_counter", lambda: next(now))
    benchmark.script.main()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if " of 2" in line]
    left = ["", ", about 0:00:03 left", "", ", about 0:00:16 left"]
    assert lines == [f"round {1 + i % 2} of 2{note}" for i, note in enumerate(left)]
