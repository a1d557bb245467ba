"""The life of a run in its folder, in this process: what each call writes, prints and refuses."""

# ruff: noqa: F811 (fixtures of other files)
import argparse
import json
import math
import shlex
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.launches import metrics, results, status
from test_collectives import world  # noqa: F401 (a fixture)

from utils.run import (
    checkpoint,
    failures,
    folder,
    launcher,
    manifest,
    model_card,
    process,
    record,
    saving,
    stacks,
    tracking,
)
from utils.run.failures import RunFailed, UserError
from utils.run.folder import RunFolder
from utils.run.plan import Plan

PLAN = Plan(total_steps=14, steps_per_epoch=7, evaluate_every=7, save_every=3)
ARGUMENTS = dict(resume="auto", lr=0.1, batch_size=10, keep_checkpoints=2)
ARGUMENTS |= dict(epochs=2, track="none", push_to_hub=None, wait_for_checkpoints=True)


class Accelerator(SimpleNamespace):
    """One process: it records what it is asked to load, and saves a file."""

    scaler, optimizer_step_was_skipped = None, False
    _custom_objects, _schedulers = (), ()

    def save_state(self, path):
        if self.failing:
            raise OSError("the file server is away")
        (Path(path) / "optimizer.bin").write_text("state")

    def load_state(self, path, map_location):
        self.loaded.append((path, map_location))

    def end_training(self):
        self.ended = True


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """What the run tells the trackers, the card, the Hub and the process; nothing is started."""
    made = []

    def recorded(owner, name):
        def call(*args, **options):
            made.append((name, args, options))

        monkeypatch.setattr(owner, name, call)

    for name in ("start", "finish", "log"):
        recorded(tracking, name)
    for name in ("write", "upload", "check_repository"):
        recorded(model_card, name)
    for name in ("on_preempted", "training_ends"):
        recorded(process, name)
    monkeypatch.setattr(failures, "_hooks", [])
    monkeypatch.setattr(record, "script_hash", lambda: "hash")
    monkeypatch.setattr(sys, "argv", ["scripts/train_it.py", "--flag"])
    return made


def called(calls, name):
    return [(args, options) for made, args, options in calls if made == name]


def new_run(path, **changed):
    args = argparse.Namespace(output_dir=str(path), **{**ARGUMENTS, **changed})
    main = dict(is_main_process=True, is_local_main_process=True, is_fsdp2=False)
    accelerator = Accelerator(
        **main,
        process_index=0,
        num_processes=1,
        device=torch.device("cpu"),
        mixed_precision="no",
        trackers=[],
        loaded=[],
        failing=False,
        ended=False,
    )
    return RunFolder(args, accelerator)


def started(path, plan=PLAN, rates=None, **changed):
    run = new_run(path, **changed)
    run.open(plan)
    return run, run.start(rates=rates)


def let_go(run):
    """As at the end of the process: the next one can claim the folder."""
    run._claim.file.close()
    run.metrics.close()


def save(run, step, **state):
    with run.checkpoint(step, **state) as path:
        run._accelerator.save_state(path)


# ---------------------------------------------------------------------------------------- start


def test_a_new_run(tmp_path, calls, capsys):
    run = new_run(tmp_path / "mine", note=[1, 2])
    assert run.path == tmp_path / "mine" and run.is_main and run.init_from is None
    run.open(PLAN)
    assert (run.finished, run.progress, run.evaluation_due) == (None, {}, False)
    assert not (tmp_path / "mine" / "args.json").exists()  # no records yet
    assert run.start() == 0
    written = json.loads((run.path / "args.json").read_text())
    assert written["arguments"] == run.arguments and "note" not in run.arguments
    assert len(written["run_id"]) == 8 and written["total_steps"] == 14
    assert [start["step"] for start in written["starts"]] == [0]
    state = status(run.path)
    assert (state["state"], state["reason"], state["step"]) == ("running", "from step 0", 0)
    printed = capsys.readouterr().out
    assert printed == f"14 steps, 7 per epoch; output in {run.path}\nstarting at step 0\n"
    ((args, _),) = called(calls, "start")
    accelerator, project, name, run_id, arguments, step = args
    assert accelerator is run._accelerator and (project, name, step) == ("train_it", "mine", 0)
    assert run_id == written["run_id"] and arguments is run.arguments
    assert called(calls, "on_preempted") == [((run._record_preempted,), {})]
    assert not run._accelerator.loaded and not called(calls, "check_repository")


