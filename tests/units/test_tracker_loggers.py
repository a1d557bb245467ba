"""What `utils.report.tracking` sends to each tracker."""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils.report import tracking
from utils.report.tracking import Trackers


class Tracker:
    """Stands for a tracker of Accelerate: notes its calls, and fails in those that it is told."""

    def __init__(self, name, fails=()):
        self.name, self.calls = name, []

        def method(called):
            def call(*arguments, **options):
                self.calls.append((called, *arguments, options))
                if called in fails:
                    raise ConnectionError(f"{name} is away")

            return call

        self.tracker = SimpleNamespace(add_hparams=method("add_hparams"))
        for called in ("log", "log_images", "store_init_configuration"):
            setattr(self, called, method(called))


class Accelerator:
    """Has the trackers (by name) that do not fail to start."""

    def __init__(self, trackers, fails):
        self.made, self.started, self.fails = trackers, [], fails

    def init_trackers(self, project, init_kwargs):
        (name,) = self.log_with
        self.started.append((project, init_kwargs))
        self.trackers.append(self.made.get(name))
        if name == self.fails:
            raise ConnectionError("no network")


def started(*trackers, step=30, arguments=None, fails=None):
    """The trackers of a run in the folder `a name`, which continues after `step`."""
    accelerator = Accelerator({tracker.name: tracker for tracker in trackers}, fails)
    run = SimpleNamespace(accelerator=accelerator, path=Path("runs/a name"), run_id="an id")
    run.identity = SimpleNamespace(arguments=arguments or {})
    run.progress = {"step": step} if step else {}
    with pytest.MonkeyPatch.context() as patch:
        names = [tracker.name for tracker in trackers]
        patch.setattr(tracking, "trackers", lambda _: names)
        logger = Trackers(SimpleNamespace(track="", output_dir="runs/a name"))
    logger.start(run)
    for tracker in trackers:
        tracker.calls.clear()
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
    threading.excepthook(
        SimpleNamespace(thread=type("Writer", (), {"__module__": "tensorboard.a"})())
    )
    threading.excepthook(others)
    assert printed == [others]


@pytest.mark.parametrize("step", [30, 0])
def test_each_tracker_continues_its_run_in_its_own_words(step, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/a project.py"])
    _, run = started(Tracker("wandb"), step=step)
    again = {"resume": "allow"}
    options = {
        "tensorboard": {"purge_step": step + 1},
        "wandb": {"name": "a name", "id": "an id", **again, "dir": os.path.abspath("runs/a name")},
        "trackio": {"name": "a name", **again},
        "mlflow": {"run_name": "a name"},
        "swanlab": {"experiment_name": "a name", "id": "an id", **again},
        "clearml": {"task_name": "a name"},
        "aim": {"experiment": "a name"},
    }
    assert run.accelerator.started == [("a project", options)]


@pytest.mark.parametrize("given", ["https://somewhere", None])
@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_what_mlflow_writes_is_in_the_folder_of_the_run(name, given, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given or "")
    if not given:
        monkeypatch.delenv("MLFLOW_TRACKING_URI")
    started(Tracker(name))
    ours = Path("runs/a name/mlruns").absolute().as_uri() if name == "mlflow" else None
    assert os.environ.get("MLFLOW_TRACKING_URI") == (given or ours)


def test_arguments_are_recorded_where_a_restart_purges_them():
    board, wandb = Tracker("tensorboard"), Tracker("wandb")
    arguments = {"lr": 0.1, "model": None}
    logger, run = started(board, wandb, arguments=arguments)
    logger.start(run)
    assert board.calls == [("log", {"arguments": "    lr 0.1\n    model None"}, {"step": 31})]
    assert wandb.calls == [("store_init_configuration", arguments, {})]


@pytest.mark.parametrize("order", [1, -1])
def test_a_tracker_that_cannot_be_started_is_a_warning_and_the_others_go_on(order, capsys):
    board, wandb = Tracker("tensorboard"), Tracker("wandb")
    logger, _ = started(*[wandb, board][::order], fails="wandb")
    line = "warning: what --track wandb would show is missing (ConnectionError: no network)\n"
    assert capsys.readouterr().err == line
    logger.log({"loss": 1.0}, 31)
    assert len(board.calls) == 1 and not wandb.calls


def test_what_was_sent_before_an_interruption_is_sent_to_tensorboard_only():
    board, wandb = Tracker("tensorboard"), Tracker("wandb")
    logger, _ = started(board, wandb)
    logger.log({"loss": 1.0}, 5)
    logger.log({"loss": 2.0}, 6, sent_before=True)
    both = [("log", {"loss": 1.0}, {"step": 5}), ("log", {"loss": 2.0}, {"step": 6})]
    assert board.calls == both and wandb.calls == both[:1]


def test_images_are_sent_to_those_that_show_them():
    board, wandb, mlflow = (Tracker(name) for name in ("tensorboard", "wandb", "mlflow"))
    logger, _ = started(board, wandb, mlflow)
    logger.log_images({"a": "pixels"}, 7)
    layout = {"dataformats": "NHWC"}
    assert board.calls == [("log_images", {"a": "pixels"}, {"step": 7, **layout})]
    assert wandb.calls == [("log_images", {"a": "pixels"}, {"step": 7})] and not mlflow.calls


def test_the_table_of_hyperparameters_has_the_final_metrics():
    board, wandb = Tracker("tensorboard"), Tracker("wandb")
    arguments = {"lr": 0.1, "model": None, "seed": 0}
    figures = {"test_loss": 1.0, "val_loss": 2.0, "global_step": 9}
    logger, run = started(board, wandb, arguments=arguments)
    run.results = figures
    logger.finish(run)
    final = {"final/test_loss": 1.0, "final/val_loss": 2.0}
    expected = ("add_hparams", {"lr": 0.1, "seed": 0}, final, {"run_name": ".", "global_step": 9})
    assert board.calls == [expected] and not wandb.calls


def test_a_tracker_that_fails_is_not_called_again(capsys):
    first, broken, last = Tracker("a"), Tracker("b", fails={"log"}), Tracker("c")
    logger, run = started(first, broken, last)
    for step in (1, 2):
        logger.log({}, step)
    assert run.accelerator.trackers == [first, last]
    assert [len(tracker.calls) for tracker in (first, broken, last)] == [2, 1, 2]
    line = "warning: what --track b would show from here on is missing (ConnectionError: b is away)"
    assert capsys.readouterr().err == line + "\n"
