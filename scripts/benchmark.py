"""Measures the speeds that this collection claims, as ratios in one run on one machine.

    python scripts/benchmark.py --quick                        # those without data, 15 minutes
    python scripts/benchmark.py loop_overhead startup_ratio    # some of them
    python scripts/benchmark.py --text input.txt --images cifar10    # all: two of them need data

Each benchmark runs both sides in turn, `--rounds` times, each time in new processes, and gives the
median of the rounds with their range. After each benchmark it writes `benchmark.json`,
`benchmark.md` and, if there are ratios, `benchmark.png` to `--output_dir`. After an interruption,
the same command continues with the first round that was not finished.

    loop_overhead       a step of train_cifar.py (--model net, default model, two processes) and of
                        train_gpt.py over a plain PyTorch (DDP) loop with the same model, batches,
                        optimizer and schedule
    tutorial_speedup    samples per second of train_cifar.py over the loop of the usual tutorial
                        with the same network: per-sample transforms in two workers, float32,
                        loss.item() in every step; and how much each improvement gives
    pipeline_speedup    images per second of the batched augmentation over per-sample transforms in
                        two workers
    image_loading       images per second of train_images.py, without and with --cache, over the
                        usual ImageFolder and transforms: 500 x 375 JPEGs, two workers each, to
                        normalized batches of random 224 x 224 crops
    scoring             images per second of evaluate.py, from its start to its end, on 100,000
                        500 x 375 JPEGs, with two workers and a small model at 64 pixels: over its
                        loader alone, and over a plain loop of this loader and the model
    scaling_efficiency  samples per second of two DDP processes with one thread each over two
                        independent runs side by side
    startup_ratio       time from `accelerate launch` to the first step over a five-line script for
                        Accelerate
    time_to_accuracy    training time of train_cifar.py --tta on CIFAR-10 (--images), with another
                        seed in each round, over those of two records with the same network on the
                        same images: airbench94_muon and Hiverge's; /..._flops: floating-point
                        operations, test-time views included; /accuracy: on the test set, and /tta:
                        with views, of train_cifar.py and of each record
    imbalance           train_images.py on CIFAR-10 (--images) made imbalanced: 5,000 images of the
                        first class, 50 of the last, and powers between. Plain, with --class_weights
                        balanced, and with the recipe rare_classes.diff (needs `patch`), with
                        another seed in each round, on the whole test set: the accuracy (all
                        classes have as many test images: it is the balanced accuracy, too), the
                        macro F1 score, and the mean recall of the three rarest classes
    checkpoint_share    part of the time that checkpoints of a state of 450 MB block train_gpt.py at
                        its default cadence
    checkpoint_blocking how long a checkpoint of 680 MB stops the training of train_gpt.py, over
                        the same with --wait_for_checkpoints; /steps: seconds of the steps while it
                        is written, over those of the others; /memory: how much more the peak is, in
                        sizes of the checkpoint
    growth              what a run costs as something grows: text, images, lines of the log,
                        restarts, parameters, processes. Seconds to the first step, the most memory
                        that one process has to itself, time of a step, of a checkpoint and of the
                        end of the run, and the factor of each per tenfold size. The fastest of the
                        rounds are in `growth.md`
    machine_limit       what the machine can do: operations per second of a matrix product, bytes
                        per second that a copy reads and writes, and that one core hashes with
                        SHA-256, as checkpoints are; and the share of those operations that a
                        step of train_cifar.py, with its three image sizes, and of train_gpt.py
                        reach, optimizer included (in bf16 where the CPU has it; the GPT in float32)
    memory              peak memory of train_cifar.py over that of a plain loop which holds the same
                        data
    gpt                 on tinyshakespeare (--text), in nanoGPT's CPU setting, ours in bf16 where
                        the CPU has it:
    gpt_time            time of train_gpt.py --lr 0.05 to the validation loss that nanoGPT reports
                        after 2,000 steps (1.88), over the time of 2,000 such steps in PyTorch's own
                        layers
    gpt_at_equal_time   validation loss of train_gpt.py after that time
    gpt_loss, gpt_step  validation loss of train_gpt.py after 2,000 steps, and the milliseconds of a
                        step
    lm                  train_lm.py against TRL's SFTTrainer (skipped if `trl` is not installed), on
                        the same Llama with random weights and a vocabulary of 49,152, the same
                        prompts and completions, AdamW, precision and device. /loss_difference: the
                        largest between the losses of 20 steps that see the same documents; the
                        others compare an epoch of each at its best: /speed: target tokens per
                        second; /memory: the peak; /start: seconds to the first step; /logits: peak
                        memory of a step, over that with all logits at once

Copy it together with `baselines.py`, `train_cifar.py` and `train_gpt.py`, and with the other
scripts and the recipe that a benchmark runs.
"""

import contextlib
import importlib.util
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()
    # As an exception: subprocess.run then kills its process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(process.PREEMPTED))

import numpy as np
import psutil
import torch
import train_cifar
from baselines import (
    COPIED,
    GPT,
    GPT_BATCH,
    MATRIX,
    RECORDS,
    PerSample,
    cifar_flops,
    evaluation_flops,
    gpt_flops,
    record_flops,
)
from PIL import Image
from torch.utils.data import DataLoader

from utils.images.arrays import load_arrays, synthetic_arrays
from utils.images.augment import augment, normalize
from utils.language.text import synthetic_text
from utils.report import plots
from utils.report.measurements import Measurements, clock
from utils.report.output import writing_to
from utils.run import devices, entry
from utils.run.arguments import Parser
from utils.run.domains import number
from utils.run.failures import UserError
from utils.run.files import (
    read_json_lines,
    write_json,
    write_text,
)
from utils.run.record import versions

HERE = Path(__file__).resolve().parent
# github.com/karpathy/nanoGPT, README: validation loss of the CPU setting after 2,000 steps.
NANOGPT_LOSS = 1.88
TEST_IMAGES = 10_000  # of CIFAR-10
# A GPT with 57 million parameters, on little text.
LARGE_STATE = "--dataset synthetic --n_layer 2 --n_head 8 --n_embd 1536 --block_size 32"
LARGE_STATE += " --batch_size 4 --sample_length 1"
DEFAULTS = SimpleNamespace(model="fastnet", lr_schedule="linear")  # of train_cifar.py
QUIET = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# --------------------------------------------------------------------------------------- measuring


