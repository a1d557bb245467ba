"""Functions of evaluate.py: what is written of each image agrees with the scores."""

import csv
from types import SimpleNamespace

import pytest
import torch
from harness.launches import load_script, results

evaluate = load_script("evaluate")
GRAY = torch.zeros(99, 3, 8, 8, dtype=torch.uint8)
IMAGES = SimpleNamespace(
    __getitems__=lambda ids: {"images": GRAY[: len(ids)]}, name="image {}".format
)


def written(folder, logits, labels, names):
    """The results and the rows of the table that are written of these outputs."""
    outputs = evaluate.of_each_image(logits, labels)
    saved = SimpleNamespace(file="model.safetensors", run=folder)
    args = SimpleNamespace(output_dir=str(folder), tta=False)
    evaluate.write_evaluation(args, saved, IMAGES, outputs, names)
    return results(folder), list(csv.DictReader((folder / "predictions.csv").open()))


def test_predictions_and_accuracy_agree_where_outputs_are_equal(tmp_path):
    """Of equal outputs `argmax` and `topk` choose different ones."""
    labels, names, logits = torch.arange(20) % 10, [*"abcdefghij"], torch.zeros(20, 10)
    found, rows = written(tmp_path, logits, labels, names)
    predicted = names[logits.topk(5).indices[0, 0]]
    assert found["val_accuracy"] == pytest.approx(0.1)
    assert found["per_class"] == {name: float(name == predicted) for name in names}
    assert found["val_top5"] == pytest.approx(0.5) and "class_6" not in rows[0]
    assert [row["class_1"] for row in rows] == [predicted] * 20
    assert [float(rows[0][f"probability_{rank}"]) for rank in range(1, 6)] == [0.1] * 5
    assert [row["true_class"] for row in rows] == [*names, *names] and rows[3]["file"] == "image 3"


def test_unreadable_images_are_named_and_do_not_count(tmp_path, capsys):
    logits, labels = torch.tensor([[2.0, 0.0]] * 3), torch.tensor([0, -1, 1])
    found, rows = written(tmp_path, logits, labels, ["a", "b"])
    assert found["val_accuracy"] == 0.5 and found["val_images"] == 2
    assert [row["true_class"] + row["class_1"] for row in rows] == ["aa", "", "ba"]
    printed = capsys.readouterr().out
    assert "unreadable, and left out: image 1\n1 of 3 images could not be read" in printed
    assert "50.00% of 2 val images correct, loss" in printed
