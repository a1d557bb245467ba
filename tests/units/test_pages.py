"""What the pages and the scripts say alike: the table of figures, and what a probability is."""

import json
import sys

import pytest
from harness.launches import ROOT, load_script

from utils.run.failures import UserError


def test_the_benchmark_table_is_that_of_the_record(monkeypatch, capsys):
    """.github/benchmark.json is what benchmark.py wrote, and names only benchmarks and options that
    exist.
    """
    benchmark = load_script("benchmark")
    record = json.loads((ROOT / ".github" / "benchmark.json").read_text())
    assert benchmark.table(record) in (ROOT / "scripts" / "README.md").read_text()
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--help"])
    with pytest.raises(SystemExit):
        benchmark.parse_args()
    flags = capsys.readouterr().out
    for name, figure in record["figures"].items():
        words = figure["command"].split()
        assert words[:2] == ["python", "scripts/benchmark.py"] and words[2] in benchmark.BENCHMARKS
        assert name.startswith(words[2])
        assert all(word in flags for word in words if word.startswith("--"))


@pytest.mark.parametrize(
    ("script", "flag", "bad"),
    [
        ("train_cifar", "--label_smoothing", "2"),
        ("train_cifar", "--val_fraction", "-0.1"),
        ("train_images", "--label_smoothing", "1"),
        ("train_images", "--flip", "2"),
        ("train_images", "--min_scale", "1.5"),
        ("train_gpt", "--dropout", "2"),
        ("train_gpt", "--dropout", "nan"),
    ],
)
def test_a_probability_that_cannot_be_is_one_line(script, flag, bad, monkeypatch):
    """Alike in all scripts, and not an error of torch after the data was loaded."""
    words = [f"{script}.py", "--dataset", "synthetic", flag, bad]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(UserError, match=f"{flag}: must be"):
        load_script(script).parse_args()
