"""The folder of a run through all that can happen to it: a model says what it holds after each event.

Hypothesis chooses the events: steps and their scores, a full disk, a signal, a kill, damage, the
end, and going on with more steps or patience. (promises/test_crash.py kills between any two file
operations.)
"""

import argparse
import contextlib
import math
import os
import resource
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import fakes
from harness.launches import results, status
from harness.worlds import in_forks
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from utils.run import manifest, process
from utils.run.failures import RunFailed
from utils.run.files import json_lines
from utils.run.folder import RunFolder
from utils.run.plan import Plan
from utils.run.saves import FAILED_SAVES, Writer
from utils.scale.saving import BackgroundWriter

EVALUATE_EVERY, SAVE_EVERY = 2, 3
LINE = ("loss", "score", "written")  # of what a line of metrics.jsonl says
EVALUATIONS = st.tuples(st.sampled_from([0.1, 0.2, 0.3]), st.sampled_from([1.0, 2.0, None]))
DISK_IS_FULL = st.sampled_from([False, False, True])


def best(evaluations):
    """The step with the highest score; of equal ones the lowest loss, then the latest; or None."""

    def rank(step):
        score, loss = evaluations[step]
        return score, -math.inf if loss is None else -loss, step

    return max(evaluations, key=rank, default=None)


