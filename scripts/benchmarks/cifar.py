"""train_cifar.py against plain loops with the same network: speed, on one and two processes."""

import itertools
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import train_cifar
from gpt import gpt_arguments
from measuring import (
    batches,
    logged_steps,
    measure_loop,
    measure_script,
    ratios_of,
    rounds,
    short_run,
    steady,
)
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from utils.images.arrays import load_arrays
from utils.images.augment import augment, normalize
from utils.run import devices


def loop_overhead(args):
    """A step of train_cifar.py and train_gpt.py over a plain PyTorch loop with the same model.

    With the same batches, optimizer and schedule: --model net, the default model, and DDP.
    """
    few, many = (12, 60) if args.quick else (60, 500)
    cifar = "train_cifar.py --batch_size 96"
    gpt_script = f"train_gpt.py {gpt_arguments()} --num_workers 0"
    net = partial(measure_loop, "cifar.plain_cifar", model="net", batch_size=96)
    fastnet = partial(measure_loop, "cifar.plain_cifar", model="fastnet", batch_size=96)
    plain_gpt = partial(measure_loop, "gpt.plain_gpt")
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
    for _ in rounds(args):
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
    """Samples per second of train_cifar.py over the usual tutorial with the same network.

    That has per-sample transforms in two workers, float32, and loss.item() in every step.
    """
    steps, batch = (6, 240) if args.quick else (10, 480)
    command = f"train_cifar.py --batch_size {batch} {short_run(steps, log_every=1)}"
    speeds = {"tutorial": [], "train_cifar.py": []}
    for _ in rounds(args):
        options = dict(steps=steps, batch_size=batch)
        seconds = measure_loop("cifar.tutorial", **options)["seconds"]
        speeds["tutorial"].append(batch * (steps - 1) / sum(seconds[1:]))
        lines, _ = measure_script(command, bf16=devices.has_bf16())
        speeds["train_cifar.py"].append(batch * (steps - 1) / sum(logged_steps(lines, 1)))
    for name, values in speeds.items():
        print(f"    {name:20} {statistics.median(values):8,.0f} samples/s")
    unit = "samples per second over the usual tutorial (more is better), ratio"
    return {"tutorial_speedup": (ratios_of(speeds["train_cifar.py"], speeds["tutorial"]), unit)}


def scaling_efficiency(args):
    """Samples per second of two DDP processes with one thread each over two independent runs."""
    steps, batch = (20 if args.quick else 60), 128
    command = f"train_cifar.py {short_run(steps, log_every=5)} --batch_size"
    together, apart, cores = [], [], sorted(os.sched_getaffinity(0))[:2]
    pool = ThreadPoolExecutor(2)
    for _ in rounds(args):
        lines, _ = measure_script(f"{command} {2 * batch}", processes=2)
        together.append(2 * batch / statistics.median(logged_steps(lines, 10)))
        alone = partial(measure_script, f"{command} {batch}")
        logs = pool.map(lambda core, alone=alone: alone(core=core)[0], cores)
        apart.append(sum(batch / statistics.median(logged_steps(log, 10)) for log in logs))
    unit = "samples per second over two independent runs (more is better), ratio"
    return {"scaling_efficiency": (ratios_of(together, apart), unit)}


def plain_cifar(model, batch_size, steps):
    """train_cifar.py as a plain PyTorch loop; yields after each step.

    With DDP, if there are several processes.
    """
    devices.keep_freed_memory()  # as the scripts do: what is compared is the loop
    rank, world = connect()
    data = load_arrays("synthetic")
    split = data.splits["train"]
    mean, std = split.mean_and_std()
    torch.manual_seed(0)
    args = SimpleNamespace(model=model, lr_schedule="linear", **train_cifar.RECIPES[model])
    plan = SimpleNamespace(total_steps=steps)
    network = train_cifar.build_model(model, len(data.class_names))
    optimizer = train_cifar.build_optimizer(network, args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: train_cifar.lr_multiplier(step, plan, args)
    )
    parallel = nn.parallel.DistributedDataParallel(network) if world > 1 else network
    for step, ids in enumerate(batches(len(split), batch_size, steps)):
        ids = ids.chunk(world)[rank]
        size = train_cifar.image_size_at(step / steps, args)
        images = augment(split.images[ids], ids, 0, 0, padding=2)
        outputs = parallel(normalize(images, mean, std, size))
        smoothing = args.label_smoothing
        loss = F.cross_entropy(outputs, split.labels[ids], label_smoothing=smoothing)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield


def tutorial(steps, batch_size):
    """The usual tutorial's loop with the default network; yields after each step."""
    torch.manual_seed(0)
    model, optimizer = fastnet()
    model = model.to(memory_format=torch.contiguous_format)
    data = PerSample(load_arrays("synthetic").splits["train"])
    loader = DataLoader(data, batch_size, shuffle=True, drop_last=True, num_workers=2)
    for images, labels in itertools.islice(loader, steps):
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        yield


class PerSample(Dataset):
    """Decoded PIL images, transformed one by one, like torchvision's CIFAR10 data set."""

    def __init__(self, split):
        import torchvision.transforms as T

        arrays = split.images.permute(0, 2, 3, 1).numpy()
        self.images = [Image.fromarray(array) for array in arrays]
        self.labels = split.labels.tolist()
        steps = [
            T.RandomCrop(32, padding=4, padding_mode="reflect"),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)),
        ]
        self.transform = T.Compose(steps)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def fastnet():
    """Builds the default model of train_cifar.py and its optimizer."""
    model = train_cifar.build_model("fastnet", 10)
    args = SimpleNamespace(model="fastnet", **train_cifar.RECIPES["fastnet"])
    return model, train_cifar.build_optimizer(model, args)


def connect():
    """Connects the processes of torchrun over gloo; returns (rank, number of processes)."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(max(1, devices.cores() // world))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    return int(os.environ.get("RANK", 0)), world