class Rounds:
    """The rounds of all benchmarks, of which the finished ones are kept.

    A kept round runs again with the answers of its measurements from the file, and what a benchmark
    makes of them is computed as before. Only whole rounds are kept, because the two sides of a
    benchmark must be measured at about the same time.
    """

    def __init__(self, kept, names, rounds):
        """
        Args:
            kept (Measurements): written after each round.
            names (list): the benchmarks that will run, in this order.
            rounds (int): of each.
        """
        self._kept, self._names, self._rounds = kept, names, rounds
        self._benchmark, self._count, self._answers, self._known = None, 0, None, None

    def begin(self, benchmark):
        """Begins with the rounds of a benchmark."""
        self._benchmark, self._count = benchmark, 0

    def each(self):
        """Yields the number of each round, from 0, and prints it with the time left."""
        for index in range(self._rounds):
            self._count += 1
            name = f"{self._benchmark} {self._count}"
            kept = self._kept.values.get(name)
            note = " (kept)" if kept else self._left()
            print(f"    round {index + 1} of {self._rounds}{note}", flush=True)
            self._answers, self._known = [], iter(kept["answers"]) if kept else None
            start_time = time.perf_counter()
            yield index
            if not kept:
                seconds = time.perf_counter() - start_time
                self._kept.keep(name, {"seconds": seconds, "answers": self._answers})

    def measure(self, function):
        """The answer (JSON) of `function()`, or in a kept round the one that it gave then."""
        if self._known is not None:
            return next(self._known)
        self._answers.append(function())
        return self._answers[-1]

    def _left(self):
        """How long the rest takes, if it is as fast as the rounds so far beside `SECONDS`."""
        seconds, expected = 0.0, 0.0
        for name, kept in self._kept.values.items():
            seconds += kept["seconds"]
            expected += seconds_of_round(name.partition(" ")[0])
        if not expected:
            return ""
        following = self._names[self._names.index(self._benchmark) :]
        rest = self._rounds * sum(SECONDS[name] for name in following)
        rest -= (self._count - 1) * seconds_of_round(self._benchmark)
        return f", about {clock(rest * seconds / expected)} left"


def seconds_of_round(name):
    """How long a round of a benchmark takes in comparison with others."""
    return SECONDS[name] / (4 if name == "loop_overhead" else 1)  # which has four parts


_rounds = None  # of this process, once `main` has started


def kept(measure):
    """Decorates a function that measures something: its answer in a finished round is kept."""

    @wraps(measure)
    def measure_or_recall(*args, **kwargs):
        return _rounds.measure(partial(measure, *args, **kwargs))

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
    return [str(HERE / script), *arguments, "--output_dir", str(folder)]


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


def gpt_arguments():
    """nanoGPT's CPU setting, as arguments of train_gpt.py."""
    sizes = " ".join(f"--{name} {value}" for name, value in GPT.items())
    return f"{sizes} --batch_size {GPT_BATCH}"


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


# ---------------------------------------------------------------------------------- the benchmarks
# Each takes the arguments, and returns name -> (one value per round, unit).


def loop_overhead(args):
    few, many = (12, 60) if args.quick else (60, 500)
    cifar = "train_cifar.py --batch_size 96"
    gpt_script = f"train_gpt.py {gpt_arguments()} --num_workers 0"
    net = partial(measure_loop, "plain_cifar", model="net", batch_size=96)
    fastnet = partial(measure_loop, "plain_cifar", model="fastnet", batch_size=96)
    plain_gpt = partial(measure_loop, "plain_gpt")
    return {
        "loop_overhead/net": overhead(args, f"{cifar} --model net", net, many),
        "loop_overhead/default": overhead(args, cifar, fastnet, few),
        "loop_overhead/two_processes": overhead(args, f"{cifar} --model net", net, many, 2),
        "loop_overhead/gpt": overhead(args, gpt_script, plain_gpt, many),
    }


def overhead(args, command, plain, steps, processes=1):
    """Compares a step of a script with that of a plain loop.

    Args:
        plain (Callable): called as `plain(processes=..., steps=...)`, measures the plain loop.

    Returns:
        tuple[list, str]: the ratio of each round, or for short steps the difference; its unit.
    """
    # 10 is the default. A long step needs fewer for a measurement, and a log line costs nothing
    # beside it.
    log_every = 10 if steps >= 200 else 2
    warm_up = steps // 5
    milliseconds, ratios = [], []
    for _ in _rounds.each():
        seconds = plain(processes=processes, steps=steps)["seconds"]
        lines, _ = measure_script(f"{command} {short_run(steps, log_every)}", processes)
        # Means over as many steps as a log line of the script.
        starts = range(warm_up, steps, log_every)
        means = [statistics.mean(seconds[start : start + log_every]) for start in starts]
        ours, theirs = steady(logged_steps(lines, warm_up)), steady(means)
        milliseconds.append(1e3 * (ours - theirs))
        ratios.append(ours / theirs)
    if theirs >= 0.02:
        return ratios, "time per step over a plain PyTorch loop (less is better), ratio"
    return milliseconds, "ms per step above a plain PyTorch loop (less is better)"


def tutorial_speedup(args):
    steps, batch = (6, 240) if args.quick else (10, 480)
    bf16 = devices.has_bf16()
    improvements = {"batched": dict(batched=True), "channels_last": dict(channels_last=True)}
    if bf16:
        improvements["bf16"] = dict(bf16=True)
    improvements["small_images_first"] = dict(sizes=(24, 24, 24, 28, 32))
    command = f"train_cifar.py --batch_size {batch} {short_run(steps, log_every=1)}"
    speeds = {name: [] for name in ("tutorial", *improvements, "train_cifar.py")}
    for _ in _rounds.each():
        options = dict(steps=steps, batch_size=batch)
        for name in ("tutorial", *improvements):
            options |= improvements.get(name, {})  # on top of those before
            seconds = measure_loop("tutorial", **options)["seconds"]
            speeds[name].append(batch * (steps - 1) / sum(seconds[1:]))
        lines, _ = measure_script(command, bf16=bf16)
        speeds["train_cifar.py"].append(batch * (steps - 1) / sum(logged_steps(lines, 1)))
    print_speeds(speeds, "samples/s")
    unit = "samples per second over the usual tutorial (more is better), ratio"
    return {"tutorial_speedup": (ratios_of(speeds["train_cifar.py"], speeds["tutorial"]), unit)}


def pipeline_speedup(args):
    images, batch = (5_000 if args.quick else 20_000), 1000
    split = synthetic_arrays(0, train=images, test=0).splits["train"]
    mean, std = split.mean_and_std()
    per_sample = PerSample(split, cutout=True)

    def usual():
        for _ in DataLoader(per_sample, batch, shuffle=True, num_workers=2):
            pass

    def ours():
        for loaded in map(split.batch, DataLoader(range(len(split)), batch, shuffle=True)):
            kept, mask = augment(loaded["images"], loaded["ids"], 0, 0, padding=4, cutout=8)
            normalize(kept, mean, std, mask)

    devices.keep_freed_memory()  # as all training scripts do; for both sides
    speeds = {"usual": [], "ours": []}
    for _ in _rounds.each():
        for name, load in (("usual", usual), ("ours", ours)):
            speeds[name].append(images / seconds_of(load))
    print_speeds(speeds, "images/s")
    unit = "images per second over per-sample transforms (more is better), ratio"
    return {"pipeline_speedup": (ratios_of(speeds["ours"], speeds["usual"]), unit)}


def image_loading(args):
    passes, count = 4, 160 if args.quick else 960
    speeds = {"usual_images": [], "our_images": [], "cached_images": []}
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder) / "photos" / "train", count)
        make_photos(Path(folder) / "photos" / "val", 2)
        for _ in _rounds.each():
            for name, values in speeds.items():
                seconds = measure_loop(name, folder=folder, steps=passes)["seconds"]
                # The first pass starts the workers.
                values.append(count * (passes - 1) / sum(seconds[1:]))
    print_speeds(speeds, "images/s")
    unit = "images per second over ImageFolder (more is better), ratio"
    return {
        f"image_loading/{name}": (
            ratios_of(speeds[f"{name}_images"], speeds["usual_images"]),
            unit,
        )
        for name in ("our", "cached")
    }


