"""A run in its folder, in this process: what each call writes, prints and refuses.

What the folder holds after any sequence of calls is in properties/test_run_folder_machine.py.
"""

import argparse
import json
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from harness import fakes
from harness.launches import metrics, results, status
from harness.worlds import World

from utils.run import collectives, manifest, process
from utils.run import metrics as metrics_module
from utils.run.failures import UserError
from utils.run.folder import RunFolder
from utils.run.plan import Plan

PLAN = Plan(total_steps=14, steps_per_epoch=7, evaluate_every=7, save_every=3, left_out=1)
LONGER = Plan(total_steps=28, steps_per_epoch=7)
ARGUMENTS = dict(resume="auto", lr=0.1, batch_size=10, keep_checkpoints=2, epochs=2)
AGAIN = "run the same command again to continue"


class Logger:
    """Notes the calls of a run, each with what is done so far."""

    def __init__(self):
        self.calls = []

    def start(self, run):
        self.calls.append(("start", run.record["run_id"], status(run.path)["state"]))

    def log(self, values, step, sent_before):
        self.calls.append(("log", step, values))

    def finish(self, run):
        self.calls.append(("finish", run.results, status(run.path)["state"]))


@pytest.fixture(autouse=True)
def script(tmp_path_factory, monkeypatch):
    """The script that runs, and a process that is in its training."""
    path = tmp_path_factory.mktemp("scripts") / "train_it.py"
    path.write_text("1")
    monkeypatch.setattr(sys, "argv", [str(path), "--flag"])
    process.training_starts()
    yield path
    process.training_starts()
    process.record_with(None)


def accelerator(**more):
    """One process: it records what it is asked to load, and saves a file."""
    made = fakes.accelerator(**more)
    made.loaded, made.ended = [], []
    made.load_state = lambda path, map_location: made.loaded.append((path, map_location))
    made.end_training = lambda: made.ended.append(True)
    return made


def opened(path, plan=PLAN, using=None, loggers=(), data="cifar", **changed):
    args = argparse.Namespace(output_dir=str(path), **{**ARGUMENTS, **changed})
    run = RunFolder(args, using or accelerator(), {"patience"}, loggers)
    run.open(plan, data=data)
    return run


def started(path, plan=PLAN, **changed):
    run = opened(path, plan, **changed)
    run.start()
    return run


def save(run, step, **state):
    guard = SimpleNamespace(check=lambda model: None)
    with run.checkpoint(step, guard, None, **state) as path:
        torch.save(1, f"{path}/state.bin")


def checkpoint_of(path, step):
    return manifest.verify(fakes.accelerator(), path / "checkpoints" / f"step_{step:08d}")


# ---------------------------------------------------------------------------------------- start


