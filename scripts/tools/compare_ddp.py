"""Checks that data parallel training computes the same as one process.

Compares four runs, and gradients with and without the usual mistakes:

    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/tools/compare_ddp.py \\
        --dataset synthetic
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/tools/compare_ddp.py

All runs train the same network. W is the number of processes, B the batch size, D the data set.
Each run with W processes has an equivalent with one process:

    replicated          every process iterates over all of D in a different order, B samples at a
                        time: a common mistake, and W times the work per epoch
    replicated_single   one process, W copies of D, batches of W x B
    ddp                 every process gets its part of each batch of B, as with a loader from
                        `accelerator.prepare`
    ddp_single          one process, D, batches of B

Why W processes print W losses, and why one is enough: each process computes the mean loss of its
own B/W samples, and DDP averages the *gradients*. The mean of W means over equally many samples is
the mean over all samples, so the optimizer follows the gradient of one loss, that of the whole
batch. To print that loss, average the W losses.

This holds under conditions, which this script checks on the gradients, in float32 and in float64
(where differences caused by rounding almost disappear):

    reduction="mean"            nothing to do if all processes have equally many samples
    reduction="sum"             DDP still divides by W: multiply the loss by W (or the learning
                                rate)
    gradient accumulation       divide the loss by the number of micro-batches, as
                                `accelerator.backward` does
    unequal numbers of samples  the mean of means is wrong: multiply the loss by W x own samples /
                                all samples. (Accelerate's loaders avoid this: they fill up the last
                                batch with samples from the start, or drop it.)

The experiment is the one in the thread "Properly implementing DDP in training loop" at
discuss.pytorch.org (2022): B = 64, W = 4, two epochs; `ddp` trains for int(0.66 W) times as many
epochs, because each is shorter.

Copy it together with train_cifar.py, whose network it trains.

Measured on 2026-11-21 with --dataset synthetic on 2 cores of an AMD EPYC: with 2cpu.yaml, after 20
steps, the weights of `replicated` and its equivalent differ by 2.9e-7 (relative), those of `ddp`
and its equivalent by 2.9e-7, and at the end by at most 6.7e-6. With 4gpu.yaml (the setting of the
thread, over gloo) these values are 3.1e-7, 3.6e-7 and 3.9e-5. The differences are rounding errors
that grow from step to step: in float64 the gradients agree to 2e-14.
"""

import contextlib
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

# Finds `utils` and the training scripts next to this script (a copy) or above (the repository).
sys.path[1:1] = map(str, Path(__file__).resolve().parents[1:3])
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # before torch: a signal during the slow imports must not be lost

import torch
import torch.nn.functional as F
import train_cifar
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import InitProcessGroupKwargs, set_seed
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Sampler

from utils.data.cache_files import local_main_first
from utils.data.report import agree
from utils.images.arrays import load_arrays, on_device
from utils.images.augment import normalize
from utils.report import plots
from utils.run import entry, launch
from utils.run.arguments import BATCH, SECONDS, SEED, Parser
from utils.run.collectives import run_on_main, wait_for_all
from utils.run.domains import number
from utils.run.failures import RunFailed, UserError
from utils.run.folder import RunFolder
from utils.run.guard import Guard
from utils.run.metrics import memory_bytes

PAIRS = {"replicated": "replicated_single", "ddp": "ddp_single"}  # W processes: one process
RUNS = [name for pair in PAIRS.items() for name in pair]
MOMENTUM = 0.9
TOLERANCE = 1e-5  # largest accepted relative difference of float32 weights
TOLERANCE_FLOAT64 = 1e-10  # the same for float64 gradients


class Net(train_cifar.Net):
    """A smooth version of the network of PyTorch's CIFAR tutorial, which train_cifar.py has.

    [batch, 3, 32, 32] -> [batch, classes].

    No ReLU and no max-pooling, because they can turn a difference in the last bit into one in the
    third digit, so that the runs diverge.
    """

    def __init__(self, classes):
        super().__init__(classes)
        for layer in self.children():
            # With PyTorch's default initialization, which is smaller, accuracy stays at chance for
            # 150 steps.
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")

    def forward(self, x):
        x = F.avg_pool2d(F.gelu(self.conv1(x)), 2)
        x = F.avg_pool2d(F.gelu(self.conv2(x)), 2)
        x = F.gelu(self.fc1(x.flatten(1)))
        return self.fc3(F.gelu(self.fc2(x)))


# ---------------------------------------------------------------------------------------- training


class Shuffled(Sampler):
    """Yields all indices in an order that depends only on the seed and the number of passes."""

    def __init__(self, samples, seed):
        self.samples, self.generator = samples, torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.samples

    def __iter__(self):
        yield from torch.randperm(self.samples, generator=self.generator).tolist()


