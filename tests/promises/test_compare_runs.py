"""compare_runs.py: several runs in one table and one plot."""

import json
import re
import tracemalloc

import pytest
from harness.launches import SMALL, load_script, run
from PIL import Image

from utils.run.failures import UserError

SCRIPT = "scripts/compare_runs.py"


def made_run(folder, seconds=(0.5, 0.25), **arguments):
    """Writes the files of a run with two log lines, ten steps apart, and three evaluations.

    The best score has neither the highest nor the lowest loss.
    """
    folder.mkdir(parents=True)
    topology = {"processes": arguments.pop("processes", 1), "mixed_precision": "no"}
    arguments = {"batch_size": 20, "lr": 0.1, "log_every": 10, **arguments}
    (folder / "args.json").write_text(json.dumps({"arguments": arguments, "topology": topology}))
    lines = [
        {"split": "train", "step": 10 * (i + 1), "loss": 2.0 - i, "step_seconds": step_seconds}
        for i, step_seconds in enumerate(seconds)
    ]
    lines += [
        {"split": "val", "step": 5, "loss": 1.9, "accuracy": 0.25, "score": 0.25},
        {"split": "val", "step": 10, "loss": 1.5, "accuracy": 0.75, "score": 0.75},
        {"split": "val", "step": 20, "loss": 1.2, "accuracy": 0.5, "score": 0.5},
    ]
    cut_off = '{"split": "train", "step": 30, "loss": 2.'  # it was killed while it wrote
    text = "".join(f"{json.dumps(line)}\n" for line in lines) + cut_off
    (folder / "metrics.jsonl").write_text(text)
    return folder


@pytest.mark.slow
def test_two_real_runs(reference, tmp_path):
    one, two = reference("cpu").folder, reference("2cpu", 2).folder
    done = run(None, SCRIPT, [str(one), str(two)], output_dir=tmp_path)
    header, first, second, *differing = done.stdout.splitlines()[:-1]
    names = "run steps samples seconds last accuracy accuracy at best score"
    assert header.split() == names.split()
    differing = [line.split() for line in differing]
    assert differing == [[], ["argument", "cpu", "2cpu"], ["processes", "1", "2"]]
    assert first.split()[:3] == ["cpu", "14", "840"] and second.split()[0] == "2cpu"
    assert min(Image.open(tmp_path / "compare_runs.png").size) > 700
    assert "--model net" in SMALL  # so that both have the same accuracy
    assert first.split()[4:] == second.split()[4:]


def test_time_samples_and_differing_arguments(tmp_path):
    script = load_script("compare_runs")
    other = dict(lr=0.3, log_every=5, another_scripts=True, processes=2)
    folders = [made_run(tmp_path / "a" / "run"), made_run(tmp_path / "b" / "run", **other)]
    runs = [script.read_run(folder) for folder in folders]
    script.name_apart(runs, folders)
    train, evaluations = runs[0]["train"], runs[0]["evaluations"]
    assert train["samples"].tolist() == [200, 400] and train["seconds"].tolist() == [5.0, 7.5]
    times = [(line["samples"], line["seconds"]) for line in evaluations]
    assert times == [(100, 2.5), (200, 5.0), (400, 7.5)]
    lines = script.table(runs, "accuracy").splitlines()
    _, first, second, _, header, *differing = (line.split() for line in lines)
    assert first == ["a/run", "20", "400", "7.5", "0.5000", "0.7500"] and second[0] == "b/run"
    # --log_every does not change results.
    assert header == ["argument", "a/run", "b/run"]
    assert differing == [["lr", "0.1", "0.3"], ["processes", "1", "2"]]
    # At the highest score, not at the lowest loss.
    assert script.table(runs, "loss").splitlines()[1].split()[4:] == ["1.2000", "1.5000"]
    assert "argument" not in script.table(runs[:1], "accuracy")


