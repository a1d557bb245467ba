"""A run in its folder, in this process: what each call writes, prints and refuses.

What the folder holds after any sequence of calls is in properties/test_run_folder_machine.py.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from harness import fakes
from harness.launches import metrics, results, status
from harness.worlds import World
from torch.optim.lr_scheduler import LambdaLR

from utils.report import model_card
from utils.run import collectives, failures, folder, manifest, process
from utils.run.failures import RunFailed, UserError
from utils.run.folder import RunFolder
from utils.run.plan import Plan
from utils.scale import saving, stacks

PLAN = Plan(total_steps=14, steps_per_epoch=7, evaluate_every=7, save_every=3)
LONGER = Plan(total_steps=28, steps_per_epoch=7)
ARGUMENTS = dict(resume="auto", lr=0.1, batch_size=10, keep_checkpoints=2)
ARGUMENTS |= dict(epochs=2, track="none", push_to_hub=None, wait_for_checkpoints=True)


class Tracker:
    name = "tensorboard"

    def __init__(self):
        self.tracker, self.calls = self, []

    def log(self, values, step):
        self.calls.append((values, step))

    def add_hparams(self, arguments, metrics, run_name):
        self.calls.append((arguments, metrics))


@pytest.fixture(autouse=True)
def script(tmp_path_factory, monkeypatch):
    """The script that runs, and a process that is in its training."""
    path = tmp_path_factory.mktemp("scripts") / "train_it.py"
    path.write_text("1")
    monkeypatch.setattr(sys, "argv", [str(path), "--flag"])
    process.training_starts()
    yield path
    process.training_starts()
    process.on_preempted(None)
    stacks.place.save_asked = False


def accelerator(**more):
    """One process: it records what it is asked to load and to track, and saves a file."""
    made = fakes.accelerator(optimizer_step_was_skipped=False, **more)
    made.loaded, made.trackers, made.tracked, made.ended = [], [Tracker()], [], []
    made.save_state = lambda path: torch.save(1, f"{path}/state.bin")
    made.load_state = lambda path, map_location: made.loaded.append((path, map_location))
    made.init_trackers = lambda project, init_kwargs: made.tracked.append((project, init_kwargs))
    made.end_training = lambda: made.ended.append(True)
    return made


def opened(path, plan=PLAN, using=None, may_change=(), **changed):
    args = argparse.Namespace(output_dir=str(path), **{**ARGUMENTS, **changed})
    run = RunFolder(args, using or accelerator(), may_change)
    run.open(plan)
    return run


def started(path, plan=PLAN, scheduler=None, rates=None, **changed):
    run = opened(path, plan, **changed)
    run.start(scheduler, rates)
    return run


def save(run, step, **state):
    with run.checkpoint(step, **state) as path:
        torch.save(1, f"{path}/state.bin")


def checkpoint_of(path, step):
    return manifest.verify(path / "checkpoints" / f"step_{step:08d}")


# ---------------------------------------------------------------------------------------- start


def test_a_new_run(tmp_path, capsys):
    here = accelerator()
    run = opened(tmp_path / "mine", using=here, note=[1, 2])
    assert run.path == tmp_path / "mine" and run.is_main and run.init_from is None
    assert (run.finished, run.progress, run.evaluation_due) == (None, {}, False)
    assert not (run.path / "args.json").exists()  # no records yet
    assert run.start() == 0 and not here.loaded
    written = json.loads((run.path / "args.json").read_text())
    assert written["arguments"] == run.arguments and "note" not in run.arguments
    assert len(written["run_id"]) == 8 and written["total_steps"] == 14
    assert [start["step"] for start in written["starts"]] == [0]
    state = status(run.path)
    assert (state["state"], state["reason"], state["step"]) == ("running", "from step 0", 0)
    printed = capsys.readouterr().out
    assert printed == f"14 steps, 7 per epoch; output in {run.path}\nstarting at step 0\n"
    ((project, options),) = here.tracked
    assert project == "train_it" and options["tensorboard"] == {"purge_step": 1}
    assert options["wandb"] == {"name": "mine", "id": written["run_id"], "resume": "allow"}
    [(values, step)] = here.trackers[0].calls
    assert step == 1 and "lr 0.1" in values["arguments"]


def test_a_run_continues(tmp_path, capsys):
    run = started(tmp_path, init_from="elsewhere")
    assert run.init_from == "elsewhere"
    run.kept["tokens"] = 5
    run.log("val", 7, score=0.5, loss=0.25)
    save(run, 7, config={"width": 3})
    before = json.loads((tmp_path / "args.json").read_text())
    here = accelerator()
    again = opened(tmp_path, using=here, init_from="elsewhere")
    saved = {"step": 7, "score": 0.5, "config": {"width": 3}, "tokens": 5}
    assert again.progress.items() >= saved.items()
    assert again.finished is None and again.init_from is None  # it has weights of its own
    capsys.readouterr()
    assert again.start() == 7 and not again.evaluation_due
    newest = tmp_path / "checkpoints" / "step_00000007"
    assert here.loaded == [(str(newest), "cpu")]
    assert capsys.readouterr().out.splitlines()[1:] == [f"continuing from {newest}"]
    now = json.loads((tmp_path / "args.json").read_text())
    assert now["run_id"] == before["run_id"]
    assert [start["step"] for start in now["starts"]] == [0, 7]
    assert here.tracked[0][1]["wandb"]["id"] == before["run_id"]
    assert here.tracked[0][1]["tensorboard"] == {"purge_step": 8}
    assert status(tmp_path)["reason"] == "from step 7" and status(tmp_path)["step"] == 7


def test_nothing_is_made_for_a_run_that_cannot_start(tmp_path, monkeypatch):
    """The repository is checked before the folder is made; an error before the first record removes
    it.
    """

    def check(name):
        raise UserError(f"no token for {name}")

    monkeypatch.setattr(model_card, "check_repository", check)
    with pytest.raises(UserError, match="no token for me/it"):
        opened(tmp_path / "mine", push_to_hub="me/it")
    assert not (tmp_path / "mine").exists()
    run = opened(tmp_path / "mine")
    with pytest.raises(UserError, match="takes a prepared LambdaLR"):
        run.start(SimpleNamespace())
    assert failures.recorded_anywhere() and failures.record("the model is wrong", retry=False)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("retry", [True, False])
def test_the_first_error_after_the_first_record_is_recorded(retry, tmp_path):
    run = started(tmp_path)
    assert failures.record("the loss is wrong", retry) is True
    state = status(run.path)
    assert (state["state"], state["reason"]) == ("failed", "the loss is wrong")
    assert state["next"] == ("run the same command again to continue" if retry else None)
    assert failures.record("lost contact", retry=True) is False
    assert status(run.path)["reason"] == "the loss is wrong"


def test_a_longer_run_has_the_learning_rate_of_its_length(tmp_path, capsys):
    save(started(tmp_path), 7)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    inner = LambdaLR(optimizer, lambda step: 1 - step / 28)
    inner.last_epoch = 7
    scheduler = SimpleNamespace(scheduler=inner, get_last_lr=lambda: [0.5])
    run = started(tmp_path, LONGER, scheduler, {"tokens_per_second": 4}, epochs=4)
    changes = "length changed from 14 to 28 steps: the learning rate at step 7 changes from 0.5 to"
    assert f"{changes} 0.75" in capsys.readouterr().out
    assert optimizer.param_groups[0]["lr"] == 0.75
    run.log("train", 8, loss=1.0, lr=0.1)
    [line] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open() if "tokens" in line]
    assert line["tokens_per_second"] == 4 * line["samples_per_second"]


def test_a_run_continues_with_its_own_arguments_only(tmp_path):
    save(started(tmp_path), 3)
    for changed, says in (
        (dict(resume="never"), "already contains a run: with --resume never"),
        (dict(lr=0.2), r"--lr 0.2 .was 0.1."),
        (dict(plan=None, epochs=3), r"--epochs 3 .was 2."),  # without checkpoints no new length
        (dict(plan=Plan(2, 7), epochs=1), "ask for 2 steps, but the run has taken 3 already"),
    ):
        with pytest.raises(UserError, match=says):
            opened(tmp_path, **changed)
    assert opened(tmp_path, lr=0.2, may_change=["lr"]).progress["step"] == 3


def test_what_changed_since_a_checkpoint_is_said(tmp_path, capsys, script):
    save(started(tmp_path), 3)
    started(tmp_path)
    assert "warning" not in capsys.readouterr().out
    script.write_text("2")
    started(tmp_path, using=accelerator(mixed_precision="bf16"))
    printed = capsys.readouterr().out
    assert "warning: changed since that checkpoint: mixed precision no -> bf16. The " in printed
    assert f"warning: {script} has changed since this run started" in printed


def test_a_script_without_a_plan(tmp_path):
    here = accelerator()
    run = started(tmp_path, plan=None, using=here)
    assert not here.tracked
    assert json.loads((tmp_path / "args.json").read_text())["total_steps"] is None
    save(run, 5)  # has nothing to evaluate
    assert checkpoint_of(tmp_path, 5)["progress"]["evaluation_due"] is False
    run.write_results({"global_step": 5, "loss": 1.0})
    state = status(tmp_path)
    assert (state["state"], state["reason"], state["step"]) == ("finished", "all steps done", 5)
    assert opened(tmp_path, plan=None).finished == {"global_step": 5, "loss": 1.0}


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
    with pytest.raises(UserError, match="step_00000007 belongs to a run with other arguments"):
        opened(tmp_path / "others", resume=str(theirs), lr=0.2)


@pytest.mark.parametrize(("grace", "says"), [(None, False), ("89", True), ("90", False)])
def test_a_save_longer_than_the_grace_period_is_said(grace, says, tmp_path, capsys, monkeypatch):
    """Torchelastic kills its processes 30 s after SIGTERM, unless told otherwise."""
    monkeypatch.setattr(folder.launcher, "is_elastic", lambda: grace is not None)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", grace or "30")
    run = opened(tmp_path)
    line = {"split": "checkpoint", "step": 3, "seconds": 45.0, "written": True}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    run.start()
    warning = (
        f"warning: a checkpoint took 45 s, but the launcher kills its processes {grace or 30} s after "
        "SIGTERM: export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=135\n"
    )
    assert (warning in capsys.readouterr().out) == says


def test_a_batch_script_learns_which_folder_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for step in (0, 7):
        monkeypatch.setenv("RUN_FOLDER_FILE", str(tmp_path / "job.folder"))
        run = started("my run")
        assert (tmp_path / "job.folder").read_text() == f"{tmp_path}/my run\n{step}\n"
        save(run, 7)
    monkeypatch.setenv("RUN_FOLDER_FILE", str(tmp_path / "gone" / "job.folder"))
    started("my run")
    assert "by which a job is requeued, is missing" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- loop


def test_what_a_checkpoint_records_and_how_time_is_counted(tmp_path, monkeypatch, capsys):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    run = started(tmp_path)
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file),
    )
    clock.now = 130.0
    run.log("train", 3, loss=1.0, lr=0.1)
    (tmp_path / "save_now").touch()
    with run.checkpoint(3, position=[5]) as path:
        assert path == str(tmp_path / "checkpoints" / ".writing")
        assert str(tmp_path / "metrics.jsonl") in synced  # its lines are not written again
        assert process.is_stopping()  # a signal now ends the process after this block
        clock.now += 4
    assert not process.is_stopping() and not (tmp_path / "save_now").exists()
    assert "asked by the file save_now: checkpoint of step 3\n" in capsys.readouterr().out
    saved = checkpoint_of(tmp_path, 3)
    scores = {"score": None, "loss": None, "best": None, "best_loss": None, "stale": 0}
    more = {"position": [5], "train_seconds": 30.0, "evaluation_due": False}
    assert saved["progress"] == {"step": 3, **scores, **more}
    assert saved["arguments"] == run.arguments and saved["total_steps"] == 14
    clock.now += 5
    run.log("train", 4, loss=1.0, lr=0.1)
    _, line, after = (json.loads(text) for text in (tmp_path / "metrics.jsonl").open())
    assert line == dict(split="checkpoint", step=3, seconds=4.0, blocked_seconds=4.0, written=True)
    assert after["step_seconds"] == 5  # a save is not training time
    assert list(run.timed([1, 2])) == [1, 2]
    again = started(tmp_path)
    clock.now += 5
    assert again.train_seconds() == 35.0  # without the time between the two


@pytest.mark.parametrize(
    ("step", "split", "ends"), [(14, "test", True), (14, None, False), (12, "val", False)]
)
def test_after_the_last_save_a_signal_may_end_the_process(step, split, ends, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    run = started(tmp_path)
    if split:
        run.log(split, step, loss=1.0)
    save(run, step)
    assert process.stop_seconds() == (5 if ends else 20)


def test_an_error_of_the_script_while_saving_is_not_hidden(tmp_path):
    with pytest.raises(ZeroDivisionError), started(tmp_path).checkpoint(3):
        1 / 0  # noqa: B018


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A run with a checkpoint of step 3 that is written when `.let_go` is set, or when the main
    thread waits for it; `.errors` are raised by the next writes.
    """
    run, real_save = started(tmp_path, wait_for_checkpoints=False), torch.save
    run.let_go, run.errors, run.waited = threading.Event(), [], []

    def write(*args):
        while not run.let_go.wait(0.001):
            if process.waits_for() == "the checkpoint to be written":
                run.waited.append(True)
                break
        if run.errors:
            raise run.errors.pop(0)
        real_save(*args)

    monkeypatch.setattr(torch, "save", write)
    save(run, 3)
    yield run
    run.let_go.set()
    saving.wait_for_newest()