def scoring(args):
    files, different = (2000, 100) if args.quick else (100_000, 1000)
    speeds = {"loader": [], "loader_and_model": [], "evaluate.py": []}
    with tempfile.TemporaryDirectory() as folder:
        few, many, run = f"{folder}/few", f"{folder}/many", f"{folder}/run"
        for data, split, count in ((few, "train", 8), (few, "val", 2), (many, "test", different)):
            make_photos(Path(data, split), count)
        repeat_files(Path(many, "test"), files // different)
        options = "--model mobilenet_v3_small --image_size 64 --batch_size 8 --max_train_steps 1"
        train_words = script_words(f"train_images.py --dataset {few} {options}", run)
        subprocess.run([sys.executable, *train_words], check=True, env=environment(), **QUIET)
        words = script_words(f"evaluate.py {run} --dataset {many} --num_workers 2", f"{folder}/out")

        def evaluate():
            subprocess.run([sys.executable, *words], check=True, env=environment(), **QUIET)

        for _ in _rounds.each():
            for name in ("loader", "loader_and_model"):
                options = dict(folder=many, run=run, forward=name != "loader", steps=1)
                (seconds,) = measure_loop("plain_scoring", **options)["seconds"]
                speeds[name].append(files / seconds)
            speeds["evaluate.py"].append(files / seconds_of(evaluate))
    print_speeds(speeds, "images/s")
    ours = speeds.pop("evaluate.py")
    unit = "images per second over a plain loop (more is better), ratio"
    return {f"scoring/{name}": (ratios_of(ours, theirs), unit) for name, theirs in speeds.items()}


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


def scaling_efficiency(args):
    steps, batch = (20 if args.quick else 60), 128
    command = f"train_cifar.py {short_run(steps, log_every=5)} --batch_size"
    together, apart = [], []
    for _ in _rounds.each():
        lines, _ = measure_script(f"{command} {2 * batch}", processes=2)
        together.append(2 * batch / statistics.median(logged_steps(lines, 10)))
        apart.append(sum(side_by_side(f"{command} {batch}", batch)))
    unit = "samples per second over two independent runs (more is better), ratio"
    return {"scaling_efficiency": (ratios_of(together, apart), unit)}


@kept
def side_by_side(command, batch):
    """Runs a script twice at the same time, with one thread each.

    Returns:
        list[float]: samples per second of each.
    """
    one_thread = environment() | {"OMP_NUM_THREADS": "1"}
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(index) for index in range(2)]
        running = []
        for index, output in enumerate(outputs):
            own_core = partial(os.sched_setaffinity, 0, {cores[index]})
            words = python(processes=1) + script_words(command, output)
            options = dict(env=one_thread, preexec_fn=own_core, **QUIET)
            running.append(subprocess.Popen(words, **options))
        if any(script.wait() for script in running):
            raise RuntimeError(f"{command} failed")
        logs = [read_json_lines(output / "metrics.jsonl") for output in outputs]
    return [batch / statistics.median(logged_steps(log, 10)) for log in logs]


def time_to_accuracy(args):
    bf16 = torch.cuda.is_available() or devices.has_bf16()
    batch = train_cifar.RECIPES["fastnet"]["batch_size"]
    command = f"train_cifar.py --dataset {args.images} --tta --eval_every 100000"
    # In fewer epochs than by default, the accuracy of the records on the same images.
    command += " --checkpoint_every 0" + (" --max_train_steps 4" if args.quick else " --epochs 10")
    shortened = {"steps": 2} if args.quick else {}
    ratio = "time (flops: operations) over that record (less is better), ratio"
    units = {f"{name}{suffix}": ratio for name in RECORDS for suffix in ("", "_flops")}
    ways = {"accuracy": "test accuracy", "tta": "test accuracy with views"}
    for way, unit in ways.items():
        names = [way, *(f"{way}_{name}" for name in RECORDS)]
        units |= dict.fromkeys(names, f"{unit} (more is better)")
    values = {name: [] for name in units}
    for seed in _rounds.each():
        _, results = measure_script(f"{command} --seed {seed}", bf16=bf16)
        steps = results["global_step"]
        sizes = [train_cifar.image_size_at(step / steps, DEFAULTS) for step in range(1, steps + 1)]
        flops = sum(count * cifar_flops(batch, size) for size, count in Counter(sizes).items())
        flops += evaluation_flops(6 * TEST_IMAGES)
        values["accuracy"].append(results["test_accuracy"])
        values["tta"].append(results["test_accuracy_tta"])
        for name in RECORDS:
            options = dict(recipe=name, images=args.images, seed=seed, bf16=bf16, **shortened)
            record = measure_loop("record", **options)
            values[name].append(results["train_seconds"] / sum(record["seconds"][1:]))
            values[f"{name}_flops"].append(flops / record_flops(name))
            values[f"accuracy_{name}"].append(record["results"]["accuracy"])
            values[f"tta_{name}"].append(record["results"]["accuracy_tta"])
        shown = (f"{name} {rounds[-1]:.4f}" for name, rounds in values.items())
        print(f"    {', '.join(shown)}; {results['train_seconds']:.0f} s", flush=True)
    return {f"time_to_accuracy/{name}": (values[name], unit) for name, unit in units.items()}


def imbalance(args):
    names = ("accuracy", "macro_f1", "rare_recall")
    model = "--model shufflenet_v2_x0_5 --image_size 64 --min_scale 0.35 --eval_resize 64"
    length = "--batch_size 64 --optimizer adamw --lr 2e-3 --weight_decay 0.05 --epochs 8"
    length += " --max_train_steps 4" * args.quick
    options = (
        f"{model} {length} --warmup_epochs 1 --eval_every 100000 --checkpoint_every 0 --track none"
    )
    with tempfile.TemporaryDirectory() as folder:
        data, rarest = write_imbalanced(args.images, folder)
        sampled = write_recipe("rare_classes", folder)
        ways = {
            "plain": f"train_images.py --dataset {data} {options}",
            "weights": f"train_images.py --dataset {data} {options} --class_weights balanced",
            "sampler": f"{sampled} --dataset {data} {options}",
        }
        values = {f"{name}_{way}": [] for name in names for way in ways}
        for seed in _rounds.each():
            for way, command in ways.items():
                _, results = measure_script(f"{command} --seed {seed}")
                recalls = [results["per_class"][name] for name in rarest]
                figures = [results["val_accuracy"], results["val_macro_f1"]]
                shown = ", ".join(f"{value:.3f}" for value in figures + recalls)
                print(f"    {way}: {shown} ({', '.join(rarest)})", flush=True)
                figures.append(statistics.mean(recalls))
                for name, value in zip(names, figures, strict=True):
                    values[f"{name}_{way}"].append(value)
    unit = "on the test set (more is better)"
    return {f"imbalance/{name}": (rounds, unit) for name, rounds in values.items()}


