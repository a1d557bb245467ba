"""Which points of a log the curves have, and how much of a figure its axes fill."""

import json

import pytest

from utils.report import plots


def test_a_log_is_drawn_point_by_point(tmp_path):
    text = 'said {"split": "val", "step": 1, "loss": 7}'
    lines = [
        {"split": "train", "step": 1, "epoch": 0.1, "loss": 2.5, "lr": 0.1},
        {"split": "val", "step": 1, "epoch": 0.1, "accuracy": 0.5, "loss": 2},
        {"split": "train", "step": 2, "epoch": 0.2, "loss": 1e-5, "lr": 0.1, "train_loss": 9.0},
        {"split": "sample", "step": 2, "text": text},
        {"split": "val", "step": 2, "text": text, "accuracy": 0.75},
    ]
    torn = '{"split": "train", "step": 3, "loss": 4'
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + torn)
    assert plots.read_curves(path, ["train", "val", "test"], ["loss", "accuracy"]) == {
        ("train", "loss"): [(1, 2.5), (2, 1e-5)],
        ("val", "loss"): [(1, 2)],
        ("val", "accuracy"): [(1, 0.5), (2, 0.75)],
    }


@pytest.mark.parametrize(
    ("options", "least", "most"), [({}, 0.85, 1), ({"rect": (0, 0, 0.5, 1)}, 0.35, 0.5)]
)
def test_the_axes_fill_their_part_of_the_figure(options, least, most, tmp_path):
    figure, axis = plots.subplots(1, 1, figsize=(6, 4))
    plots.save(figure, tmp_path / "figure.png", **options)
    place = axis.get_position()
    assert least < place.width < most and place.x1 < most and place.height > 0.8


@pytest.mark.parametrize(
    ("evaluation", "panels"),
    [({"loss": 2.0, "count": 3, "mean_iou": 0.5, "mean_iou_standard_error": 0.1, "f1": 0.3}, 2)]
    + [({"loss": 2.0, "score": 1.0}, 1), (None, 1)],
)
def test_the_curves_are_of_what_a_run_logs(evaluation, panels, tmp_path, monkeypatch):
    lines = [{"split": "train", "step": step, "epoch": 0.5, "loss": 1.0} for step in (1, 2)]
    if evaluation:
        lines.append({"split": "val", "step": 2, "epoch": 0.5, **evaluation})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.extend(figure.axes))
    assert plots.curves(tmp_path)
    assert [axis.get_ylabel() for axis in drawn] == ["loss", "mean iou"][:panels]