def written(run):
    return [line["step"] for line in metrics(run.path, "checkpoint") if line["written"]]


def test_a_checkpoint_is_written_beside_the_training(beside):
    assert not beside.save_due(4) and written(beside) == []
    assert not list(beside.path.glob("checkpoints/step_*"))
    beside.let_go.set()
    saving.wait_for_newest()
    assert written(beside) == []
    assert not beside.save_due(5) and written(beside) == [3]
    [line] = metrics(beside.path, "checkpoint")
    assert line["blocked_seconds"] < line["seconds"] and not beside.waited
    assert not beside.save_due(5) and written(beside) == [3]  # noted once


@pytest.mark.parametrize("then", ["checkpoint", "finish"])
def test_one_checkpoint_is_written_at_a_time(then, beside):
    if then == "finish":
        beside.finish(3)
    else:
        with beside.checkpoint(6):
            assert written(beside) == [3] and process.is_stopping()
    assert written(beside)[0] == 3 and beside.waited


def test_a_write_that_fails_beside_the_training_costs_the_checkpoint(beside, capsys):
    beside.let_go.set()
    saving.wait_for_newest()
    beside.errors = [OSError("the disk is full"), ZeroDivisionError()]
    save(beside, 4)
    saving.wait_for_newest()
    says = "checkpoint of step 4 not written, training continues: the disk is full"
    assert says in capsys.readouterr().err and not stacks.place.save_asked
    save(beside, 5)  # what is no error of a write ends the run, at the next save of all processes
    saving.wait_for_newest()
    assert not beside.save_due(8) and stacks.place.save_asked
    with pytest.raises(ZeroDivisionError):
        save(beside, 8)
    assert written(beside) == [3]


