"""Proves the tests that start commands: makes one wrong edit at a time in a copy of the project, of a
kind that only launches can notice, and fails if the tests named for it pass.

python tests/canaries.py              # all, two at a time; prints which test noticed each
python tests/canaries.py guard plan   # those whose name or file contains one of the words
"""

import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from harness import warm

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600
COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
# See .ci/run; tests of an edit that has begun are all run.
BEGIN_UNTIL = float(os.environ.pop("BEGIN_UNTIL", "inf"))

# A name and a file; the lines that stand there once, and what they become; what pytest is told to
# run.
EDITS = r"""
every epoch in the order of the first (scripts/train_cifar.py)
- train_loader.set_epoch(epoch)
+ pass
= test_every_script.py -k 'each_epoch and train_cifar'

nothing is skipped (scripts/train_cifar.py)
- remaining.rest(train_loader)
+ train_loader
= test_every_script.py -k 'same_bytes and train_cifar'

every epoch in the same order (scripts/train_gpt.py)
- train_loader.set_epoch(epoch)
+ train_loader.set_epoch(0)
= test_every_script.py -k 'each_epoch and train_gpt'

the loss is a mean of means (scripts/train_lm.py)
- targets = count_targets(accelerator, micro_batches)
+ targets = sum((b["targets"] >= 0).sum() for b in micro_batches) * processes
= test_every_script.py -k 'same_samples and train_lm'

loss of one rank (scripts/train_cifar.py)
- accelerator.reduce(torch.stack(losses).mean(), "mean").item()
+ mean_loss.item()
= test_every_script.py -k 'global_batch and train_cifar'

padding is scored (scripts/train_minimal.py)
- accelerator.gather_for_metrics(model
+ accelerator.gather(model
= test_every_script.py -k 'held_out_sample and train_minimal'

a stream of documents forgets its position (scripts/train_lm.py)
- position = progress.get("position")
+ position = None
= test_streams.py

the last evaluation takes a part, GPT (scripts/train_gpt.py)
- evaluate(accelerator, model, last_loader, progress)
+ evaluate(accelerator, model, eval_loader, progress)
= test_gpt.py -k last_one_all

no seed for dropout (scripts/train_gpt.py)
- seed_step(accelerator, args.seed, step, len(losses))
+ pass
= test_every_script.py -k 'same_bytes and train_gpt'

module. in the export (scripts/train_cifar.py)
- accelerator.unwrap_model(model), config
+ model, config
= test_train_cifar.py -k export

the name is not synced (utils/run/manifest.py)
- sync(target.parent)
+ pass
= test_crash.py -k any_file

nothing is saved on a signal (scripts/train_cifar.py)
- if stop or run.save_due
+ if run.save_due
= test_signals.py -k signal_to_the_launcher

an evaluation that a signal prevented is never done (scripts/train_minimal.py)
-     if run.evaluation_due:
+     if False:
= test_signals.py -k interrupted

orphans live on (utils/run/process.py)
- ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ORPHANED)
+ pass
= test_faults.py -k orphans

one process has no time to save (utils/run/process.py)
- SAVE_SECONDS = 60
+ SAVE_SECONDS = 1
= test_signals.py -k time_to_save

every process prints the error (utils/run/entry.py)
- if error.rank_variable and int(os.environ.get(error.rank_variable, 0)) != 0:
+ if False:
= test_train_cifar.py -k printed_once

each process prints its traceback (utils/run/process.py)
-     if not is_main():  # the first one
+     if False:  # the first one
= test_minimal.py -k short_traceback

processes that lost contact fail too (utils/run/entry.py)
- process.wait_for_launcher(5)
+ pass
= test_faults.py -k lost_contact

invalid input ends with 1 (utils/run/entry.py)
- 1 if isinstance(error, RunFailed) else 2
+ 1
= test_refusals.py

a wait inside C++ outlives a signal (utils/run/process.py)
- signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
+ pass
= test_signals.py -k stopped_process

nohup protects no longer (utils/run/process.py)
- if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
+ if True:
= test_signals.py -k usual

a signal after the last save waits for all results (utils/run/process.py)
-         elif state.phase == "finishing":
+         elif False:
= test_signals.py -k how_a_run_ended

outputs are sent from the host (scripts/train_cifar.py)
- accelerator.gather_for_metrics((logits, batch["labels"]))
+ accelerator.gather_for_metrics((logits.cpu(), batch["labels"]))
= test_gpu_rules.py -k train_cifar

a step of the loop waits for its loss (scripts/train_gpt.py)
- losses.append(loss.detach())
+ losses.append(loss.detach() + 0 * loss.item())
= test_gpu_rules.py -k train_gpt

the job is not requeued (scripts/submit.sbatch)
- scontrol requeue Incomplete "$SLURM_JOB_ID"
+ false
= test_submit.py -k preempted

a job without progress is requeued (scripts/submit.sbatch)
- && ((10#${step:-0} > start)) && lost=1
+ && lost=1
= test_submit.py -k only_after_progress

a process that makes no progress asks for nothing (utils/scale/watchdog.py)
-             self.ask(f"{STILL} {passed:.0f} s")
+             pass
= test_hangs.py -k before_the_time_out

frozen weights are part of a checkpoint of LoRA (scripts/train_lm.py)
- adapters.save_trained_only(accelerator.unwrap_model(model))
+ accelerator.unwrap_model(model)
= test_train_lm.py -k lora
"""