def test_a_run_begins_and_continues(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RUN_FOLDER_FILE", str(tmp_path / "job.folder"))
    here, logger = accelerator(), Logger()
    run = opened(tmp_path / "a", using=here, loggers=[logger], note=print, init_from="elsewhere")
    assert run.path == tmp_path / "a" and run.is_main and run.init_from == "elsewhere"
    assert (run.finished, run.progress, run.evaluation_due) == (None, {}, False)
    assert not (run.path / "args.json").exists()  # no records yet
    assert run.start() == 0 and not here.loaded
    written = json.loads((run.path / "args.json").read_text())
    assert written["arguments"] == run.identity.arguments and "note" not in written["arguments"]
    assert written["data"] == {"data": "cifar"} and written["total_steps"] == 14
    assert len(written["run_id"]) == 8 and [start["step"] for start in written["starts"]] == [0]
    state = status(run.path)
    assert (state["state"], state["reason"], state["step"]) == ("running", "from step 0", 0)
    printed = capsys.readouterr().out
    each = "7 per epoch, each of which leaves out 1 sample, less than a batch"
    assert printed == f"14 steps, {each}; output in {run.path}\nstarting at step 0\n"
    assert logger.calls == [("start", written["run_id"], "running")]
    save(run, 7, config={"width": 3})
    run.log("val", 7, score=0.5, loss=0.25)
    run.save_due(8)
    capsys.readouterr()
    again = opened(run.path, using=here, init_from="elsewhere")
    assert again.progress.items() >= {"step": 7, "score": 0.5, "config": {"width": 3}}.items()
    assert again.finished is None and again.init_from is None  # it has weights of its own
    assert again.start() == 7 and not again.evaluation_due
    newest = run.path / "checkpoints" / "step_00000007"
    assert here.loaded == [(str(newest), "cpu")]
    assert capsys.readouterr().out.splitlines()[1:] == [f"continuing from {newest}"]
    assert json.loads((run.path / "args.json").read_text())["run_id"] == run.run_id == again.run_id
    assert status(run.path)["reason"] == "from step 7" and status(run.path)["step"] == 7
    assert (tmp_path / "job.folder").read_text() == f"{run.path}\n7\n"


def test_another_runs_checkpoint_is_not_changed(tmp_path):
    save(started(tmp_path / "theirs"), 7)
    theirs = tmp_path / "theirs" / "checkpoints" / "step_00000007"
    before = (theirs / "manifest.json").read_bytes()
    ours = started(tmp_path / "ours", resume=str(theirs))
    assert ours.progress["step"] == 7 and ours.evaluation_due
    ours.log("train", 7, loss=1.0, lr=0.1)
    assert ours.evaluation_due
    ours.log("val", 7, score=0.5)
    assert not ours.evaluation_due and (theirs / "manifest.json").read_bytes() == before
    assert metrics(tmp_path / "ours", "val")[0]["score"] == 0.5
    ours.hang = "rank 1 is in a loop"
    assert process.state.failed("it is wrong", False) == (True, [ours.hang])  # the first one
    assert process.state.failed("lost contact", True) == (False, [ours.hang, AGAIN])
    state = status(ours.path)
    assert (state["state"], state["reason"]) == ("failed", f"it is wrong\n{ours.hang}")
    assert state["next"] is None
    fork = started(tmp_path / "fork", resume=str(theirs))  # without a checkpoint of its own
    assert process.state.failed("the disk is full", True) == (True, [AGAIN])
    assert status(fork.path)["next"] == AGAIN
    assert process.state.preempted("stopped") == AGAIN and fork.saves.newest_step == 7
    with pytest.raises(UserError, match="step_00000007 belongs to a run with other arguments"):
        opened(tmp_path / "others", resume=str(theirs), model="other")


# ----------------------------------------------------------------------------------------- loop


def test_what_a_checkpoint_records_and_how_time_is_counted(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    run, order = started(tmp_path), []
    monkeypatch.setattr(run.metrics, "sync", lambda: order.append("metrics.jsonl"))
    clock.now = 130.0
    run.log("train", 3, loss=1.0, lr=0.1)
    guard = SimpleNamespace(check=order.append)
    with run.checkpoint(3, guard, "the model", position=[5]) as path:
        assert path == str(tmp_path / "checkpoints" / ".writing")
        assert order == ["the model", "metrics.jsonl"]  # its lines are not written again
        assert process.is_stopping()  # a signal now ends the process after this block
        clock.now += 4
    assert not process.is_stopping()
    saved = checkpoint_of(tmp_path, 3)
    scores = {"score": None, "loss": None, "best": None, "best_loss": None, "stale": 0}
    more = {"position": [5], "train_seconds": 30.0, "evaluation_due": False}
    assert saved["progress"] == {"step": 3, **scores, **more}
    assert saved["arguments"] == run.identity.arguments and saved["total_steps"] == 14
    clock.now += 5
    run.log("train", 4, loss=1.0, lr=0.1)
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["step_seconds"] == 5  # a save is not training time
    assert list(run.timed([1, 2])) == [1, 2]
    assert [run.save_due(step) for step in (5, 6)] == [False, True]
    (figures,) = metrics(tmp_path, "checkpoint")
    assert (figures["step"], figures["seconds"], figures["blocked_seconds"]) == (3, 4, 4)
    with pytest.raises(ValueError, match="a test split never chooses"):
        run.log("test", 7, score=0.5)
    again = started(tmp_path)
    clock.now += 5
    assert again.train_seconds() == 35.0  # without the time between the two
    with pytest.raises(KeyError), again.checkpoint(6, guard, None):
        raise KeyError  # of the script: no failed write


def test_the_other_processes_neither_write_nor_print_and_decide_as_the_first(
    tmp_path, monkeypatch, capsys
):
    """Their scores differ by rounding."""
    world, loggers = World(2), [Logger(), Logger()]
    monkeypatch.setattr(collectives, "dist", world)

    def process_of(here):
        rank = here.process_index
        mine = accelerator(processes=2, rank=rank)
        run = started(tmp_path, using=mine, loggers=[loggers[rank]], patience=1)
        run.log("val", 13, score=torch.tensor(0.5), loss=0.25)
        run.log("val", 14, score=0.5, loss=torch.tensor(0.25 + 1e-7 * (1 - rank)))
        run.print("said")
        run.finish(14, val_accuracy=0.5)
        run.close()
        with pytest.raises(SystemExit):
            run.exit_preempted(14)
        return mine.ended, run.best.out_of_patience()

    assert world.run(process_of) == [([True], True)] * 2
    _, line = (json.loads(line) for line in (tmp_path / "metrics.jsonl").open())
    assert (line["split"], line["step"], line["score"]) == ("val", 14, 0.5)
    printed = capsys.readouterr().out
    for words in ("14 steps, 7 per", "said\n", "finished: no better score", "stopped by"):
        assert printed.count(words) == 1
    assert [call[0] for call in loggers[0].calls] == ["start", "log", "log", "finish"]
    assert not loggers[1].calls


# ------------------------------------------------------------------------------------------ end


def test_a_finished_run(tmp_path, capsys, monkeypatch):
    clock, logger = SimpleNamespace(now=100.0), Logger()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(metrics_module, "memory_bytes", lambda device: 5 << 30)
    run = started(tmp_path, loggers=[logger])
    save(run, 14)
    run.log("val", 14, score=0.5, loss=0.25)
    clock.now = 120.0
    run.finish(14, val_accuracy=0.5)
    expected = dict(global_step=14, samples_seen=140, train_seconds=20.0, samples_per_second=7.0)
    expected |= dict(num_processes=1, peak_memory_bytes=5 << 30, resumed_from=0, val_accuracy=0.5)
    assert run.results == results(tmp_path) == expected | {"best_checkpoint": "step_00000014"}
    assert status(tmp_path)["state"] == "finished" and process.state.preempted is None
    capsys.readouterr()
    run.close()
    printed = capsys.readouterr().out
    assert printed.startswith("done: val accuracy 0.5000\n14 steps, 140 samples in 20 s")
    assert logger.calls[-1] == ("finish", run.results, "finished")
    assert opened(tmp_path).finished == results(tmp_path)
    printed = capsys.readouterr().out
    assert printed.startswith("this run has already finished, nothing to do: val accuracy 0.5000\n")
    assert printed.endswith("the same command with a larger --epochs or --max_train_steps\n")
    longer = opened(tmp_path, LONGER, epochs=4)
    assert longer.finished is None and longer.progress["step"] == 14
    (tmp_path / "results.json").rename(tmp_path / "removed")
    restored = opened(tmp_path)  # it writes the results again
    assert restored.finished is None and restored.progress["step"] == 14
    (tmp_path / "removed").rename(tmp_path / "results.json")
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="checkpoints are gone: train its weights further in anoth"):
        opened(tmp_path, LONGER, epochs=4)