def test_weights_to_start_from_are_for_a_new_run_only(tmp_path):
    run, _ = started(tmp_path, init_from="elsewhere")
    assert run.init_from == "elsewhere"
    save(run, 3)
    let_go(run)
    assert started(tmp_path, init_from="elsewhere")[0].init_from is None


def test_the_repository_is_checked_first(tmp_path, calls, monkeypatch):
    def check(name):
        raise UserError(f"no token for {name}")

    monkeypatch.setattr(model_card, "check_repository", check)
    with pytest.raises(UserError, match="no token for me/it"):
        new_run(tmp_path / "mine", push_to_hub="me/it").open(PLAN)
    assert not (tmp_path / "mine").exists()


def test_an_error_before_the_first_record_removes_the_folder(tmp_path):
    new_run(tmp_path / "mine").open(PLAN)
    assert failures.recorded_anywhere() and failures.record("the model is wrong", retry=False)
    assert not (tmp_path / "mine").exists()


def test_an_error_after_it_is_recorded(tmp_path):
    run, _ = started(tmp_path)
    assert failures.record("the loss is wrong", retry=False) is True
    state = status(run.path)
    assert (state["state"], state["reason"]) == ("failed", "the loss is wrong")
    assert failures.record("lost contact", retry=True) is False  # another process was the first


def test_a_run_continues(tmp_path, calls, capsys):
    run, _ = started(tmp_path)
    run.log("val", 7, score=0.5, loss=0.25)
    save(run, 7, config={"width": 3})
    let_go(run)
    before = json.loads((tmp_path / "args.json").read_text())
    capsys.readouterr()
    calls.clear()
    again = new_run(tmp_path)
    again.open(PLAN)
    assert again.progress.items() >= {"step": 7, "score": 0.5, "config": {"width": 3}}.items()
    assert again.finished is None and again.start() == 7
    newest = tmp_path / "checkpoints" / "step_00000007"
    assert again._accelerator.loaded == [(str(newest), "cpu")]
    assert f"continuing from {newest}" in capsys.readouterr().out
    now = json.loads((tmp_path / "args.json").read_text())
    assert now["run_id"] == before["run_id"]
    assert [start["step"] for start in now["starts"]] == [0, 7]
    assert called(calls, "start")[0][0][3:] == (before["run_id"], again.arguments, 7)
    assert status(tmp_path)["reason"] == "from step 7" and status(tmp_path)["step"] == 7
    best = again._best.record(7)
    assert (best["best"], best["best_loss"]) == (0.5, 0.25) and not again.evaluation_due
    again.log("val", 8, score=0.4)
    assert not again._best.improved_at(8)


def test_a_run_gets_longer_but_not_shorter_than_it_is(tmp_path, capsys):
    run, _ = started(tmp_path)
    save(run, 14)
    let_go(run)
    longer = Plan(total_steps=28, steps_per_epoch=7)
    run, step = started(tmp_path, longer, epochs=4)
    assert step == 14
    assert "length changed from 14 to 28 steps: the learning rate does not" in (
        capsys.readouterr().out
    )
    let_go(run)
    with pytest.raises(UserError, match="ask for 13 steps, but the run has taken 14 already"):
        started(tmp_path, Plan(total_steps=13, steps_per_epoch=7), max_train_steps=13)


def test_a_run_that_was_killed_after_its_last_step_continues(tmp_path):
    run, _ = started(tmp_path)
    assert run.evaluation_due is False and not run._best.improved_at(0)
    save(run, 14)
    let_go(run)
    assert started(tmp_path)[1] == 14


def test_a_run_is_not_continued_against_the_will_of_the_user(tmp_path):
    run, _ = started(tmp_path)
    let_go(run)
    with pytest.raises(UserError, match="already contains a run: with --resume never"):
        started(tmp_path, resume="never")


def test_other_arguments_are_refused(tmp_path):
    run, _ = started(tmp_path)
    save(run, 3)
    let_go(run)
    with pytest.raises(UserError, match=r"--lr 0.2 .was 0.1."):
        started(tmp_path, lr=0.2)
    args = new_run(tmp_path, lr=0.2)._args
    own = RunFolder(args, run._accelerator, may_change=["lr"])
    own.open(PLAN)  # what a script allows may change
    let_go(SimpleNamespace(_claim=own._claim, metrics=run.metrics))
    without_plan = new_run(tmp_path, epochs=3)
    with pytest.raises(UserError, match=r"--epochs 3 .was 2."):
        without_plan.open()  # the length of a script without checkpoints may not change