class Edit(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str


def edits():
    """Reads `EDITS`."""
    for block in EDITS.strip().split("\n\n"):
        first, *lines, last = block.splitlines()
        name, file = re.fullmatch(r"(.+) \((\S+)\)", first).groups()
        old, new = ([line[2:] for line in lines if line[0] == sign] for sign in "-+")
        yield Edit(name, file, "\n".join(old), "\n".join(new), last.removeprefix("= "))


def outcome(edit):
    """Applies the edit to a copy and runs its tests; returns the test that noticed, or why there is
    none; None: they pass.
    """
    if time.time() > BEGIN_UNTIL:
        return "left out, because this machine is slow"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        shutil.copytree(ROOT, copy, ignore=COPIED)
        text = (copy / edit.file).read_text()
        if text.count(edit.old) != 1:
            raise SystemExit(f"{edit.name}: its lines are not in {edit.file}, or several times")
        (copy / edit.file).write_text(text.replace(edit.old, edit.new))
        file, *options = shlex.split(edit.tests)
        words = ["-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", ""]
        words += ["--basetemp", f"{folder}/tmp", str(next((copy / "tests").rglob(file))), *options]
        began = time.monotonic()
        done = warm.run(words, dict(os.environ), SECONDS, cwd=str(copy))
        seconds = time.monotonic() - began
    if done.returncode == 0:
        return None if " passed" in done.stdout else "skipped here, as its tests are"
    noticed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or not noticed:
        output = done.stdout[-3000:] + done.stderr[-3000:]
        raise SystemExit(f"{edit.name}: the tests did not run\n{output}")
    return f"{noticed[1].removeprefix('tests/')}, {seconds:.0f} s"


def main():
    # What a shell starts in the background ignores these; the tests send them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    words, began, missed = sys.argv[1:], time.monotonic(), []
    chosen = [
        e for e in edits() if not words or any(word in f"{e.name} {e.file}" for word in words)
    ]
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_WAIT_POLICY="passive")
    with tempfile.TemporaryDirectory() as home:
        os.environ["HF_HOME"] = home
        with (
            warm.server(dict(os.environ)) as os.environ[warm.ADDRESS],
            ThreadPoolExecutor(2) as pool,
        ):
            for edit, noticed in zip(chosen, pool.map(outcome, chosen), strict=True):
                print(f"{edit.name} ({edit.file}): {noticed or 'NOT NOTICED'}", flush=True)
                missed += [] if noticed else [edit.name]
    seconds = time.monotonic() - began
    print(f"\n{len(missed)} of {len(chosen)} wrong edits were missed, in {seconds:.0f} s")
    if missed:
        raise SystemExit(f"not noticed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
