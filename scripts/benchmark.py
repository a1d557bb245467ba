"""Measures the overhead of the training loop, and the speed of loading pictures, compared with plain PyTorch and torchvision.

    python scripts/benchmark.py
    python scripts/benchmark.py images

`loop`, the default, compares two loops, which use the same model, batch size, augmentation, optimizer, schedule and data in
memory, and run in turn. `loop_overhead` is the additional time per optimizer step of train_cifar.py: for checkpoints, the
agreement of the processes on stopping, logs, trackers and Accelerate itself.

`images` compares the images per second of train_images.py, without and with --cache, and of the usual ImageFolder with
torchvision's transforms and as many workers. Each reads 500 x 375 JPEGs and yields normalized batches of 32 random 224 x 224
crops. Their CPU time, of all processes, is less sensitive to other programs on the machine than the images per second.

Copy it together with `train_cifar.py`, which holds the model and the loop.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()

import psutil
import torch
from torch.nn.functional import cross_entropy
from train_cifar import build_model, lr_multiplier

from utils.arguments import Parser, number
from utils.augment import augment, normalize
from utils.image_data import synthetic_images

HERE = Path(__file__).resolve().parent
WARM_UP = 50  # steps that are not measured
WINDOW = 10  # steps per measured value: --log_every of train_cifar.py


def plain_loop(args):
    """Trains with a plain PyTorch loop. Returns seconds per step, each value the mean of `WINDOW` steps."""
    data = synthetic_images(0)
    mean, std = data.train.mean_and_std()
    rows, shape = data.train.images.flatten(1), data.train.images.shape[1:]
    torch.manual_seed(0)
    model = build_model("net", len(data.class_names))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.85, weight_decay=5e-4, nesterov=True)
    schedule = SimpleNamespace(lr_schedule="linear", warmup=0.2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_multiplier(step / args.steps, schedule))
    seconds, epoch = [], 0
    while len(seconds) < args.steps:
        order = torch.randperm(len(rows))
        start_time = time.perf_counter()
        for ids in order.split(args.batch_size):
            if len(ids) < args.batch_size or len(seconds) == args.steps:
                break
            images, keep = augment(rows[ids].view(-1, *shape), ids, epoch, 0, padding=2, cutout=0)
            loss = cross_entropy(model(normalize(images, mean, std, keep, 32)), data.train.labels[ids])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            now = time.perf_counter()
            seconds.append(now - start_time)
            start_time = now
        epoch += 1
    return [statistics.fmean(seconds[i : i + WINDOW]) for i in range(WARM_UP, args.steps, WINDOW)]


def template_loop(args):
    """Runs train_cifar.py. Returns seconds per step from its metrics.jsonl, each value the mean of `WINDOW` steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["train_cifar.py", "--dataset", "synthetic", "--model", "net", "--batch_size", str(args.batch_size)]
        command += ["--max_train_steps", str(args.steps), "--log_every", str(WINDOW)]
        command += ["--eval_every", str(args.steps), "--checkpoint_every", "0"]
        command[0] = str(HERE / command[0])
        subprocess.run([sys.executable, *command, "--output_dir", folder], check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line["step_seconds"] for line in lines if line["split"] == "train" and line["step"] > WARM_UP]


