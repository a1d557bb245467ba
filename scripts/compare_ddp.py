"""Does data parallel training compute what one process computes? Four runs, one table, one plot, and the proof.

    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/compare_ddp.py --dataset synthetic
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/compare_ddp.py

The same network, W processes, batch size B, data set D. Each run with W processes has an equivalent with one:

    replicated          every process goes through all of D in an order of its own, B samples at a time: a common
                        mistake, and W times the work for as many epochs
    replicated_single   one process, W copies of D, batches of W x B
    ddp                 every process takes its part of each batch of B: what `prepare` makes of a loader
    ddp_single          one process, D, batches of B

Why W processes print W losses, and why one is enough: each computes the mean loss of its own B/W samples. DDP averages
the *gradients*. The mean of W means over equally many samples is the mean over all of them, so what is followed is the
gradient of one loss, that of the whole batch. To print that loss, average the W of them; printing all shows noise.

That identity has conditions, which are checked here on the gradients, in float32 and in float64 (where a difference
that was only rounding all but disappears):

    reduction="mean"            equal shares: nothing to do
    reduction="sum"             DDP still divides by W: multiply the loss by W (or the learning rate)
    gradient accumulation       divide the loss by the number of micro-batches, as `accelerator.backward` does
    shares of different size    a mean of means is wrong: multiply the loss by W x own samples / all samples. (Accelerate's
                                loaders avoid it: they fill the last batch up with samples from the start, or drop it.)

The experiment is that of the thread "Properly implementing DDP in training loop" at discuss.pytorch.org (2022): B = 64,
W = 4, two epochs, and `ddp` may take int(0.66 W) times as many epochs because each is so much shorter.

Measured on 2026-11-21 with --dataset synthetic on 2 cores of an AMD EPYC: with 2cpu.yaml, after 20 steps, the weights of
`replicated` and its equivalent differ by 2.9e-7, those of `ddp` and its by 2.9e-7, relative, and by 6.7e-6 at most at the
end; with 4gpu.yaml, the thread's setting rehearsed over gloo, by 3.1e-7, 3.6e-7 and 3.9e-5. It is rounding that grows
from step to step, not another computation: in float64 the gradients agree to 2e-14.
"""

import contextlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

# `utils` lies beside this script (a copy) or one folder up (the repository).
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

from utils import report, topology
from utils.arguments import Parser, number
from utils.augment import normalize
from utils.exits import RunFailed, UserError
from utils.guard import Guard
from utils.image_data import BatchedImages, as_is, load_images
from utils.plots import DPI, plt
from utils.run_folder import RunFolder

RUNS = ("replicated", "replicated_single", "ddp", "ddp_single")  # each pair: with W processes, with one
TOLERANCE = 1e-5  # largest relative difference of float32 weights that counts as the same
TOLERANCE_FLOAT64 = 1e-10  # of float64 gradients


class Net(nn.Module):
    """The network of the well-known CIFAR tutorial, made smooth. [batch, 3, 32, 32] -> [batch, classes].

    No batch norm: its statistics are of a process' own samples. And no kinks: where ReLU or max-pooling would choose, a
    difference in the last bit becomes one in the third digit, and from there the runs part.
    """

    def __init__(self, classes):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, classes)
        for layer in self.children():
            # With PyTorch's smaller default it stays at chance for 150 steps.
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")

    def forward(self, x):
        x = F.avg_pool2d(F.gelu(self.conv1(x)), 2)
        x = F.avg_pool2d(F.gelu(self.conv2(x)), 2)
        x = F.gelu(self.fc1(x.flatten(1)))
        return self.fc3(F.gelu(self.fc2(x)))


class Shuffled(Sampler):
    """All indices in an order that depends on the seed and on how often they were gone through, and on nothing else."""

    def __init__(self, samples, seed):
        self.samples, self.generator_of_orders = samples, torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.samples

    def __iter__(self):
        yield from torch.randperm(self.samples, generator=self.generator_of_orders).tolist()


