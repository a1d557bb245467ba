"""Functions of compare_runs.py."""

import re

import numpy as np
from harness.data import made_run
from harness.launches import load_script
from safetensors.numpy import save_file

compare_runs = load_script("compare_runs")


def test_time_samples_and_differing_arguments(tmp_path):
    other = dict(lr=0.3, log_every=5, another_scripts=True, processes=2)
    folders = [made_run(tmp_path / "a" / "run"), made_run(tmp_path / "b" / "run", **other)]
    runs = [compare_runs.read_run(folder) for folder in folders]
    compare_runs.name_apart(runs, folders)
    train = {name: values.tolist() for name, values in runs[0]["train"].items()}
    seconds, samples = [5.0, 7.5], [200, 400]
    assert train == dict(step=[10, 20], loss=[2.0, 1.0], samples=samples, seconds=seconds)
    times = [(line["samples"], line["seconds"]) for line in runs[0]["evaluations"]]
    assert times == [(100, 2.5), (200, 5.0), (400, 7.5)]
    lines = compare_runs.table(runs, "accuracy").splitlines()
    _, first, second, _, header, *differing = (line.split() for line in lines)
    assert first == ["a/run", "20", "400", "7.5", "0.5000", "0.7500"] and second[0] == "b/run"
    # --log_every does not change results.
    assert header == ["argument", "a/run", "b/run"]
    assert differing == [["lr", "0.1", "0.3"], ["processes", "1", "2"]]
    # At the highest score, not at the lowest loss.
    assert compare_runs.table(runs, "loss").splitlines()[1].split()[4:] == ["1.2000", "1.5000"]
    assert "argument" not in compare_runs.table(runs[:1], "accuracy")
    # A test split never chooses a checkpoint, so its lines have no score: the last one counts.
    log = folders[0] / "metrics.jsonl"
    log.write_text(re.sub(r', "score": [\d.]+', "", log.read_text().replace('"val"', '"test"')))
    tested = compare_runs.table([compare_runs.read_run(folders[0])], "accuracy").splitlines()
    assert tested[1].split()[4:] == ["0.5000", "0.5000"]


def test_the_largest_differences_from_the_first_run(tmp_path):
    folders = [made_run(tmp_path / name) for name in "abc"]
    for folder, last in zip(folders, (1.0, 1.25, 1.0), strict=True):
        weights = {"last": np.array([0.5, last], np.float32), "first": np.zeros(0, np.float32)}
        save_file(weights, folder / "model.safetensors")
    log = folders[1] / "metrics.jsonl"
    log.write_text(log.read_text().replace('"loss": 1.0', '"loss": 1.5'))
    a, b, c = map(compare_runs.read_run, folders)
    assert compare_runs.differences(a, b) == (
        "b and a: training losses differ by at most 0.5, final weights differ by at most 0.25"
    )
    assert compare_runs.differences(b, c).endswith("most 0.5, final weights differ by at most 0.25")
    save_file({"last": np.zeros(3)}, c["weights"])  # another model
    assert compare_runs.differences(a, c) == "c and a: training losses differ by at most 0"
    c["train"]["step"] += 1
    assert compare_runs.differences(a, c) is None
