"""What the benchmarks share: rounds, and loops and scripts that run in new processes."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from utils.run.files import read_json_lines

HERE = Path(__file__).resolve().parent
# The training scripts: next to this file in a copy, or one folder up.
SCRIPTS = HERE if (HERE / "train_cifar.py").exists() else HERE.parent
QUIET = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def rounds(args):
    """Yields the number of each round, from 0, and prints it."""
    for index in range(args.rounds):
        print(f"    round {index + 1} of {args.rounds}", flush=True)
        yield index


def measure_loop(name, processes=1, **options):
    """Runs one of the loops of baselines.py in new processes.

    Returns:
        dict: `seconds` of each step; `results` (dict), what the loop returned.
    """
    words = python(processes) + [str(HERE / "baselines.py"), name, "--options", json.dumps(options)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment())
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_script(command, processes=1, bf16=False):
    """Runs a training script in new processes.

    Args:
        command (str): the script and its arguments.

    Returns:
        tuple[list, dict]: the lines of metrics.jsonl, results.json.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = python(processes) + script_words(command, folder)
        subprocess.run(words, check=True, env=environment(bf16), **QUIET)
        lines = read_json_lines(Path(folder) / "metrics.jsonl")
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
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    # Also without bf16: this variable marks a launched process, which ends when the one that
    # started it does.
    return kept | {"ACCELERATE_MIXED_PRECISION": "bf16" if bf16 else "no"}


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


def seconds_to_first_step(words, launch=True):
    """Runs a script until it prints its first step; `launch`: by `accelerate launch`."""
    launcher = [sys.executable]
    launcher += ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu"] if launch else []
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    start_time = time.perf_counter()
    started = subprocess.Popen([*launcher, *words], env=environment(), **pipes)
    for line in started.stdout:
        if re.match("step +1(/|$)", line):
            break
    else:
        raise RuntimeError(f"{words[0]} ended before its first step")
    seconds = time.perf_counter() - start_time
    started.terminate()
    started.communicate()
    return seconds


def batches(samples, batch_size, steps):
    """Yields the ids of `steps` batches, in another order in each epoch."""
    while True:
        for ids in torch.randperm(samples).split(batch_size):
            if len(ids) == batch_size:
                if steps == 0:
                    return
                steps -= 1
                yield ids
