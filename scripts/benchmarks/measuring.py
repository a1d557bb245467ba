"""What the benchmarks share: rounds of which the finished ones are kept, and measured processes."""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial, wraps
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image

from utils.report.measurements import clock
from utils.run.files import read_json_lines

HERE = Path(__file__).resolve().parent
# The training scripts: next to this file in a copy, or one folder up.
SCRIPTS = HERE if (HERE / "train_cifar.py").exists() else HERE.parent
QUIET = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Rounds:
    """The rounds of all benchmarks, of which the finished ones are kept.

    A kept round runs again with the answers of its measurements from the file, and what a benchmark
    makes of them is computed as before. Only whole rounds are kept, because the two sides of a
    benchmark must be measured at about the same time.

    Args:
        kept (Measurements): written after each round.
        rounds (int): of each benchmark.
    """

    def __init__(self, kept, rounds):
        self._kept, self._rounds = kept, rounds
        self._benchmark, self._count, self._answers, self._earlier = None, 0, None, None

    def begin(self, benchmark):
        """Begins with the rounds of a benchmark."""
        self._benchmark, self._count = benchmark, 0

    def each(self):
        """Yields the number of each round, from 0, and prints it with the time left for others."""
        measured = []  # seconds of each round
        for index in range(self._rounds):
            self._count += 1
            name = f"{self._benchmark} {self._count}"
            kept, note = self._kept.values.get(name), ""
            if kept:
                note = " (kept)"
            elif measured:
                left = statistics.mean(measured) * (self._rounds - index)
                note = f", about {clock(left)} left"
            print(f"    round {index + 1} of {self._rounds}{note}", flush=True)
            self._answers, self._earlier = [], iter(kept["answers"]) if kept else None
            start_time = time.perf_counter()
            yield index
            if not kept:
                measured.append(time.perf_counter() - start_time)
                self._kept.keep(name, {"answers": self._answers})

    def measure(self, function):
        """The answer (JSON) of `function()`, or in a kept round the one that it gave then."""
        if self._earlier is not None:
            return next(self._earlier)
        self._answers.append(function())
        return self._answers[-1]


def kept(measure):
    """Decorates a function that measures something: its answer in a finished round is kept.

    The function gets `Rounds` as an additional first argument.
    """

    @wraps(measure)
    def measure_or_recall(rounds, *args, **kwargs):
        return rounds.measure(partial(measure, *args, **kwargs))

    return measure_or_recall


@kept
def measure_loop(name, processes=1, **options):
    """Runs one of the loops of baselines.py in new processes.

    Returns:
        dict: `seconds` of each step, peak `memory` of the first process in bytes, `results` (dict).
    """
    words = python(processes) + [str(HERE / "baselines.py"), name, "--options", json.dumps(options)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment())
    return json.loads(done.stdout.strip().splitlines()[-1])


@kept
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


@kept
def seconds_of(function):
    """Seconds that a call of `function` takes, in this process."""
    start_time = time.perf_counter()
    function()
    return time.perf_counter() - start_time


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


def print_speeds(speeds, unit):
    """Prints the median of each list in `speeds` (dict)."""
    for name, values in speeds.items():
        print(f"    {name:20} {statistics.median(values):8,.0f} {unit}")


def ratios_of(ours, theirs):
    """The ratio of each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


@kept
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


def watch(running, most, measure):
    """Watches the memory of a process and of those that it starts until it ends.

    Args:
        running (subprocess.Popen): the process.
        most (list): its only number is raised to what `measure` returns.
        measure (Callable): called with what psutil says of each process.

    Returns:
        threading.Thread: the watching one.
    """

    def look():
        while running.poll() is None:
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(running.pid)
                found = (root, *root.children(recursive=True))
                most[0] = max(most[0], measure([one.memory_full_info() for one in found]))
            time.sleep(0.1)

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    return watching


def make_photos(folder, count, width=500, height=375, classes=2):
    """Writes JPEGs to class folders.

    They have noise of all sizes, as photos do, and 60 kB each at the default size.
    """
    rng = np.random.default_rng(0)
    for index in range(count):
        pixels = 0
        for scale in (2**k for k in range(7)):
            noise = rng.integers(0, 256, (height // scale, width // scale, 3), dtype=np.uint8)
            layer = Image.fromarray(noise).resize((width, height), Image.BICUBIC)
            pixels = pixels + scale * np.float32(layer)
        photo = Image.fromarray((pixels / 127).astype(np.uint8))  # 127: the sum of the scales
        path = folder / str(index % classes) / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.save(path, quality=90)


def repeat_files(folder, times):
    """Links each file in the folders of `folder` so often that there are `times` as many."""
    for path in list(folder.rglob("*.jpg")):
        for index in range(1, times):
            os.link(path, path.with_stem(f"{path.stem}_{index}"))


def batches(samples, batch_size, steps):
    """Yields the ids of `steps` batches, in another order in each epoch."""
    while True:
        for ids in torch.randperm(samples).split(batch_size):
            if len(ids) == batch_size:
                if steps == 0:
                    return
                steps -= 1
                yield ids
