"""benchmark.py: what it writes, not how fast anything is."""

import json

import pytest
from conftest import load_script, run
from PIL import Image

SCRIPT = "scripts/benchmark.py"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [("speed", "no benchmark is called speed: choose from loop_overhead,"), ("gpt", "the benchmark gpt needs data: --text")],
)
def test_bad_input_is_one_line(arguments, says, tmp_path):
    done = run(None, SCRIPT, arguments, output_dir=tmp_path / "out", check=False)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_table_has_every_figure():
    figures = {"a/b": dict(median=1.234, min=1.0, max=2.0, n=3, unit="time, ratio", command="python ...")}
    record = {"hardware": "2 cores of X", "versions": {"torch": "2.15.0"}, "date": "2026-11-22", "figures": figures}
    table = load_script("benchmark").table(record)
    assert "2 cores of X, torch 2.15.0, 2026-11-22" in table
    assert "| `a/b` | 1.23 | 1 to 2 | 3 | time, ratio |" in table


@pytest.mark.slow
def test_writes_figures_a_table_and_a_picture(tmp_path):
    names = ["pipeline_speedup", "memory", "startup_ratio", "picture_loading", "time_to_accuracy"]
    done = run(None, SCRIPT, ["--quick", "--rounds", "1", "--images", "synthetic", *names], output_dir=tmp_path)
    record = json.loads((tmp_path / "benchmark.json").read_text())
    expected = {"pipeline_speedup", "memory", *(f"startup_ratio/train_{script}" for script in ("minimal", "cifar", "gpt"))}
    expected |= {"picture_loading/our", "picture_loading/cached"}
    expected |= {f"time_to_accuracy{part}" for part in ("", "/flops", "/accuracy")}
    assert record["figures"].keys() == expected and {"hardware", "versions", "date"} <= record.keys()
    for name, figure in record["figures"].items():
        assert figure["n"] == 1 and figure["min"] == figure["median"] == figure["max"] > 0
        assert figure["command"].startswith(f"python scripts/benchmark.py {name.partition('/')[0]}")
        assert name in (tmp_path / "benchmark.md").read_text() and name in done.stdout
    assert min(Image.open(tmp_path / "benchmark.png").size) > 200
