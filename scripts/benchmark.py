"""Measures the overhead of the training loop, compared with a plain PyTorch loop that does the same work.

    python scripts/benchmark.py

Both loops use the same model, batch size, augmentation, optimizer, schedule and data in memory, and run in turn.
`loop_overhead` is the additional time per optimizer step of train_cifar.py: for checkpoints, the agreement of the processes on
stopping, logs, trackers and Accelerate itself.

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


def fast_milliseconds(seconds):
    """The 10th percentile, in milliseconds: other programs on the machine can only make a step slower."""
    return 1e3 * statistics.quantiles(seconds, n=10)[0]


def main():
    args = parse_args()
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
    parser.add_argument("--rounds", type=number(int, 1), default=5, help="how often to measure each loop, in turn")
    parser.add_argument("--steps", type=number(int, WARM_UP + 10), default=500, help="optimizer steps per measurement")
    parser.add_argument("--batch_size", type=number(int, 1), default=96)
    parser.add_argument("--plain", action="store_true", help="run the plain loop once and print the seconds of its steps")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