def build_batches(accelerator, split, name, args):
    """What this process sees of one epoch after the other in the run `name`: an iterable of batches, to be used again.

    The last, incomplete batch of an epoch is dropped, as its shares might differ in size.
    """

    def loader(seed):
        images = BatchedImages(split)
        return DataLoader(images, args.batch_size, sampler=Shuffled(len(images), seed), drop_last=True, collate_fn=as_is)

    class Together:
        """The batches of all processes in `replicated`, one after the other, as one batch."""

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
    return Together([loader(args.seed + rank) for rank in range(accelerator.num_processes)])


def train(accelerator, name, data, args, should_stop):
    """One of the four runs.

    Args:
        should_stop: (step, losses, ids) -> whether to stop now.

    Returns:
        dict | None: `losses` float32 [processes, steps], `seconds` [1], and the weights after `--proof_steps` and at
        the end, `proof.*` and `final.*`. None if it was stopped.
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
    losses, record, began = [], {}, time.perf_counter()
    while len(losses) < total_steps:
        for batch in batches:
            images, labels = batch["images"].to(accelerator.device), batch["labels"].to(accelerator.device)
            loss = F.cross_entropy(model(normalize(images, mean, std)), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == min(args.proof_steps, total_steps):
                record |= {f"proof.{key}": value for key, value in bare_weights(model).items()}
            if should_stop(len(losses), [loss.detach()], [batch["ids"]]):
                return None
            if len(losses) == total_steps:
                break
    losses = torch.stack(losses)[None].float()
    if not name.endswith("single"):
        # Each process kept its own losses; one gather at the end, so that it does not slow the steps.
        losses = accelerator.gather(losses)
    record |= {"losses": losses.cpu(), "seconds": torch.tensor([time.perf_counter() - began])}
    return record | {f"final.{key}": value for key, value in bare_weights(model).items()}


def epochs_of(name, args):
    return args.epochs if name.startswith("replicated") else args.ddp_epochs


def bare_weights(model):
    return {name.removeprefix("module."): value.cpu().clone() for name, value in model.state_dict().items()}


def difference(found, expected):
    """The largest difference between two lists of tensors, relative to the largest entry of the tensor it is in."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True))


# ----------------------------------------------------------------------------------------- the proof, on the gradients


