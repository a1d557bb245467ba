"""train_images.py against the training scripts of timm and torchvision."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from measuring import SCRIPTS, first_steps, rounds
from PIL import Image

# name -> model, pixels, steps, width and height of the photos
PEER_CASES = {
    "decoding": ("mobilenet_v3_small", 32, 15, (2000, 1500)),
    "resnet18": ("resnet18", 224, 6, (500, 375)),
    "resnet50": ("resnet50", 224, 4, (500, 375)),
}
PEER_BATCH, PEER_CLASSES = 32, 8
# Our script and those of the peers, in a folder of clones, and their arguments.
TRAIN_IMAGES = (
    f"{SCRIPTS}/train_images.py --dataset {{data}} --model {{model}} --image_size {{pixels}} "
    f"--batch_size {PEER_BATCH} --num_workers 2 --auto_augment none --max_train_steps {{steps}} "
    "--log_every 1 --eval_every 1000 --checkpoint_every 0 --output_dir {out}/run"
)
PEERS = {
    "timm": (
        "pytorch-image-models/train.py",
        "--data-dir {data} --val-split val --model {model} --num-classes "
        f"{PEER_CLASSES} --img-size {{pixels}} -b {PEER_BATCH} -j 2 --color-jitter 0 "
        "--channels-last --epochs 1 --device cpu --log-interval 1 --output {out}",
    ),
    "torchvision": (
        "vision/references/classification/train.py",
        f"--data-path {{data}} --model {{model}} --train-crop-size {{pixels}} -b {PEER_BATCH} "
        "-j 2 --epochs 1 --device cpu --print-freq 1 --output-dir {out}",
    ),
}
TIMM_NAMES = {"mobilenet_v3_small": "mobilenetv3_small_100"}


def peers(args):
    """train_images.py over timm's and torchvision's scripts: images per second, start, memory."""
    theirs = {}
    for name, (script, arguments) in PEERS.items():
        script = Path(args.peers, script)
        if script.exists():
            theirs[name] = f"{script} {arguments}"
        else:
            print(f"    skipped {name}: there is no {script}")
    if not theirs:
        return {}
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, (_, _, steps, size) in PEER_CASES.items():
            train = Path(folder) / case / "train"
            make_photos(train, 2 * PEER_CLASSES, *size, PEER_CLASSES)
            shutil.copytree(train, train.with_name("val"))
            repeat_files(train, PEER_BATCH * steps // (2 * PEER_CLASSES))
        for _ in rounds(args):
            for case, (model, pixels, steps, _) in PEER_CASES.items():
                measured = {}
                facts = dict(data=f"{folder}/{case}", pixels=pixels, steps=steps)
                for name, command in {case: TRAIN_IMAGES, **theirs}.items():
                    model_name = TIMM_NAMES.get(model, model) if name == "timm" else model
                    counted = 4 if args.quick else steps
                    figures = measure(command, counted, model=model_name, **facts)
                    shown = f"{figures['speed']:.1f} images/s, {figures['start']:.1f} s"
                    print(f"    {case}, {name}: {shown}, {figures['memory']:.0f} MB", flush=True)
                    measured[name] = figures
                for peer in theirs:
                    for figure, value in measured[case].items():
                        ratio = value / measured[peer][figure]
                        ratios.setdefault(f"peers/{case}_{figure}_{peer}", []).append(ratio)
    more = "images per second over the peer (more is better), ratio"
    less = "seconds to the first step, peak memory, over the peer (less is better), ratio"
    return {name: (values, more if "_speed_" in name else less) for name, values in ratios.items()}


def measure(command, count, **facts):
    """Runs a script until it prints so many steps.

    Args:
        command (str): the script and its arguments, with the names of `facts` in braces.

    Returns:
        dict: `speed`, images per second after the first third of the steps; `start`, seconds to the
        first step; `memory` of all its processes, MB.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = command.format(out=folder, **facts).split()
        seconds, memory = first_steps(words, count, folder, watched=True)
    counted = seconds[count // 3 :]
    speed = PEER_BATCH * (len(counted) - 1) / (counted[-1] - counted[0]) if count > 1 else 0
    return {"speed": speed, "start": seconds[0], "memory": memory / 1e6}


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