def write_imbalanced(images, folder):
    """Writes CIFAR-10 with 100 times as many training images of the first class as of the last.

    The test set stays as it is. It has the name of the split that train_images.py evaluates at
    the end, by which this benchmark selects nothing.

    Returns:
        tuple[str, list]: the file, for `--dataset`; the names of the three rarest classes.
    """
    data = load_arrays(images)
    train, test = data.splits["train"], data.splits["test"]
    of_classes = [(train.labels == label).nonzero()[:, 0] for label in range(10)]
    most = min(map(len, of_classes))
    kept = [ids[: round(most * 0.01 ** (label / 9))] for label, ids in enumerate(of_classes)]
    train = train.select(torch.cat(kept).numpy())
    path = Path(folder) / "imbalanced.npz"
    arrays = dict(train_images=train.images, train_labels=train.labels)
    arrays |= dict(val_images=test.images, val_labels=test.labels)
    np.savez(path, class_names=data.class_names, **arrays)
    return str(path), data.class_names[-3:]


def write_recipe(name, folder):
    """Writes train_images.py as a recipe changes it to `folder`; returns the file."""
    changed, recipe = Path(folder) / "train_changed.py", HERE / "recipes" / f"{name}.diff"
    words = ["patch", "-o", changed, HERE / "train_images.py", recipe]
    subprocess.run(words, check=True, **QUIET)
    (Path(folder) / "utils").symlink_to(Path(process.__file__).resolve().parents[1])
    return str(changed)


FIVE_LINES = """
import torch
from accelerate import Accelerator
accelerator, model = Accelerator(), torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 8)).sum())
optimizer.step()
print("step 1", flush=True)
"""


def startup_ratio(args):
    commands = {
        "train_minimal": "train_minimal.py --log_every 1",
        "train_cifar": "train_cifar.py --model net --dataset synthetic --log_every 1",
        "train_gpt": f"train_gpt.py --dataset synthetic --log_every 1 {gpt_arguments()}",
    }
    seconds = {name: [] for name in ("five_lines", *commands)}
    with tempfile.TemporaryDirectory() as folder:
        five_lines = Path(folder) / "five_lines.py"
        five_lines.write_text(FIVE_LINES)
        for index in _rounds.each():
            seconds["five_lines"].append(seconds_to_first_step([str(five_lines)]))
            for name, command in commands.items():
                words = script_words(command, f"{folder}/{name}{index}")
                seconds[name].append(seconds_to_first_step(words))
    for name, values in seconds.items():
        print(f"    {name:20} {statistics.median(values):6.2f} s to the first step")
    unit = "seconds to the first step over a five-line script (less is better), ratio"
    return {
        f"startup_ratio/{name}": (ratios_of(seconds[name], seconds["five_lines"]), unit)
        for name in commands
    }


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


def checkpoint_share(args):
    """Saves weights and momentum of 57 million parameters.

    Sixteen steps show how long a step takes. The last checkpoint is not written beside them.
    """
    length = "--max_train_steps 16 --checkpoint_every 5 --eval_every 16 --log_every 1"
    every = 250  # the default of train_gpt.py, in steps
    shares = []
    for _ in _rounds.each():
        lines, _ = measure_script(f"train_gpt.py {LARGE_STATE} {length}")
        blocked = [line["blocked_seconds"] for line in saves_beside(lines)]
        step_seconds = statistics.median(logged_steps(lines, 2))
        shares.append(statistics.median(blocked) / (every * step_seconds))
    print(f"    a checkpoint stops the training for {statistics.median(blocked):.2f} s")
    return {"checkpoint_share": (shares, "share of the training time (less is better)")}


def checkpoint_blocking(args):
    """Saves weights and moments of 57 million parameters, each time when the last was written."""
    command = f"train_gpt.py {LARGE_STATE} --optimizer adamw --lr 0.001 --log_every 1"
    command += " --max_train_steps 76 --checkpoint_every 25 --eval_every 76 --keep_checkpoints 1"
    blocking, slower, memory = [], [], []
    for _ in _rounds.each():
        beside, results = measure_script(command)
        waiting, plain = measure_script(f"{command} --wait_for_checkpoints")
        blocked, whole = (
            statistics.median(line["blocked_seconds"] for line in saves_beside(lines))
            for lines in (beside, waiting)
        )
        blocking.append(blocked / whole)
        slower.append(slowdown_beside_saves(beside))
        more = results["peak_memory_bytes"] - plain["peak_memory_bytes"]
        memory.append(more / (12 * results["parameters"]))
        print(f"    a checkpoint stops the training for {blocked:.2f} s, or waiting {whole:.2f} s")
    return {
        "checkpoint_blocking": (blocking, "of the time with --wait_for_checkpoints, ratio"),
        "checkpoint_blocking/steps": (slower, "seconds of a step during a save over others, ratio"),
        "checkpoint_blocking/memory": (memory, "more memory, in sizes of the checkpoint"),
    }


def saves_beside(lines):
    """The lines of all checkpoints but the last, which training never continues beside."""
    return [line for line in lines if line["split"] == "checkpoint"][:-1]


def slowdown_beside_saves(lines):
    """The mean time of a step while a checkpoint is written, over that of the other steps."""
    steps = {line["step"]: line["step_seconds"] for line in lines if line["split"] == "train"}
    beside = []
    for save in saves_beside(lines):
        step, left = save["step"] + 1, save["seconds"] - save["blocked_seconds"]
        while left > 0 and step in steps:
            left -= steps[step]
            beside.append(step)
            step += 1
    others = [seconds for step, seconds in steps.items() if step > 2 and step not in beside]
    return statistics.mean(steps[step] for step in beside) / statistics.mean(others)


def growth(args):
    measured = {}  # (what grows, cost) -> size -> one value per round
    for _ in _rounds.each():
        for what, (prepare, sizes) in GROWTH.items():
            for size in sizes[:2] if args.quick else sizes:
                found = costs(prepare, size)
                shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
                print(f"    {what} {size:,}: {shown}", flush=True)
                for cost, value in found.items():
                    measured.setdefault((what, cost), {}).setdefault(size, []).append(value)
            write_text(Path(args.output_dir) / "growth.md", growth_table(measured))
    unit = "cost over that of a tenth of the size (less is better), ratio"
    return {
        f"growth/{what.replace(' ', '_')}_{cost}": (per_tenfold(by_size), unit)
        for (what, cost), by_size in measured.items()
    }


def per_tenfold(by_size):
    """By which factor a cost grows with ten times the size: of each round.

    Args:
        by_size (dict): size -> one value per round, from the smallest size to the largest.
    """
    least, most = min(by_size), max(by_size)
    ratios = ratios_of(by_size[most], by_size[least])
    return [ratio ** (1 / math.log10(most / least)) for ratio in ratios]