def test_only_saves_that_fail_in_a_row_end_the_run(tmp_path):
    run = started(tmp_path)

    def fail(step):
        with run.checkpoint(step):
            raise OSError("the file server is away")

    fail(4)
    fail(5)
    save(run, 6)
    fail(7)
    fail(8)
    with pytest.raises(
        RunFailed, match=r"3 checkpoints in a row could .* of step 6\. Make "
    ) as caught:
        fail(9)
    assert caught.value.retry and str(tmp_path) in str(caught.value)


@pytest.fixture
def world(monkeypatch):
    """Two processes: threads, each with an accelerator of its own."""
    made = World(2)
    monkeypatch.setattr(collectives, "dist", made)
    return made


NAN = math.nan


@pytest.mark.parametrize(
    ("values", "agreed"),
    [
        ([(0.5, 0.0), (0.5 + 1e-7, 1e-12)], (0.5, 0.0)),
        ([(0.5 + 1e-7, None), (torch.tensor(0.5), None)], (0.5 + 1e-7, None)),
        ([(NAN, 1.0)] * 2, (NAN, 1.0)),
        ([(0.5, None), (0.6, None)], None),
        ([(0.5, 2.0), (0.5, 2.1)], None),
    ],
)
def test_the_processes_decide_by_the_score_of_the_first(values, agreed, tmp_path, world):
    """Scores differ by rounding; if they differ more, a gather is missing."""
    save(started(tmp_path), 7)

    def process_of(here):
        run = started(tmp_path, using=accelerator(processes=2, rank=here.process_index))
        score, loss = values[here.process_index]
        run.log("val", 7, score=score, loss=loss)
        run.log("val", 8, score=0.5, loss=0.0)
        return run.save_due(8)

    outcomes = world.run(process_of)
    if agreed is None:
        assert all(isinstance(error, RunFailed) and not error.retry for error in outcomes)
        assert "gather_for_metrics" in str(outcomes[1])
    else:
        assert outcomes == [agreed[0] != 0.5 + 1e-7] * 2
        progress = checkpoint_of(tmp_path, 7)["progress"]
        assert str((progress["score"], progress["loss"])) == str(agreed)