class Concatenated:
    """The ids of several loaders, concatenated: those of all processes in `replicated`."""

    def __init__(self, loaders):
        self.loaders = loaders

    def __iter__(self):
        yield from map(torch.cat, zip(*self.loaders, strict=True))


def build_batches(accelerator, split, name, args):
    """Builds an iterable of the ids of this process's batches in the run `name`, for an epoch.

    Drops the last, incomplete batch of an epoch, because it might not divide evenly over the
    processes.
    """

    def loader(seed):
        samples = range(len(split))
        sampler = Shuffled(len(samples), seed)
        return DataLoader(samples, args.batch_size, sampler=sampler, drop_last=True)

    if name == "ddp":
        return accelerator.prepare_data_loader(loader(args.seed), device_placement=False)
    if name == "ddp_single":
        return loader(args.seed)
    if name == "replicated":
        return loader(args.seed + accelerator.process_index)
    return Concatenated([loader(args.seed + rank) for rank in range(accelerator.num_processes)])


def train(accelerator, name, data, args, should_stop):
    """Trains one of the four runs.

    Args:
        should_stop (Callable): called as `should_stop(step, losses, ids)` after each step; returns
            whether to stop.

    Returns:
        dict | None: `losses` float32 [processes, steps], `seconds` [1], and the weights after
        `--proof_steps` steps (`proof.*`) and at the end (`final.*`). None if it was stopped.
    """
    set_seed(args.seed)
    device, split = accelerator.device, on_device(accelerator, data.splits)["train"]
    model = Net(len(data.class_names)).to(device)
    if name in PAIRS:
        model = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=MOMENTUM)
    batches = build_batches(accelerator, split, name, args)
    mean, std = (value.to(device) for value in data.splits["train"].mean_and_std())
    total_steps = steps_of(name, split, args)
    proof_steps = min(args.proof_steps, total_steps)
    losses, record, start_time = [], {}, time.perf_counter()
    while len(losses) < total_steps:
        for batch in map(split.batch, batches):
            loss = F.cross_entropy(model(normalize(batch["images"], mean, std)), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == proof_steps:
                record |= plain_weights(model, "proof")
            if should_stop(len(losses), [loss.detach()], [batch["ids"]]):
                return None
            if len(losses) == total_steps:
                break
    losses = torch.stack(losses)[None].float()
    if name in PAIRS:
        # Gather all losses once, at the end, because a gather in every step would slow it down.
        losses = accelerator.gather(losses)
    seconds = torch.tensor([time.perf_counter() - start_time])
    return {"losses": losses.cpu(), "seconds": seconds, **record, **plain_weights(model, "final")}


def train_all(accelerator, run, data, args, guard):
    """Trains the four runs, and saves a record of each."""
    split = data.splits["train"]

    def train_and_save(name, should_stop):
        shown = time.monotonic()

        def show_and_ask(step, *figures):
            nonlocal shown
            if time.monotonic() > shown + 20:
                shown = time.monotonic()
                run.print(f"  step {step} of {steps_of(name, split, args)}")
            return should_stop(step, *figures)

        trained = train(accelerator, name, data, args, show_and_ask)
        if trained and accelerator.is_main_process:
            save_file(trained, run.path / f"{name}.safetensors")
        return trained is not None

    def got_signal(*_):
        return process.signal_name() is not None

    for name in RUNS:
        run.print(f"{name} ...")
        if name in PAIRS:
            finished = train_and_save(name, guard.should_stop)
        else:
            finished = run_on_main(accelerator, partial(train_and_save, name, got_signal))
        if not finished:
            run.exit_preempted(f"during {name}: the same command starts over")


def steps_of(name, split, args):
    """The number of optimizer steps of the run `name`."""
    steps = epochs_of(name, args) * epoch_steps(split, args)
    return min(steps, args.max_train_steps or steps)


def epoch_steps(split, args):
    """The number of optimizer steps of an epoch, which is the same in all runs."""
    return len(split) // args.batch_size


def batch_of(name, processes, args):
    """The number of samples that each process of the run `name` computes in a step."""
    total = args.batch_size * (processes if name.startswith("replicated") else 1)
    return total // (processes if name in PAIRS else 1)


def epochs_of(name, args):
    """The number of epochs of the run `name`."""
    return args.epochs if name.startswith("replicated") else args.ddp_epochs


def plain_weights(model, prefix):
    """Copies of the weights, by their plain names behind `prefix`."""
    return {
        f"{prefix}.{name.removeprefix('module.')}": value.cpu().clone()
        for name, value in model.state_dict().items()
    }


# --------------------------------------------------------------------------------------- gradients


def compare_gradients(accelerator, split, classes, args, dtype):
    """Compares gradients of DDP with those of one process, with and without the corrections.

    Returns:
        dict: case -> largest relative difference.
    """
    set_seed(args.seed)
    processes, rank = accelerator.num_processes, accelerator.process_index
    one = Net(classes).to(accelerator.device, dtype)
    model = Net(classes).to(accelerator.device, dtype)
    model.load_state_dict(one.state_dict())
    model = accelerator.prepare(model)
    images, labels = first_batch(accelerator, split, args, dtype)

    def gradient(network, parts, reduction, factor):
        """The gradient of `factor` times the loss, summed over `parts`.

        `parts`: the indices of each micro-batch of one optimizer step.
        """
        network.zero_grad()
        for i, part in enumerate(parts):
            # DDP communicates in the last backward pass only.
            last = i == len(parts) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(network):
                outputs = network(images[part])
                loss = F.cross_entropy(outputs, labels[part], reduction=reduction)
                (loss * factor).backward()
        return [weight.grad.clone() for weight in network.parameters()]

    everything = torch.arange(args.batch_size)
    share = everything.chunk(processes)[rank]
    # Does not divide evenly: the first process gets one more.
    few = torch.arange(min(3 * processes + 1, args.batch_size))
    few_share = few.tensor_split(processes)[rank]
    count = len(few)
    correction = processes * len(few_share) / count
    last_batch = f"mean, last batch of {count}"
    # The indices of each micro-batch of this process, the reduction, the factor of the loss, and
    # the indices of the whole batch.
    cases = {
        "mean": ([share], "mean", 1, everything),
        "sum, uncorrected": ([share], "sum", 1, everything),
        "sum, loss x W": ([share], "sum", processes, everything),
        "mean, accumulated sample by sample": (share.split(1), "mean", 1 / len(share), everything),
        f"{last_batch}, uncorrected": ([few_share], "mean", 1, few),
        f"{last_batch}, loss x W x share / {count}": ([few_share], "mean", correction, few),
    }
    differences = {}
    for case, (parts, reduction, factor, whole) in cases.items():
        own = gradient(model, parts, reduction, factor)
        expected = gradient(one, [whole], reduction, 1)
        differences[case] = max_relative_difference(own, expected)
    return differences


@torch.no_grad()
def compare_losses(accelerator, split, classes, args):
    """Computes the loss of one batch on each process, and on one process.

    Returns:
        tuple[list, float]: the loss of each process on its samples; the loss of the whole batch.
    """
    set_seed(args.seed)
    model = Net(classes).to(accelerator.device, torch.float64)
    images, labels = first_batch(accelerator, split, args, torch.float64)
    everything = torch.arange(args.batch_size)
    share = everything.chunk(accelerator.num_processes)[accelerator.process_index]
    own = accelerator.gather(F.cross_entropy(model(images[share]), labels[share])[None])
    return own.tolist(), F.cross_entropy(model(images), labels).item()


def first_batch(accelerator, split, args, dtype):
    """The first `--batch_size` samples of a split: normalized images of `dtype`, and labels."""
    first = split.first(args.batch_size)
    images = normalize(first.images, *split.mean_and_std())
    return images.to(accelerator.device, dtype), first.labels.to(accelerator.device)


def max_relative_difference(tensors, expected):
    """The largest difference between two lists of tensors.

    Each is relative to the largest entry of the expected tensor.
    """
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(tensors, expected, strict=True)
    )


