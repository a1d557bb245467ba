"""Starts scripts as users do, and reads the files that they write."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import psutil
import pytest

from harness import warm
from harness.data import SMALL_DATA
from scripts.tools.chaos import CLOCK

ROOT = Path(__file__).resolve().parents[2]

WRAPPED = str(ROOT / "tests" / "harness" / "wrapped.py")
CIFAR, GPT = "scripts/train_cifar.py", "scripts/train_gpt.py"
COLD = "PYTEST_COLD"  # the environment variable that tells pytest's own processes of --cold
LIMIT = 450  # seconds for one launch, so that a hang fails one test and does not block the suite

# A small run with evaluation and checkpoints mid-epoch, without batch norm (so that topologies
# compute the same).
SMALL = (
    f"--dataset {SMALL_DATA} --model net --batch_size 60 --max_train_steps 14 --log_every 1 "
    "--eval_every 7 --checkpoint_every 3"
)
# Saves only when it is stopped.
ENDLESS = f"{SMALL} --max_train_steps 100000 --eval_every 100000 --checkpoint_every 0"
# For train_gpt.py, the smallest of the scripts whose loader has workers.
TINY_GPT = "--dataset synthetic --n_layer 1 --n_head 1 --n_embd 16 --block_size 16 --batch_size 4"
GPT_WITH_A_WORKER = (
    f"{TINY_GPT} --num_workers 1 --max_train_steps 100000 --eval_every 100000 --checkpoint_every 0 "
    "--log_every 1"
)


def some_slow(names, *slow):
    """Parameters for a test, of which those in `slow` are marked so."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


def command(
    config, script, arguments, *, output_dir=None, root=ROOT, launcher=(), host=(), faults=""
):
    """The command line for `script` (a path below `root`); without `config`, it starts Python and
    `launcher` (if any) directly.

    Args:
        host (tuple[str]): the words that start a command on another machine.
        faults (str): names of faults that `wrapped.py` injects, as "die_in_step@6".
    """
    start = [*host, sys.executable, *(() if config else launcher)]
    if config:
        own_file = str(config).endswith(".yaml") and "/" in str(config)
        yaml = config if own_file else ROOT / "accelerate_configs" / f"{config}.yaml"
        start += ["-m", "accelerate.commands.accelerate_cli", "launch"]
        start += ["--config_file", str(yaml), *launcher]
    arguments = arguments.split() if isinstance(arguments, str) else list(arguments)
    if output_dir:
        arguments += ["--output_dir", str(output_dir)]
    wrapped = [word for fault in faults.split() for word in (WRAPPED, fault)]
    return [*start, *wrapped, str(root / script), *arguments]


def run(config, script, arguments="", *, check=True, cold=None, **kwargs):
    """Runs a script to its end; returns the completed process with its output.

    Args:
        cold (bool | None): whether to start a new interpreter, by `exec`; None: as `--cold` says.
    """
    cold = COLD in os.environ if cold is None else cold
    environment = {**os.environ, **kwargs.pop("env", {})}
    words = command(config, script, arguments, **kwargs)
    if cold:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, env=environment)
    else:
        done = warm.run(words[1:], environment, LIMIT)
    if check and done.returncode:
        output = f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        raise AssertionError(f"exit code {done.returncode}\n{output}")
    return done