def test_the_other_processes_neither_write_nor_print(tmp_path, monkeypatch, capsys, world):
    uploads, mine = [], [accelerator(processes=2, rank=rank) for rank in (0, 1)]
    monkeypatch.setattr(model_card, "check_repository", lambda name: None)
    monkeypatch.setattr(model_card, "upload", lambda *args: uploads.append(args))

    def process_of(here):
        run = started(tmp_path, using=mine[here.process_index], push_to_hub="me/it")
        run.log("val", 14, score=0.5)
        run.print("said")
        run.finish(14, val_accuracy=0.5)
        run.close()
        with pytest.raises(SystemExit):
            run.exit_preempted(14)

    assert world.run(process_of) == [None, None]
    [line] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert (line["split"], line["step"], line["score"]) == ("val", 14, 0.5)
    printed = capsys.readouterr().out
    for words in ("14 steps, 7 per", "said\n", "done: ", "stopped by"):
        assert printed.count(words) == 1
    assert uploads == [(tmp_path, "me/it")] and len(mine[0].tracked) == 1
    assert not mine[1].tracked and not mine[1].trackers[0].calls and mine[1].ended


def test_a_test_split_has_no_score(tmp_path):
    with pytest.raises(ValueError, match="a test split never chooses"):
        started(tmp_path).log("test", 7, score=0.5)