def growth_table(measured):
    """Formats costs as a table in Markdown: of each the lowest of the rounds, and the factor.

    Args:
        measured (dict): (what grows, name of a cost) -> size -> one value per round.
    """
    lines = ["| what grows | " + " | ".join(COSTS.values()) + " |", "|---" * (len(COSTS) + 1) + "|"]
    for what in dict.fromkeys(what for what, _ in measured):
        sizes = next(by_size for (name, _), by_size in measured.items() if name == what)
        cells = [f"{what}: {', '.join(f'{size:,}' for size in sizes)}"]
        for cost in COSTS:
            lowest = {size: [min(v)] for size, v in measured.get((what, cost), {}).items()}
            values = ", ".join(f"{v:,.0f}" if v > 99 else f"{v:.3g}" for (v,) in lowest.values())
            cells.append(f"{values} (x{per_tenfold(lowest)[0]:.2f})" if lowest else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


COSTS = {
    "start": "seconds to the first step",
    "memory": "MB of a process",
    "step": "ms per step",
    "checkpoint": "seconds per checkpoint",
    "end": "seconds after the last step",
}


@kept
def costs(prepare, size):
    """Runs a training script to its end.

    Args:
        prepare (Callable): called with a folder and `size`; returns a command, which writes to the
            folder `run` in it, and the number of its processes.

    Returns:
        dict: of the names in `COSTS`; without `checkpoint` if the script saves only at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        command, processes = prepare(Path(folder), size)
        run, numbers, times, memory = Path(folder) / "run", [], [], [0]
        words = python(processes) + script_words(command, run)
        start_time = time.perf_counter()
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        running = subprocess.Popen(words, env=environment(), **pipes)
        watching = watch(running, memory, lambda all_sizes: max(size.uss for size in all_sizes))
        for line in running.stdout:
            if step := re.match(r"step +(\d+)/", line):
                numbers.append(int(step[1]))
                times.append(time.perf_counter())
        if running.wait() or not times:
            raise RuntimeError(f"{command} failed")
        end_time = time.perf_counter()
        watching.join()
        log = run / "metrics.jsonl"
        lines = read_json_lines(log)
        lines = [line for line in lines if line["step"] >= numbers[0]]
    found = {"start": times[0] - start_time, "memory": memory[0] / 1e6}
    found["step"] = 1e3 * steady(logged_steps(lines, numbers[0]))
    saves = [line["seconds"] for line in lines if line["split"] == "checkpoint"]
    if len(saves) > 1:
        found["checkpoint"] = min(saves)
    return {**found, "end": end_time - times[-1]}


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


TINY_GPT = "train_gpt.py --block_size 64 --batch_size 16 --sample_length 1 --log_every 1"
TINY_GPT += " --max_train_steps 20"
TINY = "--n_layer 1 --n_head 2 --n_embd 64"


def more_text(folder, megabytes):
    """A text of so many MB."""
    return f"{TINY_GPT} {TINY} --dataset {write_text_of(folder, megabytes)}", 1


def write_text_of(folder, megabytes):
    """Writes a text of so many MB, and 1 kB to evaluate on; returns its folder."""
    text = synthetic_text(0)
    (folder / "text").mkdir()
    (folder / "text" / "val.txt").write_bytes(text[:1000])
    with open(folder / "text" / "train.txt", "wb") as file:
        for _ in range(math.ceil(megabytes * 10**6 / len(text))):
            file.write(text)
    return folder / "text"


def more_images(folder, count):
    """So many image files; what is held out does not grow."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    for split, images in (("train", count), ("val", 100)):
        for index in range(images):
            path = folder / "images" / split / str(index % 10) / f"{index}.jpg"
            if index < 10:
                path.parent.mkdir(parents=True)
                Image.fromarray(pixels).save(path)
            else:  # a link takes no space
                os.link(path.with_name(f"{index % 10}.jpg"), path)
    model = "--model squeezenet1_1 --image_size 32 --batch_size 16 --log_every 1"
    return f"train_images.py --dataset {folder / 'images'} {model} --max_train_steps 20", 1


def finished_run(folder):
    """A finished run, and the command that continues it with as many steps."""
    command = f"{TINY_GPT} {TINY} --dataset {write_text_of(folder, 1)}"
    words = python(1) + script_words(command, folder / "run")
    subprocess.run(words, check=True, env=environment(), **QUIET)
    return folder / "run", f"{command} --max_train_steps 40"


def more_lines(folder, count):
    """A run with so many log lines, to continue."""
    run, command = finished_run(folder)
    log = run / "metrics.jsonl"
    first, *rest = log.read_text().splitlines(keepends=True)
    line = json.loads(first)
    with log.open("w") as file:
        for index in range(count):
            file.write(json.dumps({**line, "step": 1 + index / count}) + "\n")
        file.writelines(rest)
    return command, 1


def more_starts(folder, count):
    """A run that was started so many times, to continue."""
    run, command = finished_run(folder)
    record = json.loads((run / "args.json").read_text())
    write_json(run / "args.json", {**record, "starts": count * record["starts"]})
    events = next((run / "tensorboard").rglob("events*"))
    for index in range(count):
        shutil.copy(events, events.with_name(f"{events.name}.{index}"))
    return command, 1


def more_parameters(folder, millions):
    """A model of so many million parameters."""
    width = {1: 200, 10: 640, 100: 2040}[millions]  # 24 width^2 in two blocks
    model = f"--n_layer 2 --n_head 4 --n_embd {width} --optimizer adamw"
    size = "--block_size 16 --batch_size 1 --max_train_steps 8 --checkpoint_every 4"
    return f"{TINY_GPT} {model} {size} --dataset {write_text_of(folder, 1)}", 1


def more_processes(folder, processes):
    """So many processes, which share the batch and the cores."""
    data = write_text_of(folder, 1)
    return f"{TINY_GPT} {TINY} --dataset {data} --checkpoint_every 10", processes


GROWTH = {
    "MB of text": (more_text, (10, 100, 1000)),
    "image files": (more_images, (1000, 10_000, 100_000)),
    "lines in the log": (more_lines, (10_000, 100_000, 1_000_000)),
    "restarts": (more_starts, (10, 100, 1000)),
    "million parameters": (more_parameters, (1, 10, 100)),
    "processes": (more_processes, (2, 4, 8)),
}


def machine_limit(args):
    bf16, batch = devices.has_bf16(), train_cifar.RECIPES["fastnet"]["batch_size"]
    steps, image_sizes = 12 if args.quick else 60, (24, 28, 32)
    run = short_run(steps, log_every=1)
    products = ["float32", "bf16"] if bf16 else ["float32"]
    limits = {name: [] for name in (*products, "copy", "sha256")}
    shares = {name: [] for name in (*(f"cifar_{size}px" for size in image_sizes), "gpt")}
    for _ in _rounds.each():
        for name in products:
            options = dict(steps=2 * steps, bf16=name == "bf16")
            seconds = measure_loop("matrix_product", **options)["seconds"]
            limits[name].append(2e-12 * MATRIX**3 / steady(seconds))
        seconds = measure_loop("copy", steps=steps)["seconds"]
        limits["copy"].append(2e-12 * COPIED / steady(seconds))
        seconds = measure_loop("sha256", steps=steps)["seconds"]
        limits["sha256"].append(1e-12 * COPIED / steady(seconds))

        lines, _ = measure_script(f"train_cifar.py {run}", bf16=bf16)
        limit = limits[products[-1]][-1]
        by_size = {size: [] for size in image_sizes}
        for line in lines:
            if line["split"] == "train":
                size = train_cifar.image_size_at(line["step"] / steps, DEFAULTS)
                by_size[size].append(line["step_seconds"])
        for size, seconds in by_size.items():
            reached = 1e-12 * cifar_flops(batch, size) / steady(seconds)
            shares[f"cifar_{size}px"].append(reached / limit)

        lines, _ = measure_script(f"train_gpt.py {run} {gpt_arguments()} --sample_length 1")
        reached = 1e-12 * gpt_flops() / steady(logged_steps(lines, steps // 2))
        shares["gpt"].append(reached / limits["float32"][-1])
    absolute = "10^12 operations (copy, sha256: bytes) per second"
    ratio = "operations per second over a matrix product (more is better), ratio"
    measured = {f"machine_limit/{name}": (values, absolute) for name, values in limits.items()}
    return measured | {f"machine_limit/{name}": (values, ratio) for name, values in shares.items()}


def memory(args):
    steps, ratios = 6, []
    for _ in _rounds.each():
        options = dict(model="fastnet", batch_size=480, steps=steps)
        plain = measure_loop("plain_cifar", **options)["memory"]
        _, results = measure_script(f"train_cifar.py {short_run(steps)}")
        ratios.append(results["peak_memory_bytes"] / plain)
    return {"memory": (ratios, "peak memory over a plain PyTorch loop (less is better), ratio")}


def gpt(args):
    """Measures `gpt_time`, `gpt_at_equal_time`, `gpt_loss` and `gpt_step`."""
    values = {"gpt_time": [], "gpt_at_equal_time": [], "gpt_loss": [], "gpt_step": []}
    command = f"train_gpt.py --dataset {args.text} {gpt_arguments()} --sample_length 1"

    def train(steps, seed, options=""):
        length = f"--max_train_steps {steps} --eval_every {steps} --checkpoint_every 0"
        return measure_script(f"{command} --seed {seed} {length}{options}", bf16=devices.has_bf16())

    steps = 2000
    for seed in _rounds.each():
        seconds = measure_loop("usual_gpt", steps=200)["seconds"]
        budget = steps * statistics.median(seconds[20:])
        print(f"    a step of the usual GPT loop: {1e3 * budget / steps:.1f} ms")
        # The length of the run decides its schedule: find the longest that fits, and, in units of
        # 25 steps, the shortest that reaches the loss. Short runs need a higher learning rate.
        lines, results = train(steps, seed)
        step_seconds = statistics.median(logged_steps(lines, 100))
        values["gpt_step"].append(1e3 * step_seconds)
        values["gpt_loss"].append(results["val_loss"])
        _, results = train(int(budget / step_seconds), seed)
        values["gpt_at_equal_time"].append(results["val_loss"])
        short = 100
        while train(short, seed, " --lr 0.05")[1]["val_loss"] > NANOGPT_LOSS:
            short += 25
            if short > steps:
                raise UserError(
                    f"train_gpt.py does not reach {NANOGPT_LOSS} in {steps} steps: is {args.text} "
                    "tinyshakespeare?"
                )
        values["gpt_time"].append(short * step_seconds / budget)
    units = dict.fromkeys(values, "nats per byte; step: milliseconds (less is better)")
    units["gpt_time"] = "time over the usual GPT (less is better), ratio"
    return {name: (rounds, units[name]) for name, rounds in values.items()}


# On a GPU of the size of SmolLM2-135M.
LM_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from utils.language.causal_lm import byte_tokenizer
names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
sizes = (576, 1536, 30, 9) if torch.cuda.is_available() else (256, 768, 4, 4)
sizes = dict(zip(names, sizes), tie_word_embeddings=True)
config = LlamaConfig(vocab_size=49_152, eos_token_id=258, pad_token_id=256, **sizes)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
byte_tokenizer().save_pretrained(sys.argv[1])
"""
# Its loss never has all logits in memory, as ours.
TRL = """
import json, resource, sys, time
begin = float(sys.argv[2])
import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer
options, ends = json.loads(sys.argv[1]), []
class Clock(TrainerCallback):
    def on_step_end(self, *_, **__):
        ends.append(time.time())
data = load_dataset("json", data_files=options.pop("data"), split="train")
model = options.pop("model")
config = SFTConfig(report_to=[], save_strategy="no", logging_steps=1,
    use_cpu=not torch.cuda.is_available(), gradient_checkpointing=False, adam_beta2=0.95,
    weight_decay=0.0, disable_tqdm=True,
    lr_scheduler_type="constant", model_init_kwargs={"dtype": "float32"}, **options)
trainer = SFTTrainer(model=model, args=config, train_dataset=data, callbacks=[Clock()])
started = time.time()
trainer.train()
print(json.dumps({
    "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    "start": ends[0] - begin, "seconds": ends[-1] - started,
    "memory": torch.cuda.max_memory_allocated() or
    1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
}))
"""


def lm(args):
    if importlib.util.find_spec("trl") is None:
        print("    skipped: trl is not installed (pip install trl)")
        return {}
    gpu = torch.cuda.is_available()
    bf16, rows, documents = gpu or devices.has_bf16(), 16 if gpu else 4, 4096 if gpu else 256
    if args.quick:
        documents //= 4
    values = {name: [] for name in ("loss_difference", "speed", "memory", "start", "logits")}
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        words = [sys.executable, "-c", LM_MODEL, model]
        subprocess.run(words, check=True, cwd=HERE.parent, env=environment(), **QUIET)
        few, many = (write_completions(f"{folder}/{n}", n) for n in (16, documents))
        ours = f"train_lm.py --model {model} --lr_schedule constant --warmup_steps 0 --lr 1e-3"
        ours += (
            " --weight_decay 0 --log_every 1 --eval_every 1000 --checkpoint_every 0 --track none"
        )
        for index in _rounds.each():
            # All documents are in one batch, so that their order does not matter.
            same = f"{ours} --dataset {few} --block_size 2048 --batch_size 1 --epochs 20"
            lines, _ = measure_script(same)
            options = dict(model=model, data=few + "/train.jsonl", learning_rate=1e-3, bf16=False)
            whole = dict(per_device_train_batch_size=16, num_train_epochs=20, max_length=None)
            theirs = measure_trl({**options, **whole, "output_dir": f"{folder}/trl"})
            losses = [line["loss"] for line in lines if line["split"] == "train"]
            pairs = zip(losses, theirs["losses"], strict=True)
            values["loss_difference"].append(max(abs(a - b) for a, b in pairs))

            best = f"{ours} --dataset {many} --block_size 1024 --batch_size {rows}"
            _, mine = measure_script(best, bf16=bf16)
            options |= {"data": many + "/train.jsonl", "bf16": bf16, "max_length": 1024}
            options["num_train_epochs"] = 1
            packed = {**options, "packing": True, "per_device_train_batch_size": rows}
            padded = {**options, "per_device_train_batch_size": 4 * rows}
            peers = {
                name: measure_trl({**how, "output_dir": f"{folder}/trl"})
                for name, how in (("packed", packed), ("padded", padded))
            }
            first = seconds_to_first_step(script_words(best, f"{folder}/ours{index}"), launch=False)
            for name, peer in peers.items():
                print(f"    TRL, {name}: {peer['seconds']:.1f} s, {peer['memory'] / 2**30:.2f} GiB")
            fastest = min(peers.values(), key=lambda peer: peer["seconds"])
            seconds, memory = mine["train_seconds"], mine["peak_memory_bytes"]
            print(f"    train_lm.py: {seconds:.1f} s, {memory / 2**30:.2f} GiB")
            values["speed"].append(fastest["seconds"] / seconds)
            values["memory"].append(memory / fastest["memory"])
            values["start"].append(first / fastest["start"])
            chunked, own = (
                measure_loop("lm_loss", model=model, chunked=chunked, steps=2)["memory"]
                for chunked in (True, False)
            )
            print(f"    peak memory of a step: {chunked / 2**30:.2f} of {own / 2**30:.2f} GiB")
            values["logits"].append(chunked / own)
    units = dict.fromkeys(values, "over TRL (less is better), ratio")
    units["logits"] = "peak memory over that with all logits (less is better), ratio"
    units["loss_difference"] = "nats per token"
    units["speed"] = "target tokens per second over TRL (more is better), ratio"
    return {f"lm/{name}": (rounds, units[name]) for name, rounds in values.items()}


def write_completions(folder, count):
    """Writes `count` prompts with completions of very different length; returns the folder."""
    rng, rows = random.Random(0), []
    for _ in range(count):
        sizes = [min(400, round(rng.lognormvariate(3.6, 0.8))) for _ in range(2)]
        prompt, completion = ("".join(rng.choices("abcdefgh ", k=size)) for size in sizes)
        rows.append(json.dumps({"prompt": prompt, "completion": completion + "."}) + "\n")
    Path(folder).mkdir()
    Path(folder, "train.jsonl").write_text("".join(rows))
    Path(folder, "val.jsonl").write_text(rows[0])
    return folder


@kept
def measure_trl(options):
    """Trains with TRL in a new process: a dict of `losses`, `start`, `seconds` and `memory`."""
    words = [sys.executable, "-c", TRL, json.dumps(options), str(time.time())]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment())
    return json.loads(done.stdout.strip().splitlines()[-1])


# name -> model, pixels, steps, width and height of the photos
PEER_CASES = {
    "decoding": ("mobilenet_v3_small", 32, 15, (2000, 1500)),
    "resnet18": ("resnet18", 224, 6, (500, 375)),
    "resnet50": ("resnet50", 224, 4, (500, 375)),
}
PEER_BATCH, PEER_CLASSES = 32, 8
STEP = re.compile(r"step +\d+/|Train: 0 \[|Epoch: \[0\]  \[")  # of us, timm, torchvision


def peers(args):
    found = {
        name: script
        for name, script in (
            ("timm", Path(args.peers, "pytorch-image-models", "train.py")),
            ("torchvision", Path(args.peers, "vision", "references", "classification", "train.py")),
        )
        if script.exists() or print(f"    skipped {name}: there is no {script}")
    }
    if not found:
        return {}
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, (_, _, steps, size) in PEER_CASES.items():
            train = Path(folder) / case / "train"
            make_photos(train, 2 * PEER_CLASSES, *size, PEER_CLASSES)
            shutil.copytree(train, train.with_name("val"))
            repeat_files(train, PEER_BATCH * steps // (2 * PEER_CLASSES))
        for _ in _rounds.each():
            for case, (model, pixels, steps, _) in PEER_CASES.items():
                data = Path(folder) / case
                usual = ours_words(data, model, pixels, steps)
                sides = {"train_images.py": (usual, True)}
                if case == "decoding":
                    sides["cached"] = ([*usual, "--cache", f"{folder}/cache"], True)
                    first_steps(*sides["cached"], 1)  # fills the cache
                if "timm" in found:
                    sides["timm"] = (timm_words(found["timm"], data, model, pixels), False)
                if "torchvision" in found:
                    words = torchvision_words(found["torchvision"], data, model, pixels)
                    sides["torchvision"] = (words, False)
                results = {}
                for name, (words, ours) in sides.items():
                    results[name] = first_steps(words, ours, 4 if args.quick else steps)
                    shown = "{speed:.1f} images/s, {start:.1f} s, {memory:.0f} MB"
                    print(f"    {case}, {name}: {shown.format(**results[name])}", flush=True)
                for ours in ("train_images.py", "cached"):
                    label = case if ours != "cached" else ours
                    for peer in found if ours in results else ():
                        for figure, value in results[ours].items():
                            name = f"peers/{label}_{figure}_{peer}"
                            ratio = value / results[peer][figure]
                            measured.setdefault(name, []).append(ratio)
    more = "images per second over the peer (more is better), ratio"
    less = "seconds to the first step, peak memory, over the peer (less is better), ratio"
    return {
        name: (values, more if "_speed_" in name else less) for name, values in measured.items()
    }


def repeat_files(folder, times):
    """Links each file in the folders of `folder` so often that there are `times` as many."""
    for path in list(folder.rglob("*.jpg")):
        for index in range(1, times):
            os.link(path, path.with_stem(f"{path.stem}_{index}"))


def ours_words(data, model, pixels, steps):
    run = f"--max_train_steps {steps} --log_every 1 --eval_every 1000 --checkpoint_every 0"
    command = f"train_images.py --dataset {data} --model {model} --image_size {pixels} {run}"
    command += f" --batch_size {PEER_BATCH} --num_workers 2 --auto_augment none"
    return [str(HERE / "train_images.py"), *command.split()[1:]]


def timm_words(script, data, model, pixels):
    model = {"mobilenet_v3_small": "mobilenetv3_small_100"}.get(model, model)
    command = f"--data-dir {data} --val-split val --model {model} --num-classes {PEER_CLASSES}"
    command += f" --img-size {pixels} -b {PEER_BATCH} -j 2 --color-jitter 0 --channels-last"
    command += " --epochs 1 --device cpu --log-interval 1 --output {out}"
    if devices.has_bf16():
        command += " --amp --amp-dtype bfloat16"
    return [str(script), *command.split()]


def torchvision_words(script, data, model, pixels):
    command = f"--data-path {data} --model {model} --train-crop-size {pixels} -b {PEER_BATCH}"
    command += " -j 2 --epochs 1 --device cpu --print-freq 1 --output-dir {out}"
    return [str(script), *command.split()]


@kept
def first_steps(words, ours, steps):
    """Runs a script until it prints so many steps.

    Returns:
        dict: `speed`, images per second after the first third of the steps; `start`, seconds to the
        first step; `memory`, the most MB that all its processes used, shared memory once.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *(word.replace("{out}", folder) for word in words)]
        words += ["--output_dir", f"{folder}/run"] if ours else []
        env = environment(ours and devices.has_bf16()) | {"PYTHONUNBUFFERED": "1"}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        pipes |= dict(start_new_session=True)
        start_time, times, memory = time.perf_counter(), [], [0]
        running = subprocess.Popen(words, env=env, cwd=folder, **pipes)
        watching = watch(running, memory, lambda all_sizes: sum(size.pss for size in all_sizes))
        try:
            for line in running.stdout:
                if STEP.search(line):
                    times.append(time.perf_counter())
                    if len(times) == steps:
                        break
        finally:
            # All of them: the workers of other scripts can outlive these, and keep the pipe open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
        watching.join()
    if len(times) < steps:
        raise RuntimeError(f"{words[1]} ended after {len(times)} of {steps} steps: {line}")
    counted = times[steps // 3 :]
    speed = PEER_BATCH * (len(counted) - 1) / (counted[-1] - counted[0]) if steps > 1 else 0
    return {"speed": speed, "start": times[0] - start_time, "memory": memory[0] / 1e6}


BENCHMARKS = {
    "loop_overhead": loop_overhead,
    "tutorial_speedup": tutorial_speedup,
    "pipeline_speedup": pipeline_speedup,
    "image_loading": image_loading,
    "scoring": scoring,
    "scaling_efficiency": scaling_efficiency,
    "startup_ratio": startup_ratio,
    "time_to_accuracy": time_to_accuracy,
    "imbalance": imbalance,
    "checkpoint_share": checkpoint_share,
    "checkpoint_blocking": checkpoint_blocking,
    "growth": growth,
    "machine_limit": machine_limit,
    "memory": memory,
    "gpt": gpt,
    "lm": lm,
    "peers": peers,
}
NEEDS = {  # data that must be given
    "gpt": "text",
    "time_to_accuracy": "images",
    "imbalance": "images",
    "peers": "peers",
}
# How long a round of all parts of each took with --quick, on 2 cores with AVX-512 (2026-11-26); of
# `gpt`, which --quick does not shorten, `time_to_accuracy`, `imbalance`, `growth` and `peers`, an
# estimate.
SECONDS = {
    "loop_overhead": 148,
    "tutorial_speedup": 119,
    "pipeline_speedup": 2,
    "image_loading": 10,
    "scoring": 40,
    "scaling_efficiency": 60,
    "startup_ratio": 16,
    "time_to_accuracy": 300,
    "imbalance": 60,
    "checkpoint_share": 175,
    "checkpoint_blocking": 150,
    "growth": 180,
    "machine_limit": 230,
    "memory": 54,
    "gpt": 3000,
    "lm": 200,
    "peers": 200,
}


# ------------------------------------------------------------------------------------- table, plot


def table(record):
    """Formats the figures as a table in Markdown, with the parts of a benchmark in one row."""
    lines = [f"{record['hardware']}, torch {record['versions']['torch']}, {record['date']}", ""]
    lines += ["| name | median (range) | rounds | unit |", "|---|---|---|---|"]
    rows = {}
    for name, figure in record["figures"].items():
        benchmark = figure["command"].split()[2]
        part = name.removeprefix(benchmark).lstrip("/_")
        spread = f"{figure['median']:.3g} ({figure['min']:.3g} to {figure['max']:.3g})"
        row = rows.setdefault((benchmark, figure["n"], figure["unit"]), [])
        row.append(f"{part} {spread}".strip())
    for (name, rounds, unit), values in rows.items():
        lines.append(f"| `{name}` | {', '.join(values)} | {rounds} | {unit} |")
    return "\n".join(lines) + "\n"


def draw(path, figures):
    """Draws the figures that are ratios, if there are any: the median of each, with its range.

    Args:
        figures (dict): name -> `median`, `min`, `max` and `unit`.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    ratios = {name: values for name, values in figures.items() if values["unit"].endswith("ratio")}
    if not ratios:
        return
    figure, axis = plots.subplots(1, 1, figsize=(8, 0.4 * len(ratios) + 1.3))
    for row, values in enumerate(reversed(ratios.values())):
        middle = values["median"]
        axis.plot([values["min"], values["max"]], [row, row], color="C0", linewidth=2)
        axis.plot(middle, row, "o", color="C0")
        above = dict(xytext=(0, 6), textcoords="offset points", ha="center")
        axis.annotate(f"{middle:.3g}", (middle, row), **above)
    axis.axvline(1, color="gray", linewidth=1)
    axis.set_xscale("log")
    left, right = axis.get_xlim()
    axis.set_xlim(min(left, 0.45), max(right, 2.2))  # so that there is a tick on each side of 1
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_yticks(range(len(ratios)), list(reversed(ratios)))
    axis.set_ylim(-0.5, len(ratios) - 0.3)
    axis.set_xlabel("ratio to the other side (median and range of the rounds)")
    axis.grid(alpha=0.3, axis="x", which="both")
    plots.save(figure, path)


def hardware():
    """Describes the processor: its cores and model, and whether it has bf16."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{devices.cores()} cores of {model}{', native bf16' * devices.has_bf16()}"


# -------------------------------------------------------------------------------------------- main


def main():
    global _rounds
    args = parse_args()
    with writing_to(args.output_dir) as folder:
        pass  # if it cannot be made, say so before hours of measuring
    possible = [name for name in BENCHMARKS if name not in NEEDS or getattr(args, NEEDS[name])]
    names, figures = list(dict.fromkeys(args.names)) or possible, {}
    chosen = dict(names=names, rounds=args.rounds, quick=args.quick)
    chosen |= dict(text=args.text, images=args.images, peers=args.peers)
    finished = Measurements(folder / "unfinished.json", chosen)
    _rounds = Rounds(finished, names, args.rounds)
    for name in names:
        print(f"{name} ...")
        _rounds.begin(name)
        command = f"python scripts/benchmark.py {name} --rounds {args.rounds}"
        command += " --quick" * args.quick
        command += f" --{NEEDS[name]} PATH" if name in NEEDS else ""
        for figure, (values, unit) in BENCHMARKS[name](args).items():
            middle, low, high = statistics.median(values), min(values), max(values)
            spread = dict(median=middle, min=low, max=high, n=len(values))
            figures[figure] = {**spread, "unit": unit, "command": command}
            rounds = f"({low:.3f} to {high:.3f}, {len(values)} rounds)"
            print(f"  {figure:28} {middle:8.3f}   {rounds}  {unit}")
        write(folder, figures)
    finished.finish()
    print(f"written to {folder}")


def write(folder, figures):
    """Writes the figures so far, a table of them, and a plot."""
    record = {
        "hardware": hardware(),
        "versions": versions(),
        "date": datetime.now(UTC).date().isoformat(),
        "figures": figures,
    }
    write_json(folder / "benchmark.json", record)
    write_text(folder / "benchmark.md", table(record))
    draw(folder / "benchmark.png", figures)


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"which benchmarks: {', '.join(BENCHMARKS)}; default: all that the given data allows",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer steps, one round, for a first look: a quarter of an hour on 2 cores",
    )
    parser.add_argument(
        "--rounds",
        type=number(int, 1, most=1000),
        help="how often to measure both sides, in turn; default: 5, with --quick 1",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="tinyshakespeare (input.txt), for the benchmark `gpt`"
    )
    parser.add_argument(
        "--images",
        metavar="PATH",
        help="CIFAR-10, as for train_cifar.py, for `time_to_accuracy` and `imbalance`",
    )
    parser.add_argument(
        "--peers",
        metavar="FOLDER",
        help="with clones of pytorch-image-models and vision (torchvision), for `peers`",
    )
    parser.add_argument(
        "--output_dir",
        default="runs/benchmark",
        help="folder for the table, the figures as JSON, and a plot",
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 5)
    for name in args.names:
        if name not in BENCHMARKS:
            raise UserError(f"no benchmark is called {name}: choose from {', '.join(BENCHMARKS)}")
        if name in NEEDS and not getattr(args, NEEDS[name]):
            raise UserError(f"the benchmark {name} needs data: --{NEEDS[name]} (see --help)")
    return args


if __name__ == "__main__":
    entry.run(main)