class Folder(RuleBasedStateMachine):
    writers = None  # while a test runs: the ways to write a checkpoint, by name

    def __init__(self):
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.path, self.copies = Path(self.temporary.name, "0"), 0
        self.total = 10
        self.outcomes = {}  # step -> (score, loss), the same whenever it is evaluated
        self.lines = {}  # (split, step) -> what is in metrics.jsonl
        self.evaluations = {}  # step -> (score, loss), what the run knows
        self.saved, self.damaged = {}, set()  # step -> what its checkpoint records; steps

    @initialize(
        keep=st.integers(1, 2),
        writer=st.sampled_from(["none", "background"]),
        patience=st.sampled_from([None, 2]),
    )
    def begin(self, keep, writer, patience):
        self.keep, self.writer, self.patience = keep, self.writers[writer], patience
        self.start()

    def teardown(self):
        self.wait()
        process.training_starts()
        self.temporary.cleanup()

    def wait(self):
        """Until no thread writes or deletes a checkpoint."""
        if isinstance(self.writer, BackgroundWriter):
            self.writer.wait_for_newest()

    # ------------------------------------------------------------------------------- processes

    def opened(self):
        """The folder as a new process sees it."""
        self.wait()
        arguments = dict(resume="auto", batch_size=10, epochs=self.total, patience=self.patience)
        arguments |= dict(output_dir=self.path, keep_checkpoints=self.keep)
        accelerator = fakes.accelerator(
            end_training=lambda: None, save_state=self.save_state, load_state=self.load_state
        )
        args = argparse.Namespace(**arguments)
        run = RunFolder(args, accelerator, {"patience"}, writer=self.writer)
        run.open(Plan(self.total, 4, 1, 1, EVALUATE_EVERY, SAVE_EVERY))
        return run, accelerator

    def start(self):
        """A new process continues from the newest checkpoint that is whole."""
        self.weights = torch.zeros(1)
        self.run, self.accelerator = self.opened()
        assert self.run.finished is None
        step = self.run.start()
        process.training_starts()
        assert step == max(self.saved.keys() - self.damaged, default=0)
        assert self.weights.item() == step
        assert self.run.progress.get("position", [0]) == [step]
        due = bool(step) and self.saved[step]["evaluation_due"]
        assert self.run.evaluation_due == due
        self.step = self.started_at = self.saved_at = step
        self.lines = {key: line for key, line in self.lines.items() if key[1] <= step}
        known = range(step if due else step + 1)
        self.evaluations = {at: pair for at, pair in self.evaluations.items() if at in known}
        longer = step and self.saved[step]["total_steps"] != self.total  # gets new patience
        self.stale = self.saved[step]["stale"] if step and not longer else 0
        self.failed, self.unnoted = 0, None  # in a row; (step, written) of the newest save
        self.unsettled = step if due else None  # that of a checkpoint which is not complete yet

    def save_state(self, folder):
        if self.full:
            raise OSError("No space left on device")
        torch.save({"weights": self.weights}, f"{folder}/state.bin")

    def load_state(self, folder, map_location):
        self.weights = torch.load(f"{folder}/state.bin", map_location)["weights"]

    # ------------------------------------------------------------------------------- the model

    def out_of_patience(self):
        return self.patience is not None and self.stale >= self.patience

    def ended(self):
        return self.step == self.total or self.out_of_patience()

    def evaluation_due(self, step):
        return step % EVALUATE_EVERY == 0 or step == self.total

    def record(self, step):
        """What the checkpoint of this step says of the run now."""
        score, loss = self.evaluations.get(step, (None, None))
        highest, its_loss = self.evaluations.get(best(self.evaluations), (None, None))
        scores = {"score": score, "loss": loss, "best": highest, "best_loss": its_loss}
        due = self.evaluation_due(step) and step not in self.evaluations
        return scores | {"stale": self.stale, "evaluation_due": due, "total_steps": self.total}

    def best_saved(self):
        pairs = {step: (record["score"], record["loss"]) for step, record in self.saved.items()}
        return best({step: pair for step, pair in pairs.items() if pair[0] is not None})

    def settle(self):
        """A checkpoint is complete with its evaluation: only then are older ones deleted.

        The newest ones and the best one stay; later ones are damaged, and go.
        """
        newest = self.unsettled
        if newest is None or self.unnoted or self.record(newest)["evaluation_due"]:
            return
        self.unsettled = None
        saved = self.saved | {newest: self.record(newest)}
        self.saved = {step: saved[step] for step in sorted(saved) if step <= newest}
        stay = {*list(self.saved)[-self.keep :], self.best_saved()}
        self.saved = {step: record for step, record in self.saved.items() if step in stay}

    def note(self):
        """The run learns how its newest save went; returns whether too many failed in a row."""
        if self.unnoted is not None:
            (step, written), self.unnoted = self.unnoted, None
            self.lines["checkpoint", step] = {"written": written}
            self.failed = 0 if written else self.failed + 1
            self.saved_at = step if written else self.saved_at
            self.settle()
        return self.failed == FAILED_SAVES

    def hearing_of_it(self, ends):
        """A call that hears of one more failed save, which may end the run."""
        says = f"in a row .* the last one is of step {self.saved_at}\\."
        return pytest.raises(RunFailed, match=says) if ends else contextlib.nullcontext()

    # ------------------------------------------------------------------------- steps and saves

    def take_step(self):
        self.step += 1
        self.weights += 1
        self.lines["train", self.step] = {"loss": 1 / self.step}
        self.run.log("train", self.step, loss=1 / self.step, lr=0.1)

    def evaluate(self, evaluation):
        score, loss = self.outcomes.setdefault(self.step, evaluation)
        self.evaluations[self.step] = (score, loss)
        self.stale = 0 if best(self.evaluations) == self.step else self.stale + 1
        measured = {} if loss is None else {"loss": loss}
        self.lines["val", self.step] = measured | {"score": score}
        self.settle()
        self.run.log("val", self.step, score=torch.tensor(score, dtype=torch.double), loss=loss)
        self.wait()
        assert not self.run.evaluation_due

    def save_due(self):
        if self.unnoted and self.unnoted[1]:
            self.note()
        due = self.step % SAVE_EVERY == 0 or self.evaluation_due(self.step)
        assert self.run.save_due(self.step) == due
        self.wait()
        return due

    def save(self, fails=False, last=False):
        """Returns whether the run goes on: too many failed saves in a row end it."""
        ends = self.note()
        if not ends:
            self.unnoted = (self.step, not fails)
            ends = (last or self.step == self.total) and self.note()
        self.full, checked = fails, []
        guard = SimpleNamespace(check=checked.append)
        block = self.run.checkpoint(self.step, guard, "the model", position=[self.step])
        with self.hearing_of_it(ends), block as folder:
            self.accelerator.save_state(folder)
        assert checked == ["the model"]
        self.weights += 100  # what a thread writes was copied before
        self.wait()
        self.weights -= 100
        if ends:
            self.start()
        elif not fails:
            self.saved[self.step], self.unsettled = self.record(self.step), self.step
            self.damaged -= {self.step}
            self.settle()
        return not ends

    def can_train(self):
        return not self.run.evaluation_due and not self.ended()

    @precondition(can_train)
    @rule(steps=st.lists(st.tuples(EVALUATIONS, DISK_IS_FULL), min_size=1, max_size=6))
    def train(self, steps):
        for evaluation, fails in steps:
            if not self.ended():
                self.take_step()
                if self.save_due() and not self.save(fails):
                    return
                if self.evaluation_due(self.step):
                    self.evaluate(evaluation)

    # --------------------------------------------------------------------------------- events

    @precondition(lambda self: self.step > self.started_at)
    @rule()
    def kill(self):
        """What the process leaves is a copy: its lock ends with it."""
        killed, self.copies = self.path, self.copies + 1
        self.path = killed.with_name(str(self.copies))
        shutil.copytree(killed, self.path, ignore=shutil.ignore_patterns(".lock"))
        self.start()

    @precondition(can_train)
    @rule()
    def stop_by_a_signal(self):
        """It prevents an evaluation."""
        self.take_step()
        self.save_due()
        process.stopping_starts()
        if self.save(last=True):
            with pytest.raises(SystemExit) as exit:
                self.run.exit_preempted(self.step)
            assert exit.value.code == process.PREEMPTED
            assert status(self.path)["state"] == "preempted"
            assert status(self.path)["step"] == self.saved_at == self.step
            self.start()

    @precondition(lambda self: self.run.evaluation_due)
    @rule(evaluation=EVALUATIONS)
    def evaluate_what_a_signal_prevented(self, evaluation):
        self.evaluate(evaluation)

    @precondition(lambda self: len(self.saved.keys() - self.damaged) > 1)
    @rule()
    def damage_the_newest_checkpoint(self):
        newest = max(self.saved.keys() - self.damaged)
        self.damaged.add(newest)
        (self.path / "checkpoints" / f"step_{newest:08d}" / "state.bin").write_bytes(b"damaged")
        self.start()

    @precondition(lambda self: self.ended() and not self.run.evaluation_due)
    @rule(more=st.sampled_from(["steps", "patience"]))
    def finish_and_go_on(self, more):
        ends = self.note()
        with self.hearing_of_it(ends):
            self.run.finish(self.step, val_loss=0.5)
        if not ends:
            self.run.close()
            early = self.check_results()
            if early and more == "patience":
                self.patience += 1
            else:
                self.total += 4
        self.start()

    def check_results(self):
        written, early = results(self.path), None
        if self.out_of_patience():
            early = {"patience": self.patience, "total_steps": self.total}
        stays = self.best_saved() and f"step_{self.best_saved():08d}"
        assert (written["global_step"], written["best_checkpoint"]) == (self.step, stays)
        assert (written["resumed_from"], written.get("stopped_early")) == (self.started_at, early)
        assert status(self.path)["state"] == "finished" and status(self.path)["step"] == self.step
        assert self.opened()[0].finished == written
        return early

    @invariant()
    def the_folder_holds_what_the_model_says(self):
        lines = list(json_lines(self.path / "metrics.jsonl"))
        values = [{name: line[name] for name in LINE if name in line} for line in lines]
        places = [(line["split"], line["step"]) for line in lines]
        assert len(set(places)) == len(places)
        assert dict(zip(places, values, strict=True)) == self.lines
        checkpoints = {}
        for path in manifest.all_in(self.path):
            step = int(path.name[len("step_") :])
            said = manifest.read(path)
            values = said["progress"] | {"total_steps": said["total_steps"]}
            checkpoints[step] = {name: values[name] for name in self.record(step)}
        assert checkpoints == self.saved
        assert status(self.path)["state"] == "running"
        assert status(self.path)["step"] == self.started_at
        assert self.run.best.out_of_patience() == self.out_of_patience()


QUICK = settings(max_examples=20, stateful_step_count=20, phases=[Phase.generate])
THOROUGH = settings(max_examples=200, stateful_step_count=30)  # it also looks for fewer events


@pytest.mark.parametrize("how", [QUICK, pytest.param(THOROUGH, marks=pytest.mark.slow)])
def test_a_run_loses_nothing_that_it_promised(how, monkeypatch):
    # What args.json records of git and of packages takes most of the time.
    failed = subprocess.CompletedProcess([], 1, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(metadata, "version", lambda package: "1")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # takes time

    def run_machine(_rank):
        here = fakes.accelerator()
        writers = {"none": Writer(), "background": BackgroundWriter(here)}
        monkeypatch.setattr(Folder, "writers", writers)
        # A process that was killed keeps its files open here, until this process ends.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        run_state_machine_as_test(Folder, settings=how)

    for outcome in in_forks(run_machine):
        if outcome is not None:
            raise outcome
