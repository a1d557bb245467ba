"""What a run costs: its start and its checkpoints."""

import statistics
import tempfile
from pathlib import Path

from gpt import gpt_arguments
from measuring import first_steps, launched, measure_script, ratios_of, rounds, script_words

# A GPT with 57 million parameters, on little text.
LARGE_STATE = "--dataset synthetic --n_layer 2 --n_head 8 --n_embd 1536 --block_size 32"
LARGE_STATE += " --batch_size 4 --sample_length 1"
SMALL_BATCH = "--dataset synthetic --batch_size 8 --log_every 1"
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
    """Time from `accelerate launch` to the first step over a five-line script for Accelerate."""
    commands = {
        "train_minimal": "train_minimal.py --log_every 1",
        "train_cifar": "train_cifar.py --model net --dataset synthetic --log_every 1",
        "train_gpt": f"train_gpt.py --dataset synthetic --log_every 1 {gpt_arguments()}",
        "train_images": f"train_images.py --model squeezenet1_1 --image_size 64 {SMALL_BATCH}",
        "train_model_parallel": f"train_model_parallel.py {SMALL_BATCH}",
        "train_lm": f"train_lm.py {SMALL_BATCH}",
    }
    seconds = {name: [] for name in ("five_lines", *commands)}
    with tempfile.TemporaryDirectory() as folder:
        five_lines = Path(folder) / "five_lines.py"
        five_lines.write_text(FIVE_LINES)
        for index in rounds(args):
            started = {"five_lines": [str(five_lines)]}
            for name, command in commands.items():
                started[name] = script_words(command, f"{folder}/{name}{index}")
            for name, words in started.items():
                seconds[name] += first_steps(launched(words))[0]
    for name, values in seconds.items():
        print(f"    {name:20} {statistics.median(values):6.2f} s to the first step")
    unit = "seconds to the first step over a five-line script (less is better), ratio"
    return {
        f"startup_ratio/{name}": (ratios_of(seconds[name], seconds["five_lines"]), unit)
        for name in commands
    }


def checkpoint_blocking(args):
    """Saves weights and moments of 57 million parameters, each time when the last was written."""
    command = f"train_gpt.py {LARGE_STATE} --optimizer adamw --lr 0.001 --log_every 1"
    command += " --max_train_steps 76 --checkpoint_every 25 --eval_every 76 --keep_checkpoints 1"
    blocking, slower, memory = [], [], []
    for _ in rounds(args):
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
        step, seconds_left = save["step"] + 1, save["seconds"] - save["blocked_seconds"]
        while seconds_left > 0 and step in steps:
            seconds_left -= steps[step]
            beside.append(step)
            step += 1
    others = [seconds for step, seconds in steps.items() if step > 2 and step not in beside]
    return statistics.mean(steps[step] for step in beside) / statistics.mean(others)