def test_what_changed_since_a_checkpoint_is_said(tmp_path, capsys, monkeypatch):
    run, _ = started(tmp_path)
    save(run, 3)
    let_go(run)
    monkeypatch.setattr(record, "changes", lambda *_: ["torch 1 -> 2", "processes 1 -> 2"])
    monkeypatch.setattr(record, "script_hash", lambda: "another")
    started(tmp_path)
    printed = capsys.readouterr().out
    assert "warning: changed since that checkpoint: torch 1 -> 2, processes 1 -> 2. The " in printed
    assert "warning: scripts/train_it.py has changed since this run started" in printed


def test_a_script_without_a_plan(tmp_path, calls):
    run, step = started(tmp_path, plan=None)
    assert step == 0 and not called(calls, "start")
    assert json.loads((tmp_path / "args.json").read_text())["total_steps"] is None
    save(run, 5)  # has nothing to evaluate
    assert not manifest.read(tmp_path / "checkpoints" / "step_00000005")["progress"][
        "evaluation_due"
    ]
    run.write_results({"global_step": 5, "loss": 1.0})
    state = status(tmp_path)
    assert (state["state"], state["reason"], state["step"]) == ("finished", "all steps done", 5)
    let_go(run)
    again = new_run(tmp_path)
    again.open()
    assert again.finished == {"global_step": 5, "loss": 1.0}


# ----------------------------------------------------------------------------------------- loop