class Started:
    """A running launch, in its own process group.

    A test reads its output line by line and waits for words, not for a time.
    """

    def __init__(self, config, script, arguments, machine=None, **kwargs):
        environment = {**os.environ, **kwargs.pop("env", {}), "PYTHONUNBUFFERED": "1"}
        words = command(config, script, arguments, **kwargs)
        reader, writer = os.pipe()
        self.output = os.fdopen(reader, errors="replace")
        with os.fdopen(writer, "w") as writer:
            own = dict(start_new_session=True)
            if words[0] == sys.executable and COLD not in os.environ:
                own["machine"] = machine
                self.process = warm.Program(words[1:], environment, writer, writer, **own)
            else:  # --cold, or after words that only a command can follow
                own |= dict(stdout=writer, stderr=subprocess.STDOUT, env=environment)
                self.process = subprocess.Popen(words, **own)
        self.lines = []

    def wait_for(self, words):
        """Reads until a line contains `words`; ends the launch if none does."""
        killer = threading.Timer(LIMIT, self.process.kill)
        killer.start()
        for line in self.output:
            self.lines.append(line)
            if words in line:
                killer.cancel()
                return line
        raise AssertionError(f"'{words}' never came:\n{''.join(self.lines)[-6000:]}")

    def kill_all(self):
        """Sends SIGKILL to the launcher and all its descendants (each worker is in its own session)."""
        launcher = psutil.Process(self.process.pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            process.kill()
        self.finish()

    def finish(self):
        """Reads the rest of the output; returns (exit code, complete output)."""
        killer = threading.Timer(LIMIT, self.process.kill)
        killer.start()
        self.lines += self.output  # until the last process that writes to it has exited
        killer.cancel()
        return self.process.wait(LIMIT), "".join(self.lines)

    def workers(self):
        """Process ids of the training processes, by rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                environment = child.environ()
            except psutil.Error:
                continue
            if any(part.endswith(".py") and "scripts" in part for part in child.cmdline()):
                found.setdefault(int(environment.get("RANK", 0)), child.pid)
        return found


def as_if_killed(whole, folder, step):
    """Makes `folder` what a kill after the checkpoint of a step leaves of a finished run, which has
    kept all its checkpoints. Lines that were logged later are still there, exports are not.
    """
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(".lock", "results.json"))
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    for path in folder.rglob("*.safetensors"):
        if "checkpoints" not in path.parts:
            path.unlink()
    state = {**status(folder), "state": "running", "step": step + 1}
    (folder / "status.json").write_text(json.dumps(state))


def scores(folder):
    """step -> score of every checkpoint that was kept."""
    manifests = (Path(folder) / "checkpoints").glob("step_*/manifest.json")
    progress = [json.loads(path.read_text())["progress"] for path in manifests]
    return {entry["step"]: entry["score"] for entry in progress}


def all_end(processes, seconds=60):
    """Whether all of `processes` end long before their runs could; a zombie that its new parent did
    not collect counts.

    Kills those that do not, which would otherwise train on, and write to a folder that is being
    removed.
    """
    deadline = time.monotonic() + seconds
    while alive := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            for process in alive:
                process.kill()
            all_end(alive)
            return False
        psutil.wait_procs(processes, timeout=0.1)
    return True


def script_file(name):
    """The file of a script, a tool or a benchmark."""
    return next((ROOT / "scripts").rglob(f"{name}.py"))


def load_script(name):
    """Imports a script, a tool or a benchmark as a module."""
    folders = [str(script_file(name).parent), str(ROOT / "scripts")]
    sys.path[:0] = folders
    try:
        return importlib.import_module(name)
    finally:
        for folder in folders:
            sys.path.remove(folder)


def results(folder):
    return json.loads((Path(folder) / "results.json").read_text())


def status(folder):
    return json.loads((Path(folder) / "status.json").read_text())


def metrics(folder, split):
    """The lines of one split in metrics.jsonl, without the values that depend on timing."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["split"] == split]
    return [{name: v for name, v in line.items() if name not in CLOCK} for line in lines]


def column(folder, name, split="train"):
    """One of the values in metrics.jsonl: step -> value."""
    return {line["step"]: line[name] for line in metrics(folder, split)}


def final_weights(folder):
    """The hash of the exported weights, or of those of an adapter.

    (Of the bytes themselves a failing `==` would print a difference, for minutes.)
    """
    names = "model.safetensors", "model/model.safetensors", "adapter/adapter_model.safetensors"
    found = [path for path in (Path(folder, name) for name in names) if path.exists()]
    return sha256(found[0].read_bytes()).hexdigest()


def run_once(made_once, name, *args, **kwargs):
    """A run that tests share and do not change: the completed process, with its folder as `.folder`."""

    def make(folder):
        done = run(*args, output_dir=folder, **kwargs)
        done.folder = folder
        return done

    return made_once(name, make)


def run_as_if_killed(config, script, words, folder, **options):
    """Runs a script, and then from what a kill in step 6 would have left: the result is the same.

    Args: words (str): its arguments, for 8 steps, with a checkpoint after the fourth.

    Returns:
        Path: the folder of the whole run.
    """
    whole, killed = folder / "whole", folder / "killed"
    words += " --gradient_accumulation_steps 2 --keep_checkpoints 9"
    run(config, script, words, output_dir=whole, **options)
    as_if_killed(whole, killed, 4)
    run(config, script, words, output_dir=killed, **options)
    assert results(killed)["resumed_from"] == 4
    assert final_weights(killed) == final_weights(whole)
    for split in ("train", "val"):
        assert column(killed, "loss", split) == column(whole, "loss", split)
    return whole
