"""What each tracker gets, and the profile. (promises/test_tracking.py starts runs.)"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from harness import fakes

from utils.report import tracking
from utils.report.tracking import Trackers
from utils.run.failures import UserError

ARGUMENTS = {"lr": 0.1, "model": None}


@pytest.fixture(autouse=True)
def address(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://somewhere")


def tracker(name):
    """Stands for a tracker of Accelerate."""
    made = Mock()
    made.name = name
    return made


def started(*trackers, step=30, fails=None):
    """The trackers of a run in the folder `a name`, which continues after `step`."""
    made, projects = {tracker.name: tracker for tracker in trackers}, []
    accelerator = SimpleNamespace(projects=projects)

    def init_trackers(project, config, init_kwargs):
        (name,) = accelerator.log_with
        projects.append((project, config, init_kwargs))
        accelerator.trackers.append(made[name])
        if name == fails:
            raise ConnectionError("no network")

    accelerator.init_trackers = init_trackers
    run = SimpleNamespace(accelerator=accelerator, path=Path("runs/a name"), run_id="an id")
    run.identity = SimpleNamespace(arguments=ARGUMENTS)
    run.progress = {"step": step} if step else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "get_available_trackers", lambda: [*made])
        patch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", made)
        logger = Trackers(SimpleNamespace(track=",".join(made) or "none", output_dir="runs/a name"))
    logger.start(run)
    return logger, run


def test_what_an_accelerator_is_given(monkeypatch):
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["tensorboard", "wandb"])
    for track, names in (("none", None), (" tensorboard , wandb", ["tensorboard", "wandb"])):
        options = Trackers(SimpleNamespace(track=track, output_dir="runs/a")).options()
        assert options == {"log_with": names, "project_dir": "runs/a/tensorboard"}
    for track in ("wand", "aim"):
        says = rf"--track {track}: .*\(pip install {track}\); use none, or one or more of aim, "
        with pytest.raises(UserError, match=says):
            Trackers(SimpleNamespace(track=track, output_dir="runs/a"))


@pytest.mark.parametrize("step", [30, 0])
def test_each_tracker_continues_its_run_in_its_own_words(step, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/a project.py"])
    if step:
        monkeypatch.delenv("MLFLOW_TRACKING_URI")
    _, run = started(tracker("tensorboard"), tracker("wandb"), step=step)
    ours = Path("runs/a name/mlruns").absolute().as_uri()
    assert os.environ["MLFLOW_TRACKING_URI"] == (ours if step else "https://somewhere")
    again = {"resume": "allow"}
    options = {
        "tensorboard": {"purge_step": step + 1},
        "wandb": {"name": "a name", "id": "an id", **again, "dir": os.path.abspath("runs/a name")},
        "trackio": {"name": "a name", **again},
        "mlflow": {"run_name": "a name"},
    }
    told = [("a project", config, options) for config in (None, ARGUMENTS)]
    assert run.accelerator.projects == told


def test_each_tracker_gets_what_it_shows_once_and_one_that_fails_costs_no_other(capsys):
    board, wandb, mlflow, away = map(tracker, ("tensorboard", "wandb", "mlflow", "away"))
    broken = tracker("broken")
    broken.log.side_effect = ConnectionError("it is away")
    wandb.finish.side_effect = OSError("full")  # `end_training` would raise it
    logger, run = started(broken, away, board, wandb, mlflow, fails="away")
    line = "warning: what --track away would show is missing (ConnectionError: no network)\n"
    assert capsys.readouterr().err == line
    logger.log({"loss": 1.0}, 5)
    logger.log({"loss": 2.0}, 6, sent_before=True)
    logger.log_images({"a": "pixels"}, 7)
    run.results = {"test_loss": 1.0, "val_loss": 2.0, "global_step": 9, "train_loss": 3.0}
    logger.finish(run)
    said = "warning: what --track broken would show from here on is missing (ConnectionError: it "
    ended = said.replace("broken", "wandb").replace("ConnectionError: it ", "OSError: full)\n")
    assert capsys.readouterr().err == f"{said}is away)\n{ended}" and run.accelerator.trackers == []
    assert broken.log.call_count == 1 and not away.log.called
    first = call.log({"loss": 1.0}, step=5)
    assert mlflow.method_calls == [first, call.finish()]
    images = call.log_images({"a": "pixels"}, step=7)
    assert wandb.method_calls == [first, images, call.finish()]
    final = {"final/test_loss": 1.0, "final/val_loss": 2.0}
    assert board.method_calls == [
        first,
        call.log({"loss": 2.0}, step=6),
        call.log_images({"a": "pixels"}, step=7, dataformats="NHWC"),
        call.tracker.add_hparams({"lr": 0.1}, final, run_name=".", global_step=9),
        call.finish(),
    ]


def test_the_profiler_records_three_steps_on_one_process(tmp_path):
    for accelerator, wanted in (
        (fakes.accelerator(), False),
        (fakes.accelerator(2, rank=1), True),
        (fakes.accelerator(), True),
        (fakes.accelerator(), True),  # the second run of the same command
    ):
        profile = tracking.start_profiler(accelerator, tmp_path, wanted)
        for _ in range(12):
            torch.ones(2, 3) @ torch.ones(3, 5)
            profile.step()
        profile.stop()
        assert (wanted and accelerator.is_main_process) == bool(list(tmp_path.iterdir()))
    trace = (tmp_path / "profile" / "trace.json").read_text().replace("\n", "")
    assert [f'"ProfilerStep#{step}"' in trace for step in range(7)] == [0, 0, 1, 1, 1, 0, 0]
    assert "[2, 3], [3, 5]" in trace  # the shapes
    assert "aten::mm" in (tmp_path / "profile" / "operators.txt").read_text()
