"""What the benchmarks share: rounds, and loops and scripts that run in new processes.

    python scripts/benchmarks/measuring.py gpt.plain_gpt --options '{"steps": 20}'

Runs one of the loops that the benchmarks compare the training scripts with, in plain PyTorch: a
generator in a module of this folder, which yields after each step. Prints the seconds of each step
and what the loop returns, as JSON. With torchrun, `cifar.plain_cifar` uses DDP over gloo.
"""

import contextlib
import importlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# Finds `utils` and the training scripts next to this script (a copy) or above (the repository).
sys.path[1:1] = map(str, Path(__file__).resolve().parents[1:3])
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # ends this process when the benchmark that started it does

import psutil
import torch

from utils.run import entry
from utils.run.arguments import Parser
from utils.run.files import json_lines

HERE = Path(__file__).resolve().parent
# The training scripts: next to this file in a copy, or one folder up.
SCRIPTS = HERE if (HERE / "train_cifar.py").exists() else HERE.parent
QUIET = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
STEP = re.compile(r"step +\d+(/|$)|Train: 0 \[|Epoch: \[0\]  \[")  # of us, timm, torchvision


def rounds(args):
    """Yields the number of each round, from 0, and prints it."""
    for index in range(args.rounds):
        print(f"    round {index + 1} of {args.rounds}", flush=True)
        yield index


def measure_loop(name, processes=1, **options):
    """Runs one of the plain loops in new processes.

    Returns:
        dict: `seconds` of each step; `results` (dict), what the loop returned.
    """
    words = python(processes) + [__file__, name, "--options", json.dumps(options)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment())
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_script(command, processes=1, bf16=False, core=None):
    """Runs a training script in new processes.

    Args:
        command (str): the script and its arguments.
        core (int | None): the one that it may use, with one thread.

    Returns:
        tuple[list, dict]: the lines of metrics.jsonl, results.json.
    """
    with tempfile.TemporaryDirectory() as folder:
        words, env = python(processes) + script_words(command, folder), environment(bf16)
        if core is not None:
            words, env["OMP_NUM_THREADS"] = ["taskset", "-c", str(core), *words], "1"
        subprocess.run(words, check=True, env=env, **QUIET)
        lines = list(json_lines(Path(folder) / "metrics.jsonl"))
        return lines, json.loads((Path(folder) / "results.json").read_text())


def python(processes):
    """The first words of a command that starts a script in so many processes."""
    if processes == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]


def script_words(command, folder):
    """The words of a command for a training script, which writes to `folder`."""
    script, *arguments = command.split()
    return [str(SCRIPTS / script), *arguments, "--output_dir", str(folder)]


def environment(bf16=False):
    """The environment of a measured process: no settings of a launcher around this script."""
    removed = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    variables = {name: value for name, value in os.environ.items() if name not in removed}
    # Also without bf16: this variable marks a launched process, which ends when the one that
    # started it does.
    return variables | {"ACCELERATE_MIXED_PRECISION": "bf16" if bf16 else "no"}


def short_run(steps, log_every=None):
    """The arguments of a run on synthetic data, with an evaluation and a checkpoint at the end."""
    logging = f" --log_every {log_every}" if log_every else ""
    length = f"--max_train_steps {steps} --eval_every {steps} --checkpoint_every 0"
    return f"--dataset synthetic {length}{logging}"


def steady(seconds):
    """Seconds of a step: the 10th percentile.

    Not the median, because other programs on the machine can only make a step slower.
    """
    return statistics.quantiles(seconds, n=10, method="inclusive")[0]


def logged_steps(lines, warm_up):
    """Seconds per step from the log lines after `warm_up` steps."""
    trained = [line for line in lines if line["split"] == "train"]
    return [line["step_seconds"] for line in trained if line["step"] > warm_up]


def ratios_of(ours, theirs):
    """The ratio of each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def first_steps(words, steps=1, folder=None, watched=False):
    """Runs a script in float32 until it prints so many steps, and ends it.

    Args:
        words (list): what follows `python`.
        folder (Path | None): where it runs.
        watched (bool): whether to measure its memory.

    Returns:
        tuple[list, int]: the seconds from its start to each step; the most bytes that all its
        processes used, shared memory once.
    """
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    env = environment() | {"PYTHONUNBUFFERED": "1"}
    start_time, seconds, memory = time.perf_counter(), [], [0]
    words = [sys.executable, *words]
    running = subprocess.Popen(words, env=env, cwd=folder, start_new_session=True, **pipes)

    def look():
        while running.poll() is None:
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(running.pid)
                processes = (root, *root.children(recursive=True))
                memory[0] = max(memory[0], sum(one.memory_full_info().pss for one in processes))
            time.sleep(0.1)

    if watched:
        threading.Thread(target=look, daemon=True).start()
    line = ""
    try:
        for line in running.stdout:
            if STEP.search(line):
                seconds.append(time.perf_counter() - start_time)
                if len(seconds) == steps:
                    return seconds, memory[0]
    finally:
        # All of them: the workers of other scripts can outlive these, and keep the pipe open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    raise RuntimeError(f"{words[1]} ended after {len(seconds)} of {steps} steps: {line}")


def launched(words):
    """The words that follow `python` to start a script by `accelerate launch` on the CPU."""
    return ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", *words]


def batches(samples, batch_size, steps):
    """Yields the ids of `steps` batches, in another order in each epoch."""
    while True:
        for ids in torch.randperm(samples).split(batch_size):
            if len(ids) == batch_size:
                if steps == 0:
                    return
                steps -= 1
                yield ids


def main():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("loop", help="module and name of the loop")
    parser.add_argument("--options", default="{}", help="the arguments of the loop, as JSON")
    args = parser.parse_args()
    module, _, name = args.loop.partition(".")
    loop, seconds, results = getattr(importlib.import_module(module), name), [], {}

    def steps():
        results.update((yield from loop(**json.loads(args.options))) or {})

    start_time = time.perf_counter()
    for _ in steps():
        now = time.perf_counter()
        seconds.append(now - start_time)
        start_time = now
    if process.is_main():
        print(json.dumps({"seconds": seconds, "results": results}))


if __name__ == "__main__":
    entry.run(main)
