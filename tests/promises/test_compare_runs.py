"""compare_runs.py: several runs in one table and one plot. Its functions have unit tests."""

from harness.data import made_run
from harness.launches import run
from PIL import Image

SCRIPT = "scripts/tools/compare_runs.py"


def test_runs_without_an_evaluation_or_a_step_so_far(tmp_path):
    log = made_run(tmp_path / "a") / "metrics.jsonl"
    log.write_text(log.read_text().splitlines()[0] + "\n")
    made_run(tmp_path / "b")
    (made_run(tmp_path / "new") / "metrics.jsonl").write_text("")
    words = [str(tmp_path / name) for name in ("a", "b", "new")]
    done = run(None, SCRIPT, words, output_dir=tmp_path / "out")
    header, *lines = done.stdout.splitlines()
    assert "seconds in steps  last accuracy" in header
    assert lines[0].split() == ["a", "10", "200", "5.0", "-", "-"]
    assert lines[1].split() == ["b", "20", "400", "7.5", "0.5000", "0.7500"]
    assert lines[2].split() == ["new", "0", "0", "0.0", "-", "-"]
    assert min(Image.open(tmp_path / "out" / "compare_runs.png").size) > 700