def test_without_scores_the_last_evaluation_counts(tmp_path):
    """A test split never chooses a checkpoint, so its lines have no score."""
    script = load_script("compare_runs")
    log = made_run(tmp_path / "run") / "metrics.jsonl"
    log.write_text(re.sub(r', "score": [\d.]+', "", log.read_text().replace('"val"', '"test"')))
    one = script.read_run(tmp_path / "run")
    assert script.table([one], "accuracy").splitlines()[1].split()[4:] == ["0.5000", "0.5000"]


def test_smoothing_has_no_bias_towards_the_first_value():
    smooth = load_script("compare_runs").smooth
    assert smooth([4.0, 4.0, 4.0], 0.9) == pytest.approx([4, 4, 4])
    assert smooth([1.0, 3.0], 0.5) == pytest.approx([1, (1 * 0.25 + 3 * 0.5) / 0.75])
    assert smooth([1.0, 3.0], 0.0) == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{a}", "{a}"], "the same run is given twice"),
        (["{a}", "{empty}"], "is not the folder of a run"),
        (["{a}", "--metric", "f1"], "no evaluation metric f1 in common: they have accuracy, loss"),
    ],
)
def test_bad_input_is_one_line(arguments, says, tmp_path):
    places = {"a": made_run(tmp_path / "a"), "empty": tmp_path}
    words = [word.format(**places) for word in arguments]
    done = run(None, SCRIPT, words, output_dir=tmp_path / "out", check=False)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "record", [{"arguments": {"lr": 1}}, {"arguments": {"batch_size": 1}}, {"arguments": 3}, [], 3]
)
def test_the_folder_of_another_project_is_one_line(record, tmp_path):
    (made_run(tmp_path / "run") / "args.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="run is not the folder of a run"):
        load_script("compare_runs").read_run(tmp_path / "run")


def test_nothing_in_common(tmp_path):
    script = load_script("compare_runs")
    runs = [script.read_run(made_run(tmp_path / name)) for name in "ab"]
    runs[0]["evaluations"] = [{"split": "val", "step": 1, "f1": 0.5}]
    with pytest.raises(UserError, match="in common: they have accuracy, f1, loss"):
        script.choose_metric(runs, None)


@pytest.mark.parametrize("evaluated", ["b", ""])
def test_runs_without_an_evaluation_or_a_step_so_far(evaluated, tmp_path):
    for name in "ab":
        log = made_run(tmp_path / name) / "metrics.jsonl"
        if name not in evaluated:
            log.write_text(log.read_text().splitlines()[0] + "\n")
    (made_run(tmp_path / "new") / "metrics.jsonl").write_text("")
    words = [str(tmp_path / name) for name in ("a", "b", "new")]
    done = run(None, SCRIPT, words, output_dir=tmp_path / "out")
    header, *lines = done.stdout.splitlines()
    assert header.split()[5] == ("accuracy" if evaluated else "loss")
    assert lines[0].split() == ["a", "10", "200", "5.0", "-", "-"]
    assert (lines[1].split()[4:] == ["0.5000", "0.7500"]) == bool(evaluated)
    assert lines[2].split() == ["new", "0", "0", "0.0", "-", "-"]
    assert min(Image.open(tmp_path / "out" / "compare_runs.png").size) > 700


def test_a_long_log_takes_three_numbers_of_memory_a_line(tmp_path):
    script, count = load_script("compare_runs"), 20_000
    folder = made_run(tmp_path / "run", seconds=[0.1] * count)
    tracemalloc.start()
    one = script.read_run(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(one["train"]["loss"]) == count and peak < 200 * count


def test_an_output_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    folder = tmp_path / "file" / "out"
    words = [str(made_run(tmp_path / "a"))]
    done = run(None, SCRIPT, words, output_dir=folder, check=False)
    says = f"error: cannot write to {folder}: Not a directory; give another --output_dir\n"
    assert done.returncode == 2 and done.stderr == says