# ------------------------------------------------------------------------------------- table, plot


def row_of(name, record, processes, steps_per_epoch, args):
    """The row of the table for a run, as a dict."""
    used, batch = processes if name in PAIRS else 1, batch_of(name, processes, args)
    losses = record["losses"]
    steps = losses.shape[1]
    return {
        "processes": used,
        "batch_per_process": batch,
        "effective_batch": batch * used,
        "epochs": round(steps / steps_per_epoch, 3),
        "steps": steps,
        # Of all processes, over the last epoch: all steps of a run that is shorter than that.
        "final_loss": losses[:, -steps_per_epoch:].mean().item(),
        "seconds": record["seconds"].item(),
    }


def table(rows):
    """Formats the rows as lines of text with aligned columns."""
    lines = [
        "run                processes  batch each   total  epochs  steps  final loss  seconds  "
        "speed-up  efficiency"
    ]
    for name, row in rows.items():
        line = (
            f"{name:17}  {row['processes']:9}  {row['batch_per_process']:10}  "
            f"{row['effective_batch']:6}  {row['epochs']:6g}  {row['steps']:5}  "
            f"{row['final_loss']:10.4f}  {row['seconds']:7.1f}"
        )
        if "speed_up" in row:
            line += f"  {row['speed_up']:8.2f}  {row['efficiency']:10.0%}"
        lines.append(line)
    return "\n".join(lines)


