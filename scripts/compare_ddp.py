"""Does data parallel training compute the same as one process? Compares four runs, and checks the gradients.

    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/compare_ddp.py --dataset synthetic
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/compare_ddp.py

All runs train the same network. W is the number of processes, B the batch size, D the data set. Each run with W processes has
an equivalent with one process:

    replicated          every process iterates over all of D in a different order, B samples at a time: a common mistake,
                        and W times the work per epoch
    replicated_single   one process, W copies of D, batches of W x B
    ddp                 every process gets its part of each batch of B, as with a loader from `accelerator.prepare`
    ddp_single          one process, D, batches of B

Why W processes print W losses, and why one is enough: each process computes the mean loss of its own B/W samples, and DDP
averages the *gradients*. The mean of W means over equally many samples is the mean over all samples, so the optimizer
follows the gradient of one loss, that of the whole batch. To print that loss, average the W losses.

This holds under conditions, which this script checks on the gradients, in float32 and in float64 (where differences caused
by rounding almost disappear):

    reduction="mean"            nothing to do if all processes have equally many samples
    reduction="sum"             DDP still divides by W: multiply the loss by W (or the learning rate)
    gradient accumulation       divide the loss by the number of micro-batches, as `accelerator.backward` does
    unequal numbers of samples  the mean of means is wrong: multiply the loss by W x own samples / all samples. (Accelerate's
                                loaders avoid this: they fill up the last batch with samples from the start, or drop it.)

The experiment is the one in the thread "Properly implementing DDP in training loop" at discuss.pytorch.org (2022): B = 64,
W = 4, two epochs; `ddp` trains for int(0.66 W) times as many epochs, because each is shorter.

Measured on 2026-11-21 with --dataset synthetic on 2 cores of an AMD EPYC: with 2cpu.yaml, after 20 steps, the weights of
`replicated` and its equivalent differ by 2.9e-7 (relative), those of `ddp` and its equivalent by 2.9e-7, and at the end by at
most 6.7e-6. With 4gpu.yaml (the setting of the thread, over gloo) these values are 3.1e-7, 3.6e-7 and 3.9e-5. The differences
are rounding errors that grow from step to step: in float64 the gradients agree to 2e-14.
"""

import contextlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()  # before torch: a signal during the slow imports below must not be lost

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import InitProcessGroupKwargs, set_seed
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Sampler

from utils import plots, report, topology
from utils.arguments import Parser, number
from utils.augment import normalize
from utils.exits import RunFailed, UserError
from utils.guard import Guard
from utils.image_data import BatchedImages, as_is, load_images
from utils.run_folder import RunFolder

RUNS = ("replicated", "replicated_single", "ddp", "ddp_single")  # each pair: with W processes, with one
TOLERANCE = 1e-5  # largest accepted relative difference of float32 weights
TOLERANCE_FLOAT64 = 1e-10  # the same for float64 gradients


class Net(nn.Module):
    """A smooth version of the network of PyTorch's CIFAR tutorial. [batch, 3, 32, 32] -> [batch, classes].

    No batch norm, because its statistics depend on the samples of one process. No ReLU and no max-pooling, because they can
    turn a difference in the last bit into one in the third digit, so that the runs diverge.
    """

    def __init__(self, classes):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, classes)
        for layer in self.children():
            # With PyTorch's default initialization, which is smaller, accuracy stays at chance for 150 steps.
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")

    def forward(self, x):
        x = F.avg_pool2d(F.gelu(self.conv1(x)), 2)
        x = F.avg_pool2d(F.gelu(self.conv2(x)), 2)
        x = F.gelu(self.fc1(x.flatten(1)))
        return self.fc3(F.gelu(self.fc2(x)))


class Shuffled(Sampler):
    """Yields all indices in an order that depends only on the seed and the number of earlier passes."""

    def __init__(self, samples, seed):
        self.samples, self.generator = samples, torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.samples

    def __iter__(self):
        yield from torch.randperm(self.samples, generator=self.generator).tolist()


