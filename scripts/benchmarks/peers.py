"""train_images.py against the training scripts of timm and torchvision."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from measuring import SCRIPTS, environment, rounds
from PIL import Image

# name -> model, pixels, steps, width and height of the photos
PEER_CASES = {
    "decoding": ("mobilenet_v3_small", 32, 15, (2000, 1500)),
    "resnet18": ("resnet18", 224, 6, (500, 375)),
    "resnet50": ("resnet50", 224, 4, (500, 375)),
}
PEER_BATCH, PEER_CLASSES = 32, 8
STEP = re.compile(r"step +\d+/|Train: 0 \[|Epoch: \[0\]  \[")  # of us, timm, torchvision


def peers(args):
    """train_images.py over timm's and torchvision's scripts: images per second, start, memory."""
    scripts = {
        "timm": Path(args.peers, "pytorch-image-models", "train.py"),
        "torchvision": Path(args.peers, "vision", "references", "classification", "train.py"),
    }
    for name, script in list(scripts.items()):
        if not script.exists():
            print(f"    skipped {name}: there is no {script}")
            del scripts[name]
    if not scripts:
        return {}
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        for case, (_, _, steps, size) in PEER_CASES.items():
            train = Path(folder) / case / "train"
            make_photos(train, 2 * PEER_CLASSES, *size, PEER_CLASSES)
            shutil.copytree(train, train.with_name("val"))
            repeat_files(train, PEER_BATCH * steps // (2 * PEER_CLASSES))
        for _ in rounds(args):
            for case, (model, pixels, steps, _) in PEER_CASES.items():
                data = Path(folder) / case
                ours = {case: our_command(data, model, pixels, steps)}
                if case == "decoding":
                    ours["cached"] = f"{ours[case]} --cache"
                    first_steps(ours["cached"], 1)  # fills the cache
                theirs = {
                    name: COMMANDS[name](script, data, model, pixels)
                    for name, script in scripts.items()
                }
                measured = {}
                for name, command in (ours | theirs).items():
                    found = first_steps(command, 4 if args.quick else steps)
                    shown = f"{found['speed']:.1f} images/s, {found['start']:.1f} s"
                    print(f"    {case}, {name}: {shown}, {found['memory']:.0f} MB", flush=True)
                    measured[name] = found
                for side, peer in itertools.product(ours, theirs):
                    for figure, value in measured[side].items():
                        ratio = value / measured[peer][figure]
                        ratios.setdefault(f"peers/{side}_{figure}_{peer}", []).append(ratio)
    more = "images per second over the peer (more is better), ratio"
    less = "seconds to the first step, peak memory, over the peer (less is better), ratio"
    return {name: (values, more if "_speed_" in name else less) for name, values in ratios.items()}


def our_command(data, model, pixels, steps):
    run = f"--max_train_steps {steps} --log_every 1 --eval_every 1000 --checkpoint_every 0"
    command = f"{SCRIPTS}/train_images.py --dataset {data} --model {model} --image_size {pixels}"
    command += f" --batch_size {PEER_BATCH} --num_workers 2 --auto_augment none {run}"
    return command + " --output_dir {out}/run"


def timm_command(script, data, model, pixels):
    model = {"mobilenet_v3_small": "mobilenetv3_small_100"}.get(model, model)
    command = f"{script} --data-dir {data} --val-split val --model {model}"
    command += f" --num-classes {PEER_CLASSES} --img-size {pixels} -b {PEER_BATCH} -j 2"
    command += " --color-jitter 0 --channels-last --epochs 1 --device cpu --log-interval 1"
    return command + " --output {out}"


def torchvision_command(script, data, model, pixels):
    command = f"{script} --data-path {data} --model {model} --train-crop-size {pixels}"
    command += f" -b {PEER_BATCH} -j 2 --epochs 1 --device cpu --print-freq 1"
    return command + " --output-dir {out}"


COMMANDS = {"timm": timm_command, "torchvision": torchvision_command}


def first_steps(command, steps):
    """Runs a script in float32 until it prints so many steps.

    Args:
        command (str): the script and its arguments; {out} stands for the folder of its output.

    Returns:
        dict: `speed`, images per second after the first third of the steps; `start`, seconds to the
        first step; `memory`, the most MB that all its processes used, shared memory once.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *command.replace("{out}", folder).split()]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        env = environment() | {"PYTHONUNBUFFERED": "1"}
        start_time, times, memory = time.perf_counter(), [], [0]
        running = subprocess.Popen(words, env=env, cwd=folder, start_new_session=True, **pipes)
        watching = watch(running, memory)
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


def watch(running, most):
    """Watches the memory of a process (Popen) and of those that it starts until it ends.

    Raises the only number in the list `most` to it, in bytes, with shared memory once. Returns the
    thread that watches.
    """

    def look():
        while running.poll() is None:
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(running.pid)
                found = (root, *root.children(recursive=True))
                most[0] = max(most[0], sum(one.memory_full_info().pss for one in found))
            time.sleep(0.1)

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    return watching


def make_photos(folder, count, width, height, classes):
    """Writes JPEGs to class folders, with noise of all sizes, as photos have."""
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