def test_a_folder_that_is_replaced_ends_the_run(tmp_path):
    run = started(tmp_path / "mine")
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


# ------------------------------------------------------------------------------------------ end


@pytest.mark.parametrize("name", ["SIGUSR1", None])
def test_a_stopped_run(name, tmp_path, capsys, monkeypatch):
    hooks = []
    monkeypatch.setattr(process, "on_preempted", hooks.append)
    monkeypatch.setattr(process, "signal_name", lambda: name)
    here = accelerator()
    run = started(tmp_path, using=here)
    save(run, 3)
    for where, says in ((6, "at step 6, saved at step 3"), ("during one", "during one")):
        with pytest.raises(SystemExit) as caught:
            run.exit_preempted(where)
        assert caught.value.code == process.PREEMPTED == 75 and here.ended
        reason = f"stopped by {name or 'a signal to another process'} {says}"
        again = "run the same command again to continue"
        assert capsys.readouterr().out.endswith(f"{reason}: {again}\n")
        state = {**status(tmp_path), "time": None}
        expected = dict(state="preempted", reason=reason, time=None, step=3, next=again)
        assert state == expected
    hooks[0]("stopped in a step")  # what a signal calls that does not wait for the step
    assert status(tmp_path) | {"time": None} == expected | {"reason": "stopped in a step"}