def build_batches(accelerator, split, name, args):
    """Builds an iterable of the batches of this process in the run `name`, one epoch per iteration.

    Drops the last, incomplete batch of an epoch, because it might not divide evenly over the processes.
    """

    def loader(seed):
        images = BatchedImages(split)
        return DataLoader(images, args.batch_size, sampler=Shuffled(len(images), seed), drop_last=True, collate_fn=as_is)

    class Concatenated:
        """The batches of all processes in `replicated`, concatenated."""

        def __init__(self, loaders):
            self.loaders = loaders

        def __iter__(self):
            for batches in zip(*self.loaders, strict=True):
                yield {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}

    if name == "ddp":
        return accelerator.prepare(loader(args.seed))
    if name == "ddp_single":
        return loader(args.seed)
    if name == "replicated":
        return loader(args.seed + accelerator.process_index)
    return Concatenated([loader(args.seed + rank) for rank in range(accelerator.num_processes)])


def train(accelerator, name, data, args, should_stop):
    """Trains one of the four runs.

    Args:
        should_stop (Callable): called as `should_stop(step, losses, ids)` after each step; returns whether to stop.

    Returns:
        dict | None: `losses` float32 [processes, steps], `seconds` [1], and the weights after `--proof_steps` steps
        (`proof.*`) and at the end (`final.*`). None if it was stopped.
    """
    set_seed(args.seed)
    model = Net(len(data.class_names)).to(accelerator.device)
    if not name.endswith("single"):
        model = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    batches = build_batches(accelerator, data.train, name, args)
    mean, std = (x.to(accelerator.device) for x in data.train.mean_and_std())
    epochs, steps_per_epoch = epochs_of(name, args), len(data.train.labels) // args.batch_size
    total_steps = min(epochs * steps_per_epoch, args.max_train_steps or sys.maxsize)
    losses, record, start_time = [], {}, time.perf_counter()
    while len(losses) < total_steps:
        for batch in batches:
            images, labels = batch["images"].to(accelerator.device), batch["labels"].to(accelerator.device)
            loss = F.cross_entropy(model(normalize(images, mean, std)), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == min(args.proof_steps, total_steps):
                record |= {f"proof.{key}": value for key, value in plain_weights(model).items()}
            if should_stop(len(losses), [loss.detach()], [batch["ids"]]):
                return None
            if len(losses) == total_steps:
                break
    losses = torch.stack(losses)[None].float()
    if not name.endswith("single"):
        # Gather all losses once, at the end, because a gather in every step would slow it down.
        losses = accelerator.gather(losses)
    record |= {"losses": losses.cpu(), "seconds": torch.tensor([time.perf_counter() - start_time])}
    return record | {f"final.{key}": value for key, value in plain_weights(model).items()}


def epochs_of(name, args):
    return args.epochs if name.startswith("replicated") else args.ddp_epochs


def plain_weights(model):
    return {name.removeprefix("module."): value.cpu().clone() for name, value in model.state_dict().items()}


def max_relative_difference(tensors, expected):
    """The largest difference between two lists of tensors, relative to the largest entry of the expected tensor."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(tensors, expected, strict=True))


# ----------------------------------------------------------------------------------------- check of the gradients


def check_gradients(accelerator, data, args, dtype):
    """Compares the gradient of DDP with that of one process on the whole batch, with and without the corrections.

    Returns:
        tuple: dict of case -> relative difference; the loss of each process on its samples; the loss of the whole batch.
    """
    set_seed(args.seed)
    processes, rank = accelerator.num_processes, accelerator.process_index
    one = Net(len(data.class_names)).to(accelerator.device, dtype)
    model = Net(len(data.class_names)).to(accelerator.device, dtype)
    model.load_state_dict(one.state_dict())
    model = accelerator.prepare(model)
    mean, std = data.train.mean_and_std()
    images = normalize(data.train.images[: args.batch_size], mean, std).to(accelerator.device, dtype)
    labels = data.train.labels[: args.batch_size].to(accelerator.device)

    def gradient(network, parts, reduction, factor):
        """The gradient of the loss summed over `parts`: the indices of each micro-batch of one optimizer step."""
        network.zero_grad()
        for i, part in enumerate(parts):
            # DDP communicates in the last backward pass only.
            sync = contextlib.nullcontext() if i == len(parts) - 1 else accelerator.no_sync(network)
            with sync:
                (F.cross_entropy(network(images[part]), labels[part], reduction=reduction) * factor).backward()
        return [weight.grad.clone() for weight in network.parameters()]

    everything = torch.arange(args.batch_size)
    share = everything.chunk(processes)[rank]
    few = torch.arange(min(3 * processes + 1, args.batch_size))  # does not divide evenly: the first process gets one more
    few_share = few.tensor_split(processes)[rank]
    weight, count = processes * len(few_share) / len(few), len(few)
    cases = {
        "mean": ("mean", [share], 1, everything),
        "sum, uncorrected": ("sum", [share], 1, everything),
        "sum, loss x W": ("sum", [share], processes, everything),
        "mean, accumulated sample by sample": ("mean", share.split(1), 1 / len(share), everything),
        f"mean, last batch of {count}, uncorrected": ("mean", [few_share], 1, few),
        f"mean, last batch of {count}, loss x W x share / {count}": ("mean", [few_share], weight, few),
    }
    differences = {}
    for case, (reduction, parts, factor, whole) in cases.items():
        differences[case] = max_relative_difference(
            gradient(model, parts, reduction, factor), gradient(one, [whole], reduction, 1)
        )
    with torch.no_grad():
        own = accelerator.gather(F.cross_entropy(one(images[share]), labels[share])[None])
        whole = F.cross_entropy(one(images), labels)
    return differences, own.tolist(), whole.item()


# ------------------------------------------------------------------------------------------------- table and plot


def row_of(name, record, processes, args):
    """The row of the table for a run, as a dict."""
    single = name.endswith("single")
    per_process = {"replicated": args.batch_size, "replicated_single": args.batch_size * processes}.get(
        name, args.batch_size if single else args.batch_size // processes
    )
    steps = record["losses"].shape[1]
    return {
        "processes": 1 if single else processes,
        "batch_per_process": per_process,
        "effective_batch": per_process * (1 if single else processes),
        "epochs": epochs_of(name, args),
        "steps": steps,
        # Mean over the last epoch and all processes.
        "final_loss": record["losses"][:, -(-steps // epochs_of(name, args)) * -1 :].mean().item(),
        "seconds": record["seconds"].item(),
    }


def table(rows):
    """The rows as aligned text."""
    lines = ["run                processes  batch each   total  epochs  steps  final loss  seconds  speed-up  efficiency"]
    for name, row in rows.items():
        speed = f"{row['speed_up']:8.2f}  {row['efficiency']:10.0%}" if "speed_up" in row else f"{'':8}  {'':10}"
        lines.append(
            f"{name:17}  {row['processes']:9}  {row['batch_per_process']:10}  {row['effective_batch']:6}  {row['epochs']:6}  "
            f"{row['steps']:5}  {row['final_loss']:10.4f}  {row['seconds']:7.1f}  {speed}"
        )
    return "\n".join(lines)


def draw(path, records, processes):
    """Loss curves: each pair over steps, and all four over seconds."""
    figure, axes = plots.subplots(1, 3, figsize=(14, 4.2), sharey=True)
    colors = dict(zip(RUNS, ("#d1795b", "#7d2c10", "#6ba3d6", "#0b4884"), strict=True))
    for name, record in records.items():
        losses, single = record["losses"], name.endswith("single")
        axis = axes[RUNS.index(name) // 2]
        width = max(1, losses.shape[1] // 40)
        smooth = losses.unfold(1, width, 1).mean(2)
        steps = torch.arange(width, losses.shape[1] + 1)
        style = dict(color=colors[name], linestyle="--" if single else "-", linewidth=1.6 if single else 3)
        if not single and processes > 1:
            for rank, line in enumerate(losses):
                label = f"each of the {processes} processes, every step" if rank == 0 else None
                axis.plot(torch.arange(1, len(line) + 1), line, color=colors[name], linewidth=0.5, alpha=0.35, label=label)
        axis.plot(steps, smooth.mean(0), label=f"{name}{'' if single else ', their mean'}", **style)
        axes[2].plot(steps / losses.shape[1] * record["seconds"].item(), smooth.mean(0), label=name, **style)
    for axis, title in zip(
        axes, ("replicated and its equivalent", "ddp and its equivalent", "all four, over time"), strict=True
    ):
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("seconds" if axis is axes[2] else "optimizer step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("training loss (thick: running mean)")
    plots.save(figure, path)


# ------------------------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    # float32 whatever the YAML says, and no TF32: bf16 and TF32 are less precise than the tolerance of 1e-5.
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    accelerator = Accelerator(
        cpu=topology.check_launch(),
        mixed_precision="no",
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        # The other processes wait while the main process trains alone.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))],
    )
    print_main = accelerator.on_main_process(print)  # accelerator.print prints once per machine
    processes = accelerator.num_processes
    args.ddp_epochs = args.ddp_epochs or args.epochs * max(1, int(0.66 * processes))
    topology.print_banner(accelerator, args.batch_size)
    data = topology.local_main_first(accelerator, lambda: load_images(args.dataset, args.seed))
    if args.batch_size > len(data.train.labels):
        raise UserError(f"--batch_size {args.batch_size} is more than the {len(data.train.labels)} training images")
    run = RunFolder(args, accelerator)
    run.open()
    if run.finished:
        print_main(f"{table(run.finished['runs'])}\nthis comparison has already finished; see {run.path}")
        return
    run.start()
    guard = Guard(accelerator, args.timeout)

    gradients = {}
    for dtype in (torch.float32, torch.float64):
        gradients[dtype], own, whole = check_gradients(accelerator, data, args, dtype)
    print_main(f"\nLargest relative difference between DDP's gradient (W = {processes}) and that of one process:")
    print_main(f"{'':52}  float32  float64")
    for case, value in gradients[torch.float32].items():
        print_main(f"  {case:50}  {value:7.0e}  {gradients[torch.float64][case]:7.0e}")
    losses = ", ".join(f"{loss:.6f}" for loss in own)
    print_main(
        f"\n{processes} processes, {processes} losses of one batch: {losses}\n"
        f"their mean: {sum(own) / processes:.6f}; one process, the whole batch: {whole:.6f}\n"
    )

    def train_and_save(name, should_stop):
        """Trains one run and saves its record atomically. Returns whether the run finished."""
        record = train(accelerator, name, data, args, should_stop)
        if record and accelerator.is_main_process:
            save_file(record, run.path / f".{name}.writing")
            os.replace(run.path / f".{name}.writing", run.path / f"{name}.safetensors")
        return record is not None

    # The four runs. An interrupted run starts over, because its time would be wrong. Finished runs are kept.
    resumed_from = None
    for name in RUNS:
        if topology.run_on_main(accelerator, (run.path / f"{name}.safetensors").exists):
            print_main(f"{name}: already finished")
            resumed_from = name
            continue
        print_main(f"{name} ...")
        if name.endswith("single"):
            done = topology.run_on_main(accelerator, lambda: train_and_save(name, lambda *_: exits.signal_name()))  # noqa: B023
        else:
            done = train_and_save(name, guard.should_stop)
        if not done:
            run.exit_preempted(f"during {name}, which will start over; the runs before it are kept")

    if accelerator.is_main_process:
        conclude(run, processes, args, gradients, own, whole, accelerator.device, resumed_from)
    topology.gather(accelerator, None)  # wait: a scheduler may stop the other machines when one exits
    accelerator.end_training()


def conclude(run, processes, args, gradients, own, whole, device, resumed_from):
    """Compares the runs of each pair, writes the results, and raises RunFailed if a pair differs."""
    records = {name: load_file(run.path / f"{name}.safetensors") for name in RUNS}
    rows, pairs = {name: row_of(name, record, processes, args) for name, record in records.items()}, {}
    for name, single in zip(RUNS[::2], RUNS[1::2], strict=True):
        a, b = records[name], records[single]
        rows[name]["speed_up"] = rows[single]["seconds"] / rows[name]["seconds"]
        rows[name]["efficiency"] = rows[name]["speed_up"] / processes
        differences = {}
        for stage in ("proof", "final"):
            keys = [key for key in b if key.startswith(f"{stage}.")]
            differences[stage] = max_relative_difference([a[key] for key in keys], [b[key] for key in keys])
        loss_difference = (a["losses"].mean(0) - b["losses"][0]).abs().max().item()
        steps = min(args.proof_steps, rows[name]["steps"])
        pairs[name] = {
            "max_relative_difference": differences["proof"],
            "after_steps": steps,
            "max_relative_difference_at_the_end": differences["final"],
            "max_loss_difference": loss_difference,
        }
        print(
            f"{name} and {single}: weights differ by {differences['proof']:.1e} after {steps} steps and by "
            f"{differences['final']:.1e} at the end, losses by at most {loss_difference:.1e}"
        )
        for step in range(0, rows[name]["steps"], args.log_every):
            for logged in (name, single):
                run.write(logged, step + 1, loss=records[logged]["losses"][:, step].mean().item())
    print(f"\n{table(rows)}\n")
    draw(run.path / "loss_curves.png", records, processes)
    seen = sum(row["steps"] * row["effective_batch"] for row in rows.values())
    seconds = sum(row["seconds"] for row in rows.values())
    results = {
        "pairs": pairs,
        "runs": rows,
        "tolerance": TOLERANCE,
        "gradients": {str(dtype).removeprefix("torch."): cases for dtype, cases in gradients.items()},
        "losses_of_one_batch": {"per_process": own, "mean": sum(own) / processes, "one_process": whole},
        "global_step": sum(row["steps"] for row in rows.values()),
        "samples_seen": seen,
        "train_seconds": seconds,
        "samples_per_second": seen / seconds,
        "num_processes": processes,
        "peak_memory_bytes": report.memory_bytes(device),
        "resumed_from": resumed_from,
    }
    exact = [value for case, value in gradients[torch.float64].items() if "uncorrected" not in case]
    if max(exact) > TOLERANCE_FLOAT64:
        raise RunFailed(f"the gradients differ by {max(exact):.1e} in float64, more than rounding can explain")
    difference = max(pair["max_relative_difference"] for pair in pairs.values())
    if difference > TOLERANCE:
        raise RunFailed(
            f"the weights of a pair differ by {difference:.1e}, more than {TOLERANCE}: this is not the same computation"
        )
    run.write_results(results)
    print(f"the pairs agree to {difference:.1e} (tolerance {TOLERANCE:.0e}); see {run.path / 'loss_curves.png'}")


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("the experiment")
    group.add_argument(
        "--batch_size", type=number(int, 1), default=64, help="B: samples over all processes in ddp, per process in replicated"
    )
    group.add_argument("--epochs", type=number(int, 1), default=2, help="passes over the data in the replicated pair")
    group.add_argument("--ddp_epochs", type=number(int, 1), help="of the ddp pair; default: epochs x int(0.66 x processes)")
    group.add_argument("--max_train_steps", type=number(int, 1), help="maximum number of steps of each run")
    group.add_argument("--lr", type=number(float, 0), default=0.02, help="learning rate of all four runs")
    group.add_argument("--momentum", type=number(float, 0), default=0.9, help="momentum of all four runs")
    group.add_argument("--proof_steps", type=number(int, 1), default=20, help="compare the weights after this many steps")
    group = parser.add_argument_group("run")
    group.add_argument("--dataset", default="uoft-cs/cifar10", help="Hub id or local folder of 32x32 images, or `synthetic`")
    group.add_argument("--output_dir", default="runs/compare_ddp", help="folder for everything that the script writes")
    group.add_argument("--resume", choices=["auto", "never"], default="auto", help="auto: keep the finished runs")
    group.add_argument("--log_every", type=number(int, 1), default=10, help="steps between two lines of metrics.jsonl")
    group.add_argument("--seed", type=number(int, 0), default=0, help="seed of the weights and the order of samples")
    group.add_argument("--timeout", type=number(int, 1), default=1800, help="seconds to wait for another process")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
