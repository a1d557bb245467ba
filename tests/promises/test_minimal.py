"""train_minimal.py learns, keeps its best checkpoint, and names mistakes."""

import pytest
from harness.launches import ROOT, as_if_killed, final_weights, metrics, results, run, scores

MINIMAL = "scripts/train_minimal.py"
ARGUMENTS = "--epochs 8 --log_every 20 --checkpoint_every 60"


def test_learns_and_keeps_the_best_checkpoint_with_the_score_of_its_own_step(tmp_path):
    run(None, MINIMAL, ARGUMENTS, output_dir=tmp_path)
    accuracy = {line["step"]: line["accuracy"] for line in metrics(tmp_path, "val")}
    assert list(accuracy) == list(range(30, 241, 30))
    assert results(tmp_path)["val_accuracy"] == accuracy[240] >= 0.95
    kept = scores(tmp_path)
    assert all(score == accuracy.get(step) for step, score in kept.items())
    best = max(accuracy, key=lambda step: (accuracy[step], step))  # of equal ones the newest
    assert best in kept and 240 in kept and len(kept) <= 3
    assert results(tmp_path)["best_checkpoint"] == f"step_{best:08}"


@pytest.mark.parametrize(
    ("line", "mistake", "error", "most"),
    [
        ("nn.Linear(2, 64)", "nn.Linear(3, 64)", "RuntimeError: mat1 and mat2 shapes cannot", 25),
        ("import torch\n", "import torch, nowhere\n", "ModuleNotFoundError: No module named", 8),
    ],
)
def test_a_mistake_in_a_copy_is_one_short_traceback(line, mistake, error, most, tmp_path):
    """Of one process, with the lines of the copy; the launcher's report has its last line."""
    (tmp_path / "utils").symlink_to(ROOT / "utils")
    text = (ROOT / MINIMAL).read_text()
    assert text.count(line) == 1
    (tmp_path / "train_mine.py").write_text(text.replace(line, mistake))
    done = run("2cpu", "train_mine.py", root=tmp_path, output_dir=tmp_path / "run", check=False)
    ours, _, report = done.stderr.partition("multiprocessing/api.py")
    assert done.returncode == 1 and len(ours.splitlines()) <= most, done.stderr
    assert ours.count(error) == 1 and "train_mine.py" in ours
    assert f"traceback : {error}" in report and "Traceback" not in report.split("FAILED")[1]


def test_the_example_of_an_own_data_set_resumes_exactly(tmp_path):
    """That of utils/README.md, on one and two processes, and killed."""
    page = (ROOT / "utils" / "README.md").read_text()
    example = page.split("## Your Dataset")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "utils").symlink_to(ROOT / "utils")
    text = (ROOT / MINIMAL).read_text().replace("def main():", f"{example}\n\ndef main():")
    (tmp_path / "train_mine.py").write_text(text)
    words = "--epochs 4 --log_every 1 --checkpoint_every 5 --keep_checkpoints 99"
    made = {config: tmp_path / config for config in ("cpu", "2cpu", "killed")}
    for config in ("cpu", "2cpu"):
        run(config, "train_mine.py", words, root=tmp_path, output_dir=made[config])
    losses = [[line["loss"] for line in metrics(made[name], "train")] for name in ("cpu", "2cpu")]
    assert losses[0] == pytest.approx(losses[1], rel=0.2)  # dropout depends on the division
    assert results(made["cpu"])["val_accuracy"] > 0.9
    as_if_killed(made["2cpu"], made["killed"], 10)
    run("2cpu", "train_mine.py", words, root=tmp_path, output_dir=made["killed"])
    assert results(made["killed"])["resumed_from"] == 10
    assert final_weights(made["killed"]) == final_weights(made["2cpu"])