def check_gradients(accelerator, data, args, dtype):
    """DDP's gradient against that of one process on the concatenated batch, with and without what makes them equal.

    Returns:
        tuple: dict of case -> relative difference; the loss of each process on its share; the one of the whole batch.
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
        """Of the loss summed over `parts`, index tensors: the micro-batches of one optimizer step."""
        network.zero_grad()
        for i, part in enumerate(parts):
            # DDP talks in the last backward only.
            waits = accelerator.no_sync(network) if i < len(parts) - 1 else contextlib.nullcontext()
            with waits:
                (F.cross_entropy(network(images[part]), labels[part], reduction=reduction) * factor).backward()
        return [weight.grad.clone() for weight in network.parameters()]

    everything = torch.arange(args.batch_size)
    share = everything.chunk(processes)[rank]
    few = torch.arange(min(3 * processes + 1, args.batch_size))  # does not divide: the first process gets one more
    few_share = few.tensor_split(processes)[rank]
    weight, count = processes * len(few_share) / len(few), len(few)
    cases = {
        "mean": ("mean", [share], 1, everything),
        "sum, loss as it is": ("sum", [share], 1, everything),
        "sum, loss x W": ("sum", [share], processes, everything),
        "mean, accumulated sample by sample": ("mean", share.split(1), 1 / len(share), everything),
        f"mean, last batch of {count}, loss as it is": ("mean", [few_share], 1, few),
        f"mean, last batch of {count}, loss x W x share / {count}": ("mean", [few_share], weight, few),
    }
    differences = {}
    for case, (reduction, parts, factor, whole) in cases.items():
        differences[case] = difference(gradient(model, parts, reduction, factor), gradient(one, [whole], reduction, 1))
    with torch.no_grad():
        own = accelerator.gather(F.cross_entropy(one(images[share]), labels[share])[None])
        whole = F.cross_entropy(one(images), labels)
    return differences, own.tolist(), whole.item()


# ------------------------------------------------------------------------------------------------- what people look at


def row_of(name, record, processes, args):
    """The run's row of the table, as a dict."""
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
        # Of the last epoch, over all processes.
        "final_loss": record["losses"][:, -(-steps // epochs_of(name, args)) * -1 :].mean().item(),
        "seconds": record["seconds"].item(),
    }


def table(rows):
    """The rows as aligned text."""
    lines = ["run                processes  batch each  in all  epochs  steps  final loss  seconds  speed-up  efficiency"]
    for name, row in rows.items():
        faster = f"{row['speed_up']:8.2f}  {row['efficiency']:10.0%}" if "speed_up" in row else f"{'':8}  {'':10}"
        lines.append(
            f"{name:17}  {row['processes']:9}  {row['batch_per_process']:10}  {row['effective_batch']:6}  {row['epochs']:6}  "
            f"{row['steps']:5}  {row['final_loss']:10.4f}  {row['seconds']:7.1f}  {faster}"
        )
    return "\n".join(lines)


def draw(path, records, processes):
    """Loss curves: each pair over steps, and all four over seconds."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), sharey=True)
    colours = dict(zip(RUNS, ("#d1795b", "#7d2c10", "#6ba3d6", "#0b4884"), strict=True))
    for name, record in records.items():
        losses, single = record["losses"], name.endswith("single")
        axis = axes[RUNS.index(name) // 2]
        width = max(1, losses.shape[1] // 40)
        smooth = losses.unfold(1, width, 1).mean(2)
        steps = torch.arange(width, losses.shape[1] + 1)
        style = dict(color=colours[name], linestyle="--" if single else "-", linewidth=1.6 if single else 3)
        if not single and processes > 1:
            for rank, line in enumerate(losses):
                label = f"each of the {processes} processes, every step" if rank == 0 else None
                axis.plot(torch.arange(1, len(line) + 1), line, color=colours[name], linewidth=0.5, alpha=0.35, label=label)
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
    figure.tight_layout()
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    # float32 whatever the YAML says, and no TF32: 1e-5 is below what bf16 and TF32 can tell apart.
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    accelerator = Accelerator(
        cpu=topology.check_launch(),
        mixed_precision="no",
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        # The other processes wait while the first trains alone.
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
        print_main(f"{table(run.finished['runs'])}\nthis comparison is finished already; see {run.path}")
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
    listed = ", ".join(f"{loss:.6f}" for loss in own)
    print_main(
        f"\n{processes} processes, {processes} losses of one batch: {listed}\n"
        f"their mean: {sum(own) / processes:.6f}; one process, the whole batch: {whole:.6f}\n"
    )

    def train_and_keep(name, should_stop):
        """Whether the run came to its end. Its file is complete or absent."""
        record = train(accelerator, name, data, args, should_stop)
        if record and accelerator.is_main_process:
            save_file(record, run.path / f".{name}.writing")
            os.replace(run.path / f".{name}.writing", run.path / f"{name}.safetensors")
        return record is not None

    # ---- the four runs. One that was interrupted is done again: half a run has no time to compare. Whole ones are kept.
    resumed_from = None
    for name in RUNS:
        if topology.run_on_main(accelerator, (run.path / f"{name}.safetensors").exists):
            print_main(f"{name}: done earlier")
            resumed_from = name
            continue
        print_main(f"{name} ...")
        if name.endswith("single"):
            done = topology.run_on_main(accelerator, lambda: train_and_keep(name, lambda *_: exits.signal_name()))  # noqa: B023
        else:
            done = train_and_keep(name, guard.should_stop)
        if not done:
            run.exit_preempted(f"during {name}, which starts over; the runs before it are kept")

    if accelerator.is_main_process:
        conclude(run, processes, args, gradients, own, whole, accelerator.device, resumed_from)
    accelerator.wait_for_everyone()  # a scheduler may end the other machines once one has left
    accelerator.end_training()


def conclude(run, processes, args, gradients, own, whole, device, resumed_from):
    """Compares the pairs, writes what was found and fails if one of them differs."""
    records = {name: load_file(run.path / f"{name}.safetensors") for name in RUNS}
    rows, pairs = {name: row_of(name, record, processes, args) for name, record in records.items()}, {}
    for name, single in zip(RUNS[::2], RUNS[1::2], strict=True):
        a, b = records[name], records[single]
        rows[name]["speed_up"] = rows[single]["seconds"] / rows[name]["seconds"]
        rows[name]["efficiency"] = rows[name]["speed_up"] / processes
        apart = {}
        for stage in ("proof", "final"):
            keys = [key for key in b if key.startswith(f"{stage}.")]
            apart[stage] = difference([a[key] for key in keys], [b[key] for key in keys])
        losses_apart = (a["losses"].mean(0) - b["losses"][0]).abs().max().item()
        steps = min(args.proof_steps, rows[name]["steps"])
        pairs[name] = {
            "max_relative_difference": apart["proof"],
            "after_steps": steps,
            "max_relative_difference_at_the_end": apart["final"],
            "max_loss_difference": losses_apart,
        }
        print(
            f"{name} and {single}: weights differ by {apart['proof']:.1e} after {steps} steps, {apart['final']:.1e} "
            f"at the end; losses by {losses_apart:.1e} at most"
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
    exact = [value for case, value in gradients[torch.float64].items() if "as it is" not in case]
    if max(exact) > TOLERANCE_FLOAT64:
        raise RunFailed(f"the gradients differ by {max(exact):.1e} in float64, more than rounding explains")
    apart = max(pair["max_relative_difference"] for pair in pairs.values())
    if apart > TOLERANCE:
        raise RunFailed(f"the weights of a pair differ by {apart:.1e}, more than {TOLERANCE}: this is not the same computation")
    run.write_results(results)
    print(f"the pairs agree to {apart:.1e} (tolerance {TOLERANCE:.0e}); see {run.path / 'loss_curves.png'}")


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("the experiment")
    group.add_argument(
        "--batch_size", type=number(int, 1), default=64, help="B: over all processes in ddp, of each in replicated"
    )
    group.add_argument("--epochs", type=number(int, 1), default=2, help="passes over the data in the replicated pair")
    group.add_argument("--ddp_epochs", type=number(int, 1), help="in the ddp pair; not given: epochs x int(0.66 x processes)")
    group.add_argument("--max_train_steps", type=number(int, 1), help="at most so many steps in each run")
    group.add_argument("--lr", type=number(float, 0), default=0.02, help="learning rate of all four")
    group.add_argument("--momentum", type=number(float, 0), default=0.9, help="of all four")
    group.add_argument("--proof_steps", type=number(int, 1), default=20, help="compare the weights after so many steps")
    group = parser.add_argument_group("run")
    group.add_argument("--dataset", default="uoft-cs/cifar10", help="Hub id or local folder of 32x32 images, or `synthetic`")
    group.add_argument("--output_dir", default="runs/compare_ddp", help="everything the run writes")
    group.add_argument("--resume", choices=["auto", "never"], default="auto", help="auto: keep the runs that are done")
    group.add_argument("--log_every", type=number(int, 1), default=10, help="steps between the lines of metrics.jsonl")
    group.add_argument("--seed", type=number(int, 0), default=0, help="of weights and order")
    group.add_argument("--timeout", type=number(int, 1), default=1800, help="seconds to wait for another process")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
