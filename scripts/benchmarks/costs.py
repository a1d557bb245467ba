"""What a run costs: its start, its checkpoints, and what grows with its size."""

import json
import math
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from gpt import gpt_arguments
from measuring import (
    QUIET,
    environment,
    kept,
    logged_steps,
    measure_script,
    python,
    ratios_of,
    script_words,
    seconds_to_first_step,
    steady,
    watch,
)
from PIL import Image

from utils.language.synthetic import synthetic_text
from utils.run.files import read_json_lines, write_text

# A GPT with 57 million parameters, on little text.
LARGE_STATE = "--dataset synthetic --n_layer 2 --n_head 8 --n_embd 1536 --block_size 32"
LARGE_STATE += " --batch_size 4 --sample_length 1"
FIVE_LINES = """
import torch
from accelerate import Accelerator
accelerator, model = Accelerator(), torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 8)).sum())
optimizer.step()
print("step 1", flush=True)
"""


def startup_ratio(args, rounds):
    """Time from `accelerate launch` to the first step over a five-line script for Accelerate."""
    commands = {
        "train_minimal": "train_minimal.py --log_every 1",
        "train_cifar": "train_cifar.py --model net --dataset synthetic --log_every 1",
        "train_gpt": f"train_gpt.py --dataset synthetic --log_every 1 {gpt_arguments()}",
    }
    seconds = {name: [] for name in ("five_lines", *commands)}
    with tempfile.TemporaryDirectory() as folder:
        five_lines = Path(folder) / "five_lines.py"
        five_lines.write_text(FIVE_LINES)
        for index in rounds.each():
            seconds["five_lines"].append(seconds_to_first_step(rounds, [str(five_lines)]))
            for name, command in commands.items():
                words = script_words(command, f"{folder}/{name}{index}")
                seconds[name].append(seconds_to_first_step(rounds, words))
    for name, values in seconds.items():
        print(f"    {name:20} {statistics.median(values):6.2f} s to the first step")
    unit = "seconds to the first step over a five-line script (less is better), ratio"
    return {
        f"startup_ratio/{name}": (ratios_of(seconds[name], seconds["five_lines"]), unit)
        for name in commands
    }


def checkpoint_blocking(args, rounds):
    """Saves weights and moments of 57 million parameters, each time when the last was written."""
    command = f"train_gpt.py {LARGE_STATE} --optimizer adamw --lr 0.001 --log_every 1"
    command += " --max_train_steps 76 --checkpoint_every 25 --eval_every 76 --keep_checkpoints 1"
    blocking, slower, memory = [], [], []
    for _ in rounds.each():
        beside, results = measure_script(rounds, command)
        waiting, plain = measure_script(rounds, f"{command} --wait_for_checkpoints")
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


def growth(args, rounds):
    """What a run costs as text, images or log lines grow.

    Seconds to the first step, the most memory that one process has to itself, time of a step and of
    the end of the run, and the factor of each per tenfold size. The fastest of the rounds are in
    `growth.md`.
    """
    measured = {}  # (what grows, cost) -> size -> one value per round
    for _ in rounds.each():
        for what, (prepare, sizes) in GROWTH.items():
            for size in sizes[:2] if args.quick else sizes:
                found = costs(rounds, prepare, size)
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
    "end": "seconds after the last step",
}


@kept
def costs(prepare, size):
    """Runs a training script to its end.

    Args:
        prepare (Callable): called with a folder and `size`; returns a command, which writes to the
            folder `run` in it.

    Returns:
        dict: of the names in `COSTS`.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = prepare(Path(folder), size)
        run, numbers, times, memory = Path(folder) / "run", [], [], [0]
        words = python(1) + script_words(command, run)
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
    return {
        "start": times[0] - start_time,
        "memory": memory[0] / 1e6,
        "step": 1e3 * steady(logged_steps(lines, numbers[0])),
        "end": end_time - times[-1],
    }


TINY_GPT = "train_gpt.py --block_size 64 --batch_size 16 --sample_length 1 --log_every 1"
TINY_GPT += " --max_train_steps 20"
TINY = "--n_layer 1 --n_head 2 --n_embd 64"


def more_text(folder, megabytes):
    """A text of so many MB."""
    return f"{TINY_GPT} {TINY} --dataset {write_text_of(folder, megabytes)}"


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
    return f"train_images.py --dataset {folder / 'images'} {model} --max_train_steps 20"


def more_lines(folder, count):
    """A run with so many log lines, to continue for as many steps."""
    command = f"{TINY_GPT} {TINY} --dataset {write_text_of(folder, 1)}"
    words = python(1) + script_words(command, folder / "run")
    subprocess.run(words, check=True, env=environment(), **QUIET)
    log = folder / "run" / "metrics.jsonl"
    first, *rest = log.read_text().splitlines(keepends=True)
    line = json.loads(first)
    with log.open("w") as file:
        for index in range(count):
            file.write(json.dumps({**line, "step": 1 + index / count}) + "\n")
        file.writelines(rest)
    return f"{command} --max_train_steps 40"


GROWTH = {
    "MB of text": (more_text, (10, 100, 1000)),
    "image files": (more_images, (1000, 10_000, 100_000)),
    "lines in the log": (more_lines, (10_000, 100_000, 1_000_000)),
}
