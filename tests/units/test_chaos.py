"""scripts/tools/chaos.py: which differences between two runs count."""

import json

import pytest
from harness.launches import load_script

RESULTS = {"train_seconds": 1, "resumed_from": 0, "val_accuracy": 0.5}


def written(folder, line=None, results=None, weights=("model.safetensors", "the same")):
    folder.mkdir()
    (folder / weights[0]).write_text(weights[1])
    lines = [{"split": "train", "loss": 1, "step_seconds": 2}, {"split": "checkpoint"}]
    if line is not None:
        lines = [line]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "results.json").write_text(json.dumps(RESULTS | (results or {})))
    return folder


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({}, None),
        ({"results": {"train_seconds": 2, "resumed_from": 9, "peak_memory_bytes": 1}}, None),
        ({"line": {"split": "train", "loss": 1, "step_seconds": 9, "slow_rank": 1}}, None),
        ({"line": {"split": "train", "loss": 2}}, "metrics.jsonl differs"),
        ({"results": {"val_accuracy": 0.6}}, "results.json differs"),
        ({"weights": ("model.safetensors", "others")}, "model.safetensors differs"),
        ({"weights": ("other.txt", "the same")}, "the weights are in other files"),
    ],
)
def test_all_results_count_but_those_of_a_start_and_of_the_clock(other, says, tmp_path):
    compare = load_script("chaos").compare
    assert compare(written(tmp_path / "a"), written(tmp_path / "b", **other)) == says