def draw(path, records, processes):
    """Draws loss curves: those of each pair over steps, and all four over seconds."""
    figure, axes = plots.subplots(1, 3, figsize=(14, 4.2), sharey=True)
    colors = dict(zip(RUNS, ("#d1795b", "#7d2c10", "#6ba3d6", "#0b4884"), strict=True))
    for name, record in records.items():
        parallel, color = name in PAIRS, colors[name]
        axis = axes[0] if name.startswith("replicated") else axes[1]
        losses = record["losses"]
        steps = torch.arange(1, losses.shape[1] + 1)
        if parallel and processes > 1:
            label = f"each of the {processes} processes, every step"
            for line in losses:
                axis.plot(steps, line, color=color, linewidth=0.5, alpha=0.35, label=label)
                label = None  # one entry of the legend for all of them
        width = max(1, losses.shape[1] // 40)
        smooth = losses.unfold(1, width, 1).mean(2).mean(0)
        ends = steps[width - 1 :]
        seconds = ends / len(steps) * record["seconds"].item()
        look = dict(color=color, linestyle="--", linewidth=1.6)
        if parallel:
            look |= dict(linestyle="-", linewidth=3)
        axis.plot(ends, smooth, label=f"{name}, their mean" if parallel else name, **look)
        axes[2].plot(seconds, smooth, label=name, **look)
    titles = ("replicated and its equivalent", "ddp and its equivalent", "all four, over time")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("seconds" if axis is axes[2] else "optimizer step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("training loss (thick: running mean)")
    plots.save(figure, path)


# -------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    # float32 whatever the YAML says, and no TF32: bf16 and TF32 are less precise than the tolerance
    # of 1e-5.
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    accelerator = Accelerator(
        cpu=launch.set_up(),
        mixed_precision="no",
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        # The other processes wait while the main process trains alone.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))],
    )
    processes = accelerator.num_processes
    launch.print_banner(accelerator, args.batch_size)
    data = local_main_first(accelerator, lambda: load_arrays(args.dataset, seed=args.seed))
    description = agree(accelerator, args.dataset, data)
    split, classes = data.splits["train"], len(data.class_names)
    if args.batch_size > len(split):
        raise UserError(
            f"--batch_size {args.batch_size} is more than the {len(split)} training images"
        )
    run = RunFolder(args, accelerator)
    run.open(data=description)
    if run.finished:
        run.print(table(run.finished["runs"]))
        run.print(f"this comparison has already finished; see {run.path}")
        return
    run.start()
    guard = Guard(accelerator, args.timeout)

    gradients = {}
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        gradients[name] = compare_gradients(accelerator, split, classes, args, dtype)
    own, whole = compare_losses(accelerator, split, classes, args)
    run.print(
        f"\nLargest relative difference between DDP's gradient (W = {processes}) and that of one "
        f"process:\n{'':52}  float32  float64"
    )
    for case, value in gradients["float32"].items():
        run.print(f"  {case:50}  {value:7.0e}  {gradients['float64'][case]:7.0e}")
    run.print(
        f"\n{processes} processes, {processes} losses of one batch: "
        f"{', '.join(f'{loss:.6f}' for loss in own)}\n"
        f"their mean: {sum(own) / processes:.6f}; one process, the whole batch: {whole:.6f}\n"
    )
    train_all(accelerator, run, data, args, guard)
    if accelerator.is_main_process:
        losses = {"per_process": own, "mean": sum(own) / processes, "one_process": whole}
        results = {
            "gradients": gradients,
            "losses_of_one_batch": losses,
            "num_processes": processes,
            "peak_memory_bytes": memory_bytes(accelerator.device),
        }
        conclude(run, epoch_steps(split, args), args, results)
    wait_for_all(accelerator)  # a scheduler may stop the other machines when one exits
    accelerator.end_training()


def conclude(run, steps_per_epoch, args, results):
    """Compares the runs of each pair, and writes the log, the plot and the results.

    Args:
        results (dict): what else to write to results.json.

    Raises:
        RunFailed: the runs of a pair differ, or the gradients do.
    """
    processes = results["num_processes"]
    records = {name: load_file(run.path / f"{name}.safetensors") for name in RUNS}
    rows = {
        name: row_of(name, record, processes, steps_per_epoch, args)
        for name, record in records.items()
    }
    pairs = {}
    for name, single in PAIRS.items():
        rows[name]["speed_up"] = rows[single]["seconds"] / rows[name]["seconds"]
        rows[name]["efficiency"] = rows[name]["speed_up"] / processes
        steps = min(args.proof_steps, rows[name]["steps"])
        pairs[name] = compare_pair(records[name], records[single]) | {"after_steps": steps}
        print(
            f"{name} and {single}: weights differ by {pairs[name]['max_relative_difference']:.1e} "
            f"after {steps} steps and by {pairs[name]['max_relative_difference_at_the_end']:.1e} "
            f"at the end, losses by at most {pairs[name]['max_loss_difference']:.1e}"
        )
        for step in range(0, rows[name]["steps"], args.log_every):
            for logged in (name, single):
                loss = records[logged]["losses"][:, step].mean().item()
                run.metrics.write(logged, step + 1, loss=loss)
    print(f"\n{table(rows)}\n")
    plot = run.path / "loss_curves.png"
    draw(plot, records, processes)

    float64 = results["gradients"]["float64"]
    largest = max(value for case, value in float64.items() if "uncorrected" not in case)
    if largest > TOLERANCE_FLOAT64:
        raise RunFailed(
            f"the gradients differ by {largest:.1e} in float64, more than rounding can explain"
        )
    difference = max(pair["max_relative_difference"] for pair in pairs.values())
    if difference > TOLERANCE:
        raise RunFailed(
            f"the weights of a pair differ by {difference:.1e}, more than {TOLERANCE}: this is not "
            "the same computation"
        )
    samples = sum(row["steps"] * row["effective_batch"] for row in rows.values())
    seconds = sum(row["seconds"] for row in rows.values())
    results |= {
        "pairs": pairs,
        "runs": rows,
        "tolerance": TOLERANCE,
        "global_step": sum(row["steps"] for row in rows.values()),
        "samples_seen": samples,
        "train_seconds": seconds,
        "samples_per_second": samples / seconds,
    }
    run.write_results(results)
    print(f"the pairs agree to {difference:.1e} (tolerance {TOLERANCE:.0e}); see {plot}")


def compare_pair(record, single):
    """The largest differences between the weights and the losses of two runs."""
    differences = {}
    for stage in ("proof", "final"):
        names = [name for name in single if name.startswith(f"{stage}.")]
        weights = [record[name] for name in names]
        expected = [single[name] for name in names]
        differences[stage] = max_relative_difference(weights, expected)
    losses = record["losses"].mean(0) - single["losses"][0]
    return {
        "max_relative_difference": differences["proof"],
        "max_relative_difference_at_the_end": differences["final"],
        "max_loss_difference": losses.abs().max().item(),
    }


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    at_least_1 = number(int, 1)
    group = parser.add_argument_group("the experiment")
    group.add_argument(
        "--batch_size",
        type=BATCH,
        default=64,
        help="B: samples over all processes in ddp, per process in replicated",
    )
    group.add_argument(
        "--epochs",
        type=at_least_1,
        default=2,
        help="passes over the data in replicated and its equivalent",
    )
    group.add_argument("--max_train_steps", type=at_least_1, help="most optimizer steps of a run")
    group.add_argument(
        "--lr",
        type=number(float, 0, most=1000),
        default=0.02,
        help="learning rate of all four runs",
    )
    group.add_argument(
        "--proof_steps",
        type=at_least_1,
        default=20,
        help="compare the weights after this many steps",
    )
    group = parser.add_argument_group("run")
    group.add_argument(
        "--dataset",
        default="uoft-cs/cifar10",
        help="Hub id, local folder or file of 32x32 images, or `synthetic`",
    )
    group.add_argument(
        "--output_dir",
        default="runs/compare_ddp",
        help="folder for everything that the script writes",
    )
    group.add_argument(
        "--resume",
        choices=["auto", "never"],
        default="auto",
        help="never: stop with an error if output_dir has results",
    )
    group.add_argument(
        "--log_every", type=at_least_1, default=10, help="steps between lines of metrics.jsonl"
    )
    group.add_argument(
        "--seed",
        type=SEED,
        default=0,
        help="seed of the weights and the order of samples",
    )
    group.add_argument(
        "--timeout", type=SECONDS, default=1800, help="seconds to wait for another process"
    )
    args = parser.parse_args()
    # Epochs of `ddp` are shorter: it has more of them.
    args.ddp_epochs = args.epochs * max(1, int(0.66 * int(os.environ.get("WORLD_SIZE", 1))))
    return args


if __name__ == "__main__":
    entry.run(main)
