"""Long tools keep what they measured: they write after each figure and continue after an interruption."""

import json

import pytest

from utils.report.measurements import Measurements


def test_a_figure_is_measured_once_until_all_are_finished(tmp_path, capsys):
    path, calls = tmp_path / "new" / "folder" / "unfinished.json", []

    def measure(value):
        calls.append(value)
        return {"seconds": value}

    kept = Measurements(path, {"rounds": 2})
    assert kept.get("a", lambda: measure(1.5)) == {"seconds": 1.5} and capsys.readouterr().out == ""
    again = Measurements(path, {"rounds": 2})
    assert again.get("a", lambda: measure(9)) == {"seconds": 1.5} and calls == [1.5]
    assert capsys.readouterr().out == f"continues: 1 figures are kept from {path}\n"
    assert again.get("b", lambda: measure(2.5)) == {"seconds": 2.5}
    both = {"a": {"seconds": 1.5}, "b": {"seconds": 2.5}}
    assert Measurements(path, {"rounds": 2}).values == both
    again.finish()
    assert again.values == {} and not path.exists()
    again.finish()


@pytest.mark.parametrize(
    ("owner", "name", "says"),
    [
        ("utils.report.measurements.socket", "gethostname", "machine"),
        ("utils.report.measurements.os", "cpu_count", "machine"),
        ("utils.run.record", "versions", "versions"),
        ("utils.run.record", "script_hash", "script"),
        ("utils.run.record", "git_commit", "git commit"),
        (None, None, "arguments"),
    ],
)
def test_figures_of_something_else_are_not_mixed(owner, name, says, tmp_path, monkeypatch, capsys):
    path = tmp_path / "unfinished.json"
    Measurements(path, {"rounds": 2}).keep("a", 1)
    if owner:
        monkeypatch.setattr(f"{owner}.{name}", lambda: "other")
    kept = Measurements(path, {"rounds": 2 if owner else 3})
    line = f"starts over: another {says} than when {path} was written\n"
    assert capsys.readouterr().out == line and kept.values == {} and not path.exists()


def test_a_condition_that_is_new_or_gone_counts(tmp_path, capsys):
    path = tmp_path / "unfinished.json"
    Measurements(path, {}).keep("a", 1)
    kept = json.loads(path.read_text())
    kept["conditions"]["gpu"] = "H100"
    del kept["conditions"]["versions"]
    path.write_text(json.dumps(kept))
    assert Measurements(path, {}).values == {}
    assert "another gpu, versions than" in capsys.readouterr().out
