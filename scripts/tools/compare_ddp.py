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

Each process computes the mean loss of its own B/W samples, and DDP averages the *gradients*. The
mean of W means over equally many samples is the mean over all samples, so the optimizer follows the
gradient of one loss, that of the whole batch: the mean of the W losses.

This holds under conditions, which this script checks on the gradients, in float64, where
differences caused by rounding almost disappear:

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
"""

import contextlib
import itertools
import sys
import time
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
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from utils.data.sharing import agree, local_main_first
from utils.images.arrays import load_arrays, on_device
from utils.images.augment import normalize
from utils.report import plots
from utils.run import entry, launch
from utils.run.arguments import BATCH, Parser, number
from utils.run.collectives import run_on_main
from utils.run.failures import RunFailed, UserError
from utils.run.files import write_json

PAIRS = {"replicated": "replicated_single", "ddp": "ddp_single"}  # W processes: one process
RUNS = [name for pair in PAIRS.items() for name in pair]
LR, MOMENTUM, EPOCHS, SEED = 0.02, 0.9, 2, 0
PROOF_STEPS = 20  # after which the weights are compared: rounding errors grow from step to step
TOLERANCE = 1e-5  # largest accepted relative difference of float32 weights
TOLERANCE_OF_GRADIENTS = 1e-10  # the same for float64 gradients


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


def build_loaders(accelerator, samples, name, args):
    """Builds loaders of the ids of a process in the run `name`; their batches are concatenated.

    They drop the last, incomplete batch of an epoch, because it might not divide evenly over the
    processes.
    """

    def loader(seed):
        order = RandomSampler(range(samples), generator=torch.Generator().manual_seed(seed))
        return DataLoader(range(samples), args.batch_size, sampler=order, drop_last=True)

    if name == "ddp":
        return [accelerator.prepare_data_loader(loader(SEED), device_placement=False)]
    if name == "ddp_single":
        return [loader(SEED)]
    if name == "replicated":
        return [loader(SEED + accelerator.process_index)]
    return [loader(SEED + rank) for rank in range(accelerator.num_processes)]


def train(accelerator, data, name, args):
    """Trains one of the four runs.

    Returns:
        dict: `losses` float32 [processes, steps], and the weights after `PROOF_STEPS` steps
        (`proof`) and at the end (`final`), each a list of tensors.
    """
    set_seed(SEED)
    device, split = accelerator.device, on_device(accelerator, data.splits)["train"]
    model = Net(len(data.class_names)).to(device)
    if name in PAIRS:
        model = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    loaders = build_loaders(accelerator, len(split), name, args)
    mean, std = (value.to(device) for value in data.splits["train"].mean_and_std())
    longer = max(1, int(0.66 * accelerator.num_processes)) if name.startswith("ddp") else 1
    total_steps = EPOCHS * longer * (len(split) // args.batch_size)
    total_steps = min(total_steps, args.max_train_steps or total_steps)
    losses, record, start_time = [], {}, time.perf_counter()
    while len(losses) < total_steps:
        for ids in itertools.islice(zip(*loaders, strict=True), total_steps - len(losses)):
            batch = split.batch(torch.cat(ids))
            loss = F.cross_entropy(model(normalize(batch["images"], mean, std)), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == min(PROOF_STEPS, total_steps):
                record["proof"] = copies(model.parameters())
    losses = torch.stack(losses)[None].float()
    if name in PAIRS:
        # Gather all losses once, at the end, because a gather in every step would slow it down.
        losses = accelerator.gather(losses)
    if accelerator.is_main_process:
        seconds, last = time.perf_counter() - start_time, losses[:, -1].mean().item()
        print(f"{name}: {total_steps} steps in {seconds:.1f} s, last loss {last:.4f}", flush=True)
    return record | dict(losses=losses.cpu(), final=copies(model.parameters()))


def copies(tensors):
    """Copies tensors to the CPU."""
    return [tensor.detach().cpu().clone() for tensor in tensors]


# --------------------------------------------------------------------------------------- gradients


def compare_gradients(accelerator, data, args):
    """Compares float64 gradients of DDP with those of one process, with and without corrections.

    Returns:
        dict: case -> largest relative difference.
    """
    set_seed(SEED)
    dtype = torch.float64
    processes, rank = accelerator.num_processes, accelerator.process_index
    one, several = (Net(len(data.class_names)).to(accelerator.device, dtype) for _ in range(2))
    several.load_state_dict(one.state_dict())
    several = accelerator.prepare(several)
    split = data.splits["train"]
    first = split.first(args.batch_size)
    images = normalize(first.images, *split.mean_and_std()).to(accelerator.device, dtype)
    labels = first.labels.to(accelerator.device)

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
        return copies(weight.grad for weight in network.parameters())

    everything = torch.arange(args.batch_size)
    share = everything.chunk(processes)[rank]
    # Does not divide evenly: the first process gets one more.
    few = torch.arange(min(3 * processes + 1, args.batch_size))
    few_share = few.tensor_split(processes)[rank]
    correction = processes * len(few_share) / len(few)
    last_batch = f"mean, last batch of {len(few)}"
    # The indices of each micro-batch of this process, the reduction, the factor of the loss, and
    # the indices of the whole batch.
    cases = {
        "mean": ([share], "mean", 1, everything),
        "sum, uncorrected": ([share], "sum", 1, everything),
        "sum, loss x W": ([share], "sum", processes, everything),
        "mean, accumulated sample by sample": (share.split(1), "mean", 1 / len(share), everything),
        f"{last_batch}, uncorrected": ([few_share], "mean", 1, few),
        f"{last_batch}, loss x W x own / all samples": ([few_share], "mean", correction, few),
    }
    return {
        case: largest_difference(
            gradient(several, parts, reduction, factor), gradient(one, [whole], reduction, 1)
        )
        for case, (parts, reduction, factor, whole) in cases.items()
    }


def largest_difference(tensors, expected):
    """The largest difference between two lists of tensors.

    Each is relative to the largest entry of the expected tensor.
    """
    pairs = zip(tensors, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


# ------------------------------------------------------------------------------------ plot, verdict


def draw(path, records, processes):
    """Draws the loss curves of each pair."""
    figure, axes = plots.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    colors = dict(zip(RUNS, ("#d1795b", "#7d2c10", "#6ba3d6", "#0b4884"), strict=True))
    for name, record in records.items():
        axis = axes[0] if name.startswith("replicated") else axes[1]
        losses, look, label = record["losses"], dict(linestyle="--", linewidth=1.6), name
        steps = torch.arange(1, losses.shape[1] + 1)
        if name in PAIRS:
            look, label = dict(linewidth=3), f"{name}, mean of all processes (each: thin)"
            axis.plot(steps, losses.T, color=colors[name], linewidth=0.5, alpha=0.35)
        width = max(1, len(steps) // 40)
        smooth = losses.unfold(1, width, 1).mean(2).mean(0)
        axis.plot(steps[width - 1 :], smooth, color=colors[name], label=label, **look)
    several = f"{processes} processes, each with"
    titles = (
        f"{several} all of the data,\nequal one with {processes} times the batch size",
        f"{several} its part of each batch,\nequal one with the whole batch",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("training loss (thick: running mean)")
    plots.save(figure, path)


def conclude(records, results, args):
    """Compares the runs of each pair, and writes the plot and the results.

    Args:
        results (dict): what else to write to results.json.

    Raises:
        RunFailed: the runs of a pair differ, or the gradients do.
    """
    processes, results["pairs"] = results["num_processes"], {}
    for name, single in PAIRS.items():
        ours, theirs = records[name], records[single]
        difference = largest_difference(ours["proof"], theirs["proof"])
        steps = min(PROOF_STEPS, theirs["losses"].shape[1])
        at_the_end = largest_difference(ours["final"], theirs["final"])
        of_losses = (ours["losses"].mean(0) - theirs["losses"][0]).abs().max().item()
        results["pairs"][name] = {
            "after_steps": steps,
            "max_relative_difference": difference,
            "max_relative_difference_at_the_end": at_the_end,
            "max_loss_difference": of_losses,
        }
        print(
            f"{name} and {single}: weights differ by {difference:.1e} after {steps} steps and by "
            f"{at_the_end:.1e} at the end, losses by at most {of_losses:.1e}"
        )
    losses = records["ddp"]["losses"][:, 0].tolist()  # before any step, so of the same weights
    whole, mean = records["ddp_single"]["losses"][0, 0].item(), sum(losses) / processes
    results["losses_of_one_batch"] = {"per_process": losses, "mean": mean, "one_process": whole}
    print(
        f"\n{processes} processes, {processes} losses of the first batch: "
        f"{', '.join(f'{loss:.6f}' for loss in losses)}\n"
        f"their mean: {mean:.6f}; one process, the whole batch: {whole:.6f}\n"
    )
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    draw(folder / "loss_curves.png", records, processes)
    write_json(folder / "results.json", results)

    differences = results["gradients"].items()
    largest = max(value for case, value in differences if "uncorrected" not in case)
    if largest > TOLERANCE_OF_GRADIENTS:
        raise RunFailed(
            f"the gradients differ by {largest:.1e} in float64, more than rounding can explain"
        )
    difference = max(pair["max_relative_difference"] for pair in results["pairs"].values())
    if difference > TOLERANCE:
        raise RunFailed(
            f"the weights of a pair differ by {difference:.1e}, more than {TOLERANCE}: this is not "
            "the same computation"
        )
    print(
        f"the pairs agree to {difference:.1e} (tolerance {TOLERANCE:.0e}); see "
        f"{folder / 'loss_curves.png'}"
    )


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
    )
    processes = accelerator.num_processes
    launch.print_banner(accelerator)
    launch.divide_batch(accelerator, args.batch_size)
    data = local_main_first(accelerator, lambda: load_arrays(args.dataset, seed=SEED))
    agree(accelerator, args.dataset, data)
    if args.batch_size > len(data.splits["train"]):
        raise UserError(
            f"--batch_size {args.batch_size} is more than the {len(data.splits['train'])} training "
            "images"
        )

    gradients = compare_gradients(accelerator, data, args)
    accelerator.print(
        f"\nLargest relative difference between DDP's gradient (W = {processes}) and that of one "
        "process:"
    )
    for case, value in gradients.items():
        accelerator.print(f"  {case:50}  {value:7.0e}")
    records = {}
    for name in RUNS:
        training = partial(train, accelerator, data, name, args)
        records[name] = training() if name in PAIRS else run_on_main(accelerator, training)
    results = {"gradients": gradients, "num_processes": processes}
    run_on_main(accelerator, partial(conclude, records, results, args))
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--batch_size",
        type=BATCH,
        default=64,
        help="B: samples over all processes in ddp, per process in replicated",
    )
    steps = number(int, 1)
    parser.add_argument(
        "--max_train_steps", type=steps, help="maximum number of optimizer steps of a run"
    )
    parser.add_argument(
        "--dataset",
        default="uoft-cs/cifar10",
        help="Hub id, local folder or file of 32x32 images, or `synthetic`",
    )
    parser.add_argument(
        "--output_dir", default="runs/compare_ddp", help="folder for the plot and the results"
    )
    return parser.parse_args()


if __name__ == "__main__":
    entry.run(main)
