"""train_images.py against the training scripts of timm and torchvision."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import SCRIPTS, environment, kept, make_photos, repeat_files, watch

from utils.run import devices

# name -> model, pixels, steps, width and height of the photos
PEER_CASES = {
    "decoding": ("mobilenet_v3_small", 32, 15, (2000, 1500)),
    "resnet18": ("resnet18", 224, 6, (500, 375)),
    "resnet50": ("resnet50", 224, 4, (500, 375)),
}
PEER_BATCH, PEER_CLASSES = 32, 8
STEP = re.compile(r"step +\d+/|Train: 0 \[|Epoch: \[0\]  \[")  # of us, timm, torchvision


def peers(args, rounds):
    """train_images.py over timm's and torchvision's scripts: images per second, start, memory."""
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
        for _ in rounds.each():
            for case, (model, pixels, steps, _) in PEER_CASES.items():
                data = Path(folder) / case
                usual = ours_words(data, model, pixels, steps)
                sides = {"train_images.py": (usual, True)}
                if case == "decoding":
                    sides["cached"] = ([*usual, "--cache", f"{folder}/cache"], True)
                    first_steps(rounds, *sides["cached"], 1)  # fills the cache
                if "timm" in found:
                    sides["timm"] = (timm_words(found["timm"], data, model, pixels), False)
                if "torchvision" in found:
                    words = torchvision_words(found["torchvision"], data, model, pixels)
                    sides["torchvision"] = (words, False)
                results = {}
                for name, (words, ours) in sides.items():
                    results[name] = first_steps(rounds, words, ours, 4 if args.quick else steps)
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


def ours_words(data, model, pixels, steps):
    run = f"--max_train_steps {steps} --log_every 1 --eval_every 1000 --checkpoint_every 0"
    command = f"train_images.py --dataset {data} --model {model} --image_size {pixels} {run}"
    command += f" --batch_size {PEER_BATCH} --num_workers 2 --auto_augment none"
    return [str(SCRIPTS / "train_images.py"), *command.split()[1:]]


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
