"""What `utils.report.tracking` sends to each tracker. (promises/test_tracking.py starts runs.)"""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from utils.report import tracking
from utils.report.tracking import Trackers

ARGUMENTS = {"lr": 0.1, "model": None}


def tracker(name):
    """Stands for a tracker of Accelerate."""
    made = Mock()
    made.name = name
    return made


def started(*trackers, step=30, fails=None):
    """The trackers of a run in the folder `a name`, which continues after `step`."""
    made, projects = {tracker.name: tracker for tracker in trackers}, []
    accelerator = SimpleNamespace(projects=projects)

    def init_trackers(project, init_kwargs):
        (name,) = accelerator.log_with
        projects.append((project, init_kwargs))
        accelerator.trackers.append(made[name])
        if name == fails:
            raise ConnectionError("no network")

    accelerator.init_trackers = init_trackers
    run = SimpleNamespace(accelerator=accelerator, path=Path("runs/a name"), run_id="an id")
    run.identity = SimpleNamespace(arguments=ARGUMENTS)
    run.progress = {"step": step} if step else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "trackers", lambda _: [*made])
        logger = Trackers(SimpleNamespace(track="", output_dir="runs/a name"))
    logger.start(run)
    return logger, run


def test_what_an_accelerator_is_given(monkeypatch):
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["tensorboard", "wandb"])
    for track, names in (("none", None), (" tensorboard , wandb", ["tensorboard", "wandb"])):
        options = Trackers(SimpleNamespace(track=track, output_dir="runs/a")).options()
        assert options == {"log_with": names, "project_dir": "runs/a/tensorboard"}


def test_only_an_error_in_the_thread_of_tensorboard_is_not_printed_twice(monkeypatch):
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    started()
    others = SimpleNamespace(thread=threading.current_thread())
    writer = type("Writer", (), {"__module__": "tensorboard.a"})()
    for error in (SimpleNamespace(thread=writer), others):
        threading.excepthook(error)
    assert printed == [others]


@pytest.mark.parametrize("step", [30, 0])
def test_each_tracker_continues_its_run_in_its_own_words(step, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/a project.py"])
    board, wandb = tracker("tensorboard"), tracker("wandb")
    _, run = started(board, wandb, step=step)
    again = {"resume": "allow"}
    options = {
        "tensorboard": {"purge_step": step + 1},
        "wandb": {"name": "a name", "id": "an id", **again, "dir": os.path.abspath("runs/a name")},
        "trackio": {"name": "a name", **again},
        "mlflow": {"run_name": "a name"},
    }
    assert run.accelerator.projects == [("a project", options)] * 2
    # Where a restart purges them.
    text = {"arguments": "    lr 0.1\n    model None"}
    assert board.method_calls == [call.log(text, step=step + 1)]
    assert wandb.method_calls == [call.store_init_configuration(ARGUMENTS)]


@pytest.mark.parametrize("given", ["https://somewhere", None])
@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_what_mlflow_writes_is_in_the_folder_of_the_run(name, given, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given or "")
    if not given:
        monkeypatch.delenv("MLFLOW_TRACKING_URI")
    started(tracker(name))
    ours = Path("runs/a name/mlruns").absolute().as_uri() if name == "mlflow" else None
    assert os.environ.get("MLFLOW_TRACKING_URI") == (given or ours)


@pytest.mark.parametrize("order", [1, -1])
def test_a_tracker_that_cannot_be_started_is_a_warning_and_the_others_go_on(order, capsys):
    board, wandb = tracker("tensorboard"), tracker("wandb")
    logger, _ = started(*[wandb, board][::order], fails="wandb")
    line = "warning: what --track wandb would show is missing (ConnectionError: no network)\n"
    assert capsys.readouterr().err == line
    logger.log({"loss": 1.0}, 31)
    assert board.log.called and not wandb.log.called


def test_each_tracker_gets_what_it_shows_once(capsys):
    board, wandb, mlflow = (tracker(name) for name in ("tensorboard", "wandb", "mlflow"))
    logger, run = started(board, wandb, mlflow)
    for each in (board, wandb, mlflow):
        each.reset_mock()
    logger.log({"loss": 1.0}, 5)
    logger.log({"loss": 2.0}, 6, sent_before=True)
    logger.log_images({"a": "pixels"}, 7)
    run.results = {"test_loss": 1.0, "val_loss": 2.0, "global_step": 9}
    logger.finish(run)
    assert capsys.readouterr().err == ""
    first = call.log({"loss": 1.0}, step=5)
    assert mlflow.method_calls == [first]
    assert wandb.method_calls == [first, call.log_images({"a": "pixels"}, step=7)]
    final = {"final/test_loss": 1.0, "final/val_loss": 2.0}
    assert board.method_calls == [
        first,
        call.log({"loss": 2.0}, step=6),
        call.log_images({"a": "pixels"}, step=7, dataformats="NHWC"),
        call.tracker.add_hparams({"lr": 0.1}, final, run_name=".", global_step=9),
    ]


def test_a_tracker_that_fails_is_not_called_again(capsys):
    first, broken, last = map(tracker, "abc")
    broken.log.side_effect = ConnectionError("b is away")
    logger, run = started(first, broken, last)
    for step in (1, 2):
        logger.log({}, step)
    assert run.accelerator.trackers == [first, last]
    assert [each.log.call_count for each in (first, broken, last)] == [2, 1, 2]
    line = "warning: what --track b would show from here on is missing (ConnectionError: b is away)"
    assert capsys.readouterr().err == line + "\n"