def images(args):
    """Prints images per second of three input pipelines, which run in turn, and their ratios to the usual one."""
    import numpy as np
    import torchvision.transforms as T
    from PIL import Image
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    from utils.image_cache import cached
    from utils.image_data import as_is
    from utils.image_files import EpochSampler, ImageBatches, TrainTransform
    from utils.image_folder import load_pictures
    from utils.pretrained import preprocessing

    torch.set_num_threads(1)  # in this process, which only normalizes: the workers have the cores
    preprocess, one = preprocessing("resnet50", None), SimpleNamespace(is_local_main_process=True, num_processes=1)
    mean, std = (torch.tensor(preprocess[name]) for name in ("mean", "std"))
    steps = [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)]
    with tempfile.TemporaryDirectory() as temporary:
        folder, rng = Path(args.dataset or Path(temporary) / "photos"), np.random.default_rng(0)
        for index in range(0 if args.dataset else 400):  # noise of all sizes, as in photos: 60 kB each
            scales = [(2**k, Image.fromarray(rng.integers(0, 256, (375 >> k, 500 >> k, 3), dtype=np.uint8))) for k in range(7)]
            pixels = sum(
                scale * np.asarray(noise.resize((500, 375), Image.BICUBIC), dtype=np.float32) for scale, noise in scales
            )
            (folder / str(index % 2)).mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels / 127).astype(np.uint8)).save(folder / str(index % 2) / f"{index}.jpg", quality=90)
        pictures = load_pictures(str(folder)).splits["train"]
        small = cached(one, pictures, "train", preprocess["resize"], Path(temporary) / "cache")
        common = dict(num_workers=args.num_workers, persistent_workers=args.num_workers > 0)
        loaders = {"usual": DataLoader(ImageFolder(folder, T.Compose(steps)), 32, shuffle=True, drop_last=True, **common)}
        for name, source in (("train_images.py", pictures), ("with --cache", small)):
            dataset, sampler = ImageBatches(source, TrainTransform(0, 224, preprocess)), EpochSampler(len(source), 32, 0)
            loaders[name] = DataLoader(dataset, 32, sampler=sampler, collate_fn=as_is, **common)
        speeds, used = {name: [] for name in loaders}, {name: [] for name in loaders}
        for round_number in range(args.rounds + 1):
            for name, loader in loaders.items():
                start_time, start_cpu, count = time.perf_counter(), cpu_seconds(), 0
                for batch in loader:
                    ready = batch[0] if name == "usual" else normalize(batch["images"], 255 * mean, 255 * std)
                    count += len(ready)
                if round_number:  # the first starts the workers
                    speeds[name].append(count / (time.perf_counter() - start_time))
                    used[name].append((cpu_seconds() - start_cpu) / count)
    for name, values in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(values, speeds["usual"], strict=True))
        work = statistics.median(b / a for a, b in zip(used[name], used["usual"], strict=True))
        print(
            f"{name:15} {statistics.median(values):8,.0f} images/s, {ratio:.2f} times the usual; "
            f"{1e3 * statistics.median(used[name]):.2f} ms of CPU per image, a {work:.2f}th of the usual   "
            f"(rounds: {', '.join(f'{value:,.0f}' for value in values)})"
        )


def cpu_seconds():
    """CPU time of this process and of its workers so far."""
    processes = [psutil.Process(), *psutil.Process().children()]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def fast_milliseconds(seconds):
    """The 10th percentile, in milliseconds: other programs on the machine can only make a step slower."""
    return 1e3 * statistics.quantiles(seconds, n=10)[0]


def main():
    args = parse_args()
    if args.name == "images":
        images(args)
        return
    if args.plain:
        print(json.dumps(plain_loop(args)))
        return
    plain, template = [], []
    for _ in range(args.rounds):
        command = [sys.executable, __file__, "--plain", "--steps", str(args.steps), "--batch_size", str(args.batch_size)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        plain.append(fast_milliseconds(json.loads(done.stdout)))
        template.append(fast_milliseconds(template_loop(args)))
    overhead = [b - a for a, b in zip(plain, template, strict=True)]
    for name, values in (("plain loop", plain), ("train_cifar.py", template), ("loop_overhead", overhead)):
        rounds = ", ".join(f"{value:.2f}" for value in values)
        print(f"{name:15} {statistics.median(values):6.2f} ms per step   (rounds: {rounds})")


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", choices=["loop", "images"], default="loop", help="what to measure")
    parser.add_argument("--dataset", help="for images: a folder with a sub-folder per class; default: made for the purpose")
    parser.add_argument("--num_workers", type=number(int, 0), default=2, help="for images: processes that decode")
    parser.add_argument("--rounds", type=number(int, 1), default=5, help="how often to measure each loop, in turn")
    parser.add_argument("--steps", type=number(int, WARM_UP + 10), default=500, help="optimizer steps per measurement")
    parser.add_argument("--batch_size", type=number(int, 1), default=96)
    parser.add_argument("--plain", action="store_true", help="run the plain loop once and print the seconds of its steps")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