def test_what_a_checkpoint_records(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    run, _ = started(tmp_path)
    synced = []
    monkeypatch.setattr(run.metrics, "sync", lambda: synced.append(1))
    clock.now = 130.0

    def slow(path, seconds=4.0):
        clock.now += seconds

    with run.checkpoint(3, position=[5]) as path:
        assert path == str(tmp_path / "checkpoints" / ".writing") and synced == [1]
        slow(path)
    saved = manifest.verify(tmp_path / "checkpoints" / "step_00000003")
    assert saved["progress"] == {
        "step": 3,
        "score": None,
        "loss": None,
        "best": None,
        "best_loss": None,
        "stale": 0,
        "position": [5],
        "train_seconds": 30.0,
        "evaluation_due": False,
    }
    assert saved["arguments"] == run.arguments and saved["total_steps"] == 14
    (line,) = metrics(tmp_path, "checkpoint")
    (written,) = (json.loads(text) for text in (tmp_path / "metrics.jsonl").open())
    assert line["written"] is True and line["step"] == 3 and written["seconds"] == 4.0
    let_go(run)
    again, _ = started(tmp_path)
    clock.now += 5
    assert again.train_seconds() == 35.0  # without the time between the two


def test_the_newest_checkpoints_are_kept(tmp_path):
    run, _ = started(tmp_path, keep_checkpoints=1)
    save(run, 3)
    save(run, 6)
    assert [path.name for path in manifest.all_in(tmp_path)] == ["step_00000006"]


@pytest.mark.parametrize(("evaluated", "due"), [(7, False), (6, True), (None, True)])
def test_an_evaluation_that_a_signal_prevented_is_due(evaluated, due, tmp_path, calls):
    run, _ = started(tmp_path)
    if evaluated:
        run.log("test", evaluated, loss=1.0)
    save(run, 7)
    assert manifest.all_in(tmp_path)[0].name == "step_00000007"
    progress = manifest.read(tmp_path / "checkpoints" / "step_00000007")["progress"]
    assert progress["evaluation_due"] is due
    let_go(run)
    again, _ = started(tmp_path)
    assert again.evaluation_due is due
    again.log("train", 7, loss=1.0, lr=0.1)
    assert again.evaluation_due is due
    again.log("val", 7, score=0.5, loss=0.25)
    assert not again.evaluation_due and again._best.improved_at(7)
    progress = manifest.verify(tmp_path / "checkpoints" / "step_00000007")["progress"]
    assert progress["score"] == (0.5 if due else None) and progress["evaluation_due"] is False


def test_another_runs_checkpoint_is_not_changed(tmp_path):
    run, _ = started(tmp_path / "theirs")
    save(run, 7)
    let_go(run)
    theirs = tmp_path / "theirs" / "checkpoints" / "step_00000007"
    before = (theirs / "manifest.json").read_bytes()
    ours, step = started(tmp_path / "ours", resume=str(theirs))
    assert step == 7 and ours.evaluation_due
    ours.log("val", 7, score=0.5)
    assert not ours.evaluation_due and (theirs / "manifest.json").read_bytes() == before
    assert metrics(tmp_path / "ours", "val")[0]["score"] == 0.5
    with pytest.raises(UserError, match="step_00000007 belongs to a run with other arguments"):
        started(tmp_path / "others", resume=str(theirs), lr=0.2)


@pytest.mark.parametrize(
    ("step", "evaluated", "ends"), [(14, True, True), (14, False, False), (12, True, False)]
)
def test_after_the_last_save_a_signal_may_end_the_process(step, evaluated, ends, tmp_path, calls):
    run, _ = started(tmp_path)
    if evaluated:
        run.log("val", step, score=0.5)
    save(run, step)
    assert len(called(calls, "training_ends")) == ends


def test_failed_checkpoints_are_counted_in_a_row(tmp_path, capsys):
    run, _ = started(tmp_path)
    save(run, 3)
    run._accelerator.failing = True
    save(run, 6)
    assert "checkpoint of step 6 not written" in capsys.readouterr().err
    run._accelerator.failing = False
    save(run, 9)
    run._accelerator.failing = True
    save(run, 12)
    save(run, 13)
    with pytest.raises(
        RunFailed, match=r"3 checkpoints in a row could .* is of step 9. Make"
    ) as it:
        save(run, 14)
    assert it.value.retry and str(tmp_path) in str(it.value)
    assert [line["written"] for line in metrics(tmp_path, "checkpoint")] == [
        True,
        False,
        True,
        False,
        False,
        False,
    ]


def test_an_error_of_the_script_while_saving_is_not_hidden(tmp_path):
    run, _ = started(tmp_path)
    with pytest.raises(ZeroDivisionError), run.checkpoint(3):
        1 / 0  # noqa: B018


def test_a_save_is_not_training_time(tmp_path, monkeypatch):
    run, _ = started(tmp_path)
    restarted = []
    monkeypatch.setattr(run.metrics, "restart_clock", restarted.append)
    phases = []
    with run.checkpoint(3):
        phases.append(process._phase)
    assert restarted == [3] and phases == ["saving"] and process._phase != "saving"


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A run with a checkpoint of step 3, written when `.let_go` is set or somebody waits for it."""
    run, _ = started(tmp_path, wait_for_checkpoints=False)
    run.let_go, begun, real_finish = threading.Event(), threading.Event(), checkpoint.finish
    run.groups = []
    monkeypatch.setattr(stacks.place, "save_asked", False)

    def finish(*args):
        run.groups.append(args[-1])
        begun.set()
        run.let_go.wait()
        return real_finish(*args)

    real_wait = saving.wait

    def wait(*args):
        run.let_go.set()
        return real_wait(*args)

    monkeypatch.setattr(saving, "wait", wait)
    monkeypatch.setattr(checkpoint, "finish", finish)
    monkeypatch.setattr(run._writer, "group", "its own")
    save(run, 3)
    begun.wait()
    yield run
    run.let_go.set()


def written(run):
    return [line["step"] for line in metrics(run.path, "checkpoint") if line["written"]]


def test_a_checkpoint_is_written_beside_the_training(beside):
    assert not beside.save_due(4) and written(beside) == [] and beside._saved_at == 0
    assert not list(beside.path.glob("checkpoints/step_*"))
    saving.wait_for_newest()
    assert not beside.save_due(5) and written(beside) == [3] and beside._saved_at == 3
    [line] = metrics(beside.path, "checkpoint")
    assert line["blocked_seconds"] < line["seconds"] and beside.groups == ["its own"]
    assert not beside.save_due(5) and written(beside) == [3]  # noted once


@pytest.mark.parametrize("then", ["checkpoint", "finish"])
def test_one_checkpoint_is_written_at_a_time(then, beside):
    if then == "finish":
        beside.finish(3)
    else:
        with beside.checkpoint(6):
            assert written(beside) == [3]
            assert process._phase == "saving"
            beside._accelerator.save_state(beside.path / "checkpoints" / ".writing")
    assert written(beside)[0] == 3


@pytest.mark.parametrize("reason", ["the last", "stopping", "patience"])
def test_the_last_checkpoint_is_waited_for(reason, tmp_path, calls, monkeypatch):
    run, _ = started(tmp_path, wait_for_checkpoints=False)
    if reason == "stopping":
        monkeypatch.setattr(process, "_phase", "saving")
    elif reason == "patience":
        monkeypatch.setattr(run, "out_of_patience", lambda: True)
    step = run._evaluated_at = 14 if reason == "the last" else 5
    save(run, step)
    assert written(run) == [step] and run._save is None
    [line] = metrics(tmp_path, "checkpoint")
    assert line["blocked_seconds"] == line["seconds"]
    assert bool(called(calls, "training_ends")) == (reason != "stopping")


def test_a_failure_beside_the_training_is_counted(beside, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "finish", lambda *_: False)
    beside.let_go.set()
    save(beside, 4)
    save(beside, 5)
    assert beside._failed_saves == 1 and not stacks.place.save_asked
    save(beside, 6)
    saving.wait_for_newest()
    assert not beside.save_due(8)
    assert beside._failed_saves == 2 and stacks.place.save_asked  # all processes come to save
    with pytest.raises(RunFailed, match=r"3 checkpoints in a row .* is of step 3\. Make"):
        save(beside, 7)
    assert [line["written"] for line in metrics(beside.path, "checkpoint")] == [True] + [False] * 3


def test_an_error_beside_the_training_is_raised_at_the_next_save(beside, monkeypatch):
    def finish(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(checkpoint, "finish", finish)
    beside.let_go.set()
    save(beside, 4)
    saving.wait_for_newest()
    assert not beside.save_due(5) and stacks.place.save_asked
    with pytest.raises(ZeroDivisionError):
        save(beside, 5)


def test_a_write_that_fails_beside_the_training_costs_the_checkpoint(tmp_path, monkeypatch, capsys):
    run, _ = started(tmp_path, wait_for_checkpoints=False)

    def save(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", save)
    with run.checkpoint(3) as path:
        torch.save(1, f"{path}/state.bin")
    run.finish(3)
    assert [line["written"] for line in metrics(tmp_path, "checkpoint")] == [False]
    assert (
        "checkpoint of step 3 not written, training continues: the disk is full"
        in capsys.readouterr().err
    )


def test_the_processes_decide_by_the_score_of_the_first(world):
    """It may be a tensor, and differ by rounding; if it differs more, a gather is missing."""

    def agree(values):
        return world(2).run(
            lambda accelerator: RunFolder._agree(
                SimpleNamespace(_accelerator=accelerator), *values[accelerator.process_index]
            )
        )

    nan = math.nan
    close = [(0.5, 0.0), (0.5 + 1e-7, 1e-12)]
    for values in (close, [(torch.tensor(0.5), None)] * 2):
        first = [None if value is None else float(value) for value in values[0]]
        assert agree(values) == [first, first]
    for values in ([(0.5, None), (0.6, None)], [(0.5, 2.0), (0.5, 2.1)], [(nan, 1.0), (0.5, 1.0)]):
        for error in agree(values):
            assert isinstance(error, RunFailed) and "gather_for_metrics" in str(error)
    assert all(isinstance(both, list) for both in agree([(nan, 1.0), (nan, 1.0)]))


def test_a_test_split_has_no_score(tmp_path):
    run, _ = started(tmp_path)
    with pytest.raises(ValueError, match="a test split never chooses"):
        run.log("test", 7, score=0.5)
    run.log("test", 7, accuracy=0.5)
    assert not run._best.improved_at(7) and run._evaluated_at == 7
    assert metrics(tmp_path, "test")[0]["accuracy"] == 0.5


def test_a_folder_that_is_replaced_ends_the_run(tmp_path):
    run, _ = started(tmp_path / "mine")
    (tmp_path / "mine").rename(tmp_path / "moved")
    (tmp_path / "mine").mkdir()
    for call in (
        lambda: run.log("train", 1, loss=1.0, lr=0.1),
        lambda: save(run, 1),
        lambda: run.finish(1),
    ):
        with pytest.raises(RunFailed, match="was removed or renamed") as caught:
            call()
        assert not caught.value.retry
    assert not list((tmp_path / "mine").iterdir())
    (tmp_path / "mine").rmdir()
    with pytest.raises(RunFailed, match="was removed or renamed"):
        run.finish(1)


def test_only_the_main_process_prints(tmp_path, capsys):
    run, _ = started(tmp_path)
    capsys.readouterr()
    run.print("once")
    run.is_main = False
    run.print("not again")
    assert capsys.readouterr().out == "once\n"


def test_batches_are_timed(tmp_path):
    run, _ = started(tmp_path)
    assert list(run.timed([1, 2])) == [1, 2]


# ------------------------------------------------------------------------------------------ end


@pytest.mark.parametrize(
    ("where", "says"), [(6, "at step 6, saved at step 3"), ("during one", "during one")]
)
@pytest.mark.parametrize("name", ["SIGUSR1", None])
def test_a_stopped_run(where, says, name, tmp_path, capsys, monkeypatch):
    run, _ = started(tmp_path)
    save(run, 3)
    monkeypatch.setattr(process, "signal_name", lambda: name)
    with pytest.raises(SystemExit) as caught:
        run.exit_preempted(where)
    assert caught.value.code == process.PREEMPTED == 75 and run._accelerator.ended
    reason = f"stopped by {name or 'a signal to another process'} {says}"
    assert capsys.readouterr().out.endswith(f"{reason}: run the same command again to continue\n")
    state = status(tmp_path)
    assert (state["state"], state["reason"], state["step"]) == ("preempted", reason, 3)
    assert state["next"] == "run the same command again to continue"


def test_a_finished_run(tmp_path, calls, capsys, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(folder, "memory_bytes", lambda device: 5 << 30)
    run, _ = started(tmp_path, push_to_hub="me/it")
    run.log("val", 14, score=0.5, loss=0.25)
    save(run, 14)
    clock.now = 120.0
    calls.clear()
    run.finish(14, val_accuracy=0.5)
    assert results(tmp_path) == {
        "val_accuracy": 0.5,
        "global_step": 14,
        "samples_seen": 140,
        "train_seconds": 20.0,
        "samples_per_second": 7.0,
        "num_processes": 1,
        "peak_memory_bytes": 5 << 30,
        "resumed_from": 0,
        "best_checkpoint": "step_00000014",
    }
    assert status(tmp_path)["state"] == "finished"
    assert calls == [("on_preempted", (None,), {})]
    capsys.readouterr()
    calls.clear()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train_it.py"), "--flag"])
    (tmp_path / "look.py").touch()
    run.close("look.py here", card={"title": "it"})
    printed = capsys.readouterr().out
    assert printed.startswith("done: val accuracy 0.5000\n14 steps, 140 samples in 20 s")
    assert printed.endswith(f"next: python {tmp_path}/look.py here\n")
    assert [name for name, _, _ in calls] == ["finish", "upload"]  # no weights, so no card
    assert calls[0][1] == (run._accelerator, run.arguments, results(tmp_path))
    assert calls[1][1] == (tmp_path, "me/it")
    again = new_run(tmp_path)
    again.open(PLAN)  # the lock is free
    assert again.finished == results(tmp_path)
    assert capsys.readouterr().out == (
        "this run has already finished, nothing to do: val accuracy 0.5000\n"
        "14 steps, 140 samples in 20 s (7.0 samples/s), 1 process, peak memory 5.0 GiB\n"
        f"output: {tmp_path}; best checkpoint: {tmp_path}/checkpoints/step_00000014\n"
        "to train longer, run the same command with a larger --epochs or --max_train_steps\n"
    )
    assert len(called(calls, "upload")) == 1  # only with --push_to_hub
    again._claim.file.close()
    longer = new_run(tmp_path, epochs=4)
    longer.open(Plan(total_steps=28, steps_per_epoch=7))
    assert longer.finished is None and longer.progress["step"] == 14
    longer._claim.file.close()
    uploaded = new_run(tmp_path, push_to_hub="me/it")
    uploaded.open(PLAN)
    assert len(called(calls, "upload")) == 2
    uploaded._claim.file.close()
    (tmp_path / "results.json").rename(tmp_path / "removed")
    restored = new_run(tmp_path)
    restored.open(PLAN)  # it writes the results again
    assert restored.finished is None and restored.progress["step"] == 14
    restored._claim.file.close()
    (tmp_path / "removed").rename(tmp_path / "results.json")
    shutil.rmtree(tmp_path / "checkpoints")
    longer = new_run(tmp_path, epochs=4)
    with pytest.raises(UserError, match="checkpoints are gone: train its weights further in anoth"):
        longer.open(Plan(total_steps=28, steps_per_epoch=7))


def test_a_batch_script_learns_which_folder_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN_FOLDER_FILE", str(tmp_path / "job.folder"))
    run, _ = started("my run")
    assert (tmp_path / "job.folder").read_text() == f"{tmp_path}/my run\n0\n"
    save(run, 7)
    let_go(run)
    run, _ = started("my run")
    assert (tmp_path / "job.folder").read_text() == f"{tmp_path}/my run\n7\n"
    let_go(run)
    monkeypatch.setenv("RUN_FOLDER_FILE", str(tmp_path / "gone" / "job.folder"))
    started("my run")
    assert "by which a job is requeued, is missing" in capsys.readouterr().err


def test_a_card_that_fails_costs_a_warning(tmp_path, calls, capsys, monkeypatch):
    run, _ = started(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    run.finish(14)
    run.close(card={"title": "it"})
    (args, options) = called(calls, "write")[0]
    assert args == (tmp_path, run._record, results(tmp_path)) and options == {"title": "it"}

    def fail(*_, **__):
        raise KeyError("hardware")

    monkeypatch.setattr(model_card, "write", fail)
    run, _ = started(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    run.finish(14)
    run.close("look.py here")  # not there
    output = capsys.readouterr()
    assert "warning: the model card README.md is missing" in output.err
    assert output.out.count("done: ") == 2 and "next" not in output.out


def test_the_next_command_can_be_copied_into_a_shell(tmp_path, calls, capsys, monkeypatch):
    run, _ = started(tmp_path / "my run")
    run.finish(14)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train_it.py")])
    (tmp_path / "look.py").touch()
    run.close(f"look.py {run.path} --words more")
    words = ["next:", "python", f"{tmp_path}/look.py", f"{tmp_path}/my run", "--words", "more"]
    assert shlex.split(capsys.readouterr().out.splitlines()[-1]) == words


def test_a_run_starts_only_with_a_schedule_that_it_can_recompute(tmp_path, calls):
    run = new_run(tmp_path)
    run.open(PLAN)
    with pytest.raises(UserError, match="takes a prepared LambdaLR"):
        run.start(SimpleNamespace())


def test_another_process_writes_nothing(tmp_path, calls, capsys):
    """A process beside the main one, which has the folder."""
    run, _ = started(tmp_path)
    capsys.readouterr()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run.is_main = run.metrics._is_main = False
    calls.clear()
    run.log("val", 7, score=0.5)
    run.finish(14, val_accuracy=0.5)
    run.close("python look.py")
    with pytest.raises(SystemExit):
        run.exit_preempted(7)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not calls and capsys.readouterr().out == ""


@pytest.mark.parametrize(("elastic", "says"), [(True, True), (False, False)])
def test_a_slow_save_is_said_when_a_run_starts(elastic, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launcher, "is_elastic", lambda: elastic)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    line = {"split": "checkpoint", "step": 3, "seconds": 45.0, "written": True}
    run = new_run(tmp_path)
    run.open(PLAN)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    run.start()
    printed = capsys.readouterr().out
    assert (
        "warning: a checkpoint took 45 s, but the launcher kills its processes 30 s after SIGTERM: "
        "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=135\n" in printed
    ) == says


def test_a_scheduler_gets_the_learning_rate_of_the_present_length(tmp_path, monkeypatch, capsys):
    run, _ = started(tmp_path)
    save(run, 7)
    let_go(run)
    asked = []

    def apply(accelerator, scheduler, step):
        asked.append((scheduler, step))
        return "the rate"

    monkeypatch.setattr(checkpoint, "apply_schedule", apply)
    again = new_run(tmp_path, epochs=4)
    again.open(Plan(total_steps=28, steps_per_epoch=7))
    scheduler = SimpleNamespace(scheduler=SimpleNamespace(lr_lambdas=[]))
    again.start(scheduler, rates={"tokens_per_second": 4})
    assert asked == [(scheduler, 7)]
    assert "length changed from 14 to 28 steps: the rate" in capsys.readouterr().out
    assert again.metrics._meter._rates == {"tokens_per_second": 4}