def test_a_finished_run(tmp_path, capsys, monkeypatch):
    clock, uploads, here = SimpleNamespace(now=100.0), [], accelerator()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(folder, "memory_bytes", lambda device: 5 << 30)
    monkeypatch.setattr(model_card, "check_repository", lambda name: None)
    monkeypatch.setattr(model_card, "upload", lambda *args: uploads.append(args))
    run = started(tmp_path, using=here, push_to_hub="me/it")
    run.log("val", 14, score=0.5, loss=0.25)
    save(run, 14)
    clock.now = 120.0
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
    assert status(tmp_path)["state"] == "finished" and not uploads
    capsys.readouterr()
    run.close()
    printed = capsys.readouterr().out
    assert printed.startswith("done: val accuracy 0.5000\n14 steps, 140 samples in 20 s")
    assert uploads == [(tmp_path, "me/it")] and not (tmp_path / "README.md").exists()  # no weights
    assert here.trackers[0].calls[-1][1] == {"final/val_accuracy": 0.5}
    assert opened(tmp_path).finished == results(tmp_path)
    assert capsys.readouterr().out == (
        "this run has already finished, nothing to do: val accuracy 0.5000\n"
        "14 steps, 140 samples in 20 s (7.0 samples/s), 1 process, peak memory 5.0 GiB\n"
        f"output: {tmp_path}; best checkpoint: {tmp_path}/checkpoints/step_00000014\n"
        "to train longer, run the same command with a larger --epochs or --max_train_steps\n"
    )
    assert opened(tmp_path, push_to_hub="me/it").finished and len(uploads) == 2
    longer = opened(tmp_path, LONGER, epochs=4)
    assert longer.finished is None and longer.progress["step"] == 14
    (tmp_path / "results.json").rename(tmp_path / "removed")
    restored = opened(tmp_path)  # it writes the results again
    assert restored.finished is None and restored.progress["step"] == 14
    (tmp_path / "removed").rename(tmp_path / "results.json")
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="checkpoints are gone: train its weights further in anoth"):
        opened(tmp_path, LONGER, epochs=4)


def test_what_follows_a_run_is_shown_and_a_card_that_fails_costs_a_warning(
    tmp_path, capsys, monkeypatch, script
):
    """The command can be copied into a shell; it is for a script that is there."""
    cards = []

    def write(*args, **options):
        cards.append((args, options))
        if len(cards) == 2:
            raise KeyError("hardware")

    monkeypatch.setattr(model_card, "write", write)
    script.with_name("look.py").touch()
    for name, command in (("my run", "look.py"), ("bad", "other.py")):
        run = started(tmp_path / name)
        (run.path / "model.safetensors").write_bytes(b"")
        run.finish(14)
        run.close(f"{command} {run.path} --words more", card={"title": "it"})
        output = capsys.readouterr()
        assert ("warning: the model card README.md is missing" in output.err) == (name == "bad")
        assert "done: " in output.out and ("next" in output.out) == (name == "my run")
        if name == "my run":
            words = ["python", f"{script.parent}/look.py", str(run.path), "--words", "more"]
            assert shlex.split(output.out.splitlines()[-1]) == ["next:", *words]
    [((path, record, figures), options), _] = cards
    assert (path, options) == (tmp_path / "my run", {"title": "it"})
    assert record["arguments"]["lr"] == 0.1 and figures == results(tmp_path / "my run")
