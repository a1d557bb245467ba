"""Which points of a log the curves have, and what an extra that fails costs."""

import json

import pytest

from utils.report import plots

TEXT = 'said {"split": "val", "step": 1, "loss": 7}'
LOG = [
    {"split": "train", "step": 1, "epoch": 0.1, "loss": 2.5, "lr": 0.1},
    {"split": "train", "step": 2, "epoch": 0.2, "loss": 1e-5, "lr": 0.1, "mean_iou": 9.0},
    {"split": "sample", "step": 2, "text": TEXT},
]
EVALUATION = {"count": 3, "mean_iou_standard_error": 0.1, "mean_iou": 0.5, "loss": 2.0, "f1": 0.3}


@pytest.mark.parametrize(
    ("evaluation", "labels", "expected"),
    [
        (EVALUATION, None, {"loss": "loss", "mean_iou": "mean iou"}),
        (EVALUATION, {"loss": "an axis"}, {"loss": "an axis", "mean_iou": "mean iou"}),
        ({"score": 1.0, "loss": 2.0}, None, {"loss": "loss"}),
        (None, None, {"loss": "loss"}),
    ],
)
def test_the_curves_are_of_what_a_run_logs(evaluation, labels, expected, tmp_path, monkeypatch):
    lines = list(LOG)
    if evaluation:
        lines.append({"split": "val", "step": 4, "epoch": 0.5, **evaluation})
    torn = '{"split": "train", "step": 3, "loss": 4'
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines) + torn)
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.extend([path, *figure.axes]))
    assert plots.curves(tmp_path, labels)
    path, *axes = drawn
    assert path == tmp_path / "curves.png"
    assert [axis.get_ylabel() for axis in axes] == list(expected.values())
    for axis, name in zip(axes, expected, strict=True):
        points = [[*zip(*line.get_data(), strict=True)] for line in axis.get_lines()]
        train = [(line["step"], line[name]) for line in LOG if name in line]
        held_out = [(4, evaluation[name])] if evaluation else []
        assert points == [part for part in (train, held_out) if part]


def test_an_extra_that_fails_costs_a_warning(tmp_path, capsys):
    for error, why in ((ZeroDivisionError(), "ZeroDivisionError"), (ValueError("a\nb "), "a\\nb")):
        with plots.optional("the plot"):
            raise error
        line = f"warning: the plot is missing ({type(error).__name__}: {why})\n"
        assert capsys.readouterr().err == line
    assert not plots.curves(tmp_path / "nowhere")
    assert capsys.readouterr().err.startswith("warning: a plot (curves) is missing (FileNotFound")
    figure, _ = plots.subplots(1, 1, figsize=(6, 4))
    plots.save(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
