"""A network split over several devices in each process, combined with data parallelism.

    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/train_model_parallel.py \\
        --dataset synthetic --width 16
    accelerate launch --config_file accelerate_configs/4gpu.yaml --num_processes 2 \\
        scripts/train_model_parallel.py

On a machine with 4 GPUs the second command starts two processes. The first has the first half of
the network on GPU 0 and the second half on GPU 1. The second process uses GPUs 2 and 3 in the same
way, and DDP averages their gradients. Two processes never share a GPU. Without a GPU all stages are
on the CPU.

Without pipelining, p - 1 of p stages wait while one computes. So a batch is split into m
micro-batches, which pass through the stages one after the other: at any time, each stage works on a
different micro-batch (GPipe, Y. Huang et al., arXiv:1811.06965). The fraction of time that a device
is idle, the bubble, is then (p - 1) / (m + p - 1): with two stages it is 1/2 for one micro-batch,
and 1/5 for four. `Pipeline.forward` implements the schedule. torch.distributed.pipelining runs one
process per stage; here one process runs all stages: CUDA kernels on different devices run
concurrently, and autograd uses one thread per device in the backward pass.

Prefer FSDP (4gpu_fsdp.yaml, scripts/train_gpt.py) when the weights do not fit on one GPU: it has no
bubble, and does not need stages of equal cost. Prefer stages when the link between the devices is
slow, because only the activations between two stages cross it, not all weights, or when activations
rather than weights fill the memory of a GPU.

Measured on 2026-11-22 with 2cpu.yaml, --dataset synthetic --width 16 --batch_size 128
--max_train_steps 120, on 2 cores of an Intel Xeon: 98.1 % test accuracy. Not run on GPUs yet.
"""

import math
import os
import socket
import sys
from itertools import pairwise
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # before torch: a signal during the slow imports must not be lost

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

from utils import flags, schedule, weight_files
from utils.data.sharing import agree, evaluation_batch_size, local_main_first
from utils.images.arrays import load_arrays, on_device
from utils.images.augment import augment, normalize
from utils.report import model_card, plots
from utils.report.tracking import Trackers, start_profiler
from utils.run import ddp, entry, files, launch
from utils.run.arguments import BATCH, Parser, frozen, number
from utils.run.ddp import seed_step
from utils.run.failures import UserError
from utils.run.folder import RunFolder
from utils.run.guard import Guard
from utils.run.metrics import memory_bytes
from utils.run.plan import Plan
from utils.scale import elastic
from utils.scale.saving import BackgroundWriter
from utils.scale.watchdog import Watchdog

# ------------------------------------------------------------------------------------------- model


def build_blocks(classes, width):  # EDIT: model
    """Builds the whole network: eight blocks of about the same cost, then the head.

    [batch, 3, 32, 32] -> [batch, classes]. Group norm, not batch norm: batch statistics would
    depend on the number of micro-batches.
    """

    def block(inputs, outputs, stride):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(8, outputs), nn.GELU())

    # Half the height and width, twice the channels: the same number of multiplications.
    widths = [3, width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width]
    blocks = [block(i, o, 2 if o > i > 3 else 1) for i, o in pairwise(widths)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes))
    return nn.Sequential(*blocks, head)


class Pipeline(nn.Module):
    """A sequence of blocks, split into one stage per device.

    Parameter names are those of the unsplit network.

    Args:
        blocks (nn.Sequential): the network.
        devices (list[torch.device]): one per stage, in order. The input may be on any device; the
            output is on the last.
        micro_batches (int): number of parts that a batch is split into; 1: no pipelining.
    """

    def __init__(self, blocks, devices, micro_batches):
        super().__init__()
        self.blocks, self.devices, self.micro_batches = blocks, devices, micro_batches
        bounds = [round(i * len(blocks) / len(devices)) for i in range(len(devices) + 1)]
        self.spans = list(pairwise(bounds))
        for (first, end), device in zip(self.spans, devices, strict=True):
            blocks[first:end].to(device)

    def forward(self, x):
        parts = list(x.chunk(self.micro_batches))
        stages = len(self.devices)
        for tick in range(len(parts) + stages - 1):
            # The last stage first: its input is what the stage before it computed in the previous
            # tick.
            for stage in reversed(range(stages)):
                part = tick - stage
                if 0 <= part < len(parts):
                    first, end = self.spans[stage]
                    parts[part] = self.blocks[first:end](
                        parts[part].to(self.devices[stage], non_blocking=True)
                    )
        return torch.cat(parts)


def lr_multiplier(step, plan, args):
    """The learning-rate multiplier at `step`: the warm-up takes a tenth of all steps."""
    return schedule.multiplier("linear", step, plan.total_steps, warmup=plan.total_steps / 10)


def build_scheduler(optimizer, plan, args):
    """Multiplies each learning rate by `lr_multiplier` after each step."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_multiplier(step, plan, args)
    )


# ----------------------------------------------------------------------------------------- devices


def arrange_gpus(gpus, local_processes, per_process):
    """All GPUs of a machine (list[int]) in an order in which cuda:r is the first of process r.

    Accelerate uses it for process r. With two processes and two GPUs each, the order is 0 2 1 3:
    process 1 then has cuda:1 and cuda:3, which are GPUs 2 and 3.
    """
    firsts = [rank * per_process for rank in range(local_processes)]
    others = [gpu for gpu in range(local_processes * per_process) if gpu not in firsts]
    return firsts + others + list(range(local_processes * per_process, gpus))


def claim_devices(on_cpu, per_process):
    """Assigns a GPU to each stage of this process (list), before CUDA is used.

    Raises:
        UserError: there are too few; the message names two ranks that would share one.
    """
    if on_cpu:
        return [torch.device("cpu")] * per_process
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    rank = int(os.environ.get("LOCAL_RANK", 0))
    first = int(os.environ.get("RANK", 0)) - rank  # of this machine
    if per_process > gpus:
        raise UserError(f"--devices_per_process {per_process}: this machine has {gpus}")
    if processes * per_process > gpus:
        raise UserError(
            f"ranks {first} and {first + gpus // per_process} would share GPU 0 on "
            f"{socket.gethostname()}: every rank needs its own --devices_per_process GPUs. Start "
            "fewer processes (accelerate launch --num_processes ...)"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
        visible[i] for i in arrange_gpus(gpus, processes, per_process)
    )
    others = processes + rank * (per_process - 1)  # index of the second GPU of this process
    return [
        torch.device("cuda", index) for index in (rank, *range(others, others + per_process - 1))
    ]


# -------------------------------------------------------------------------------- data, evaluation


def load_data(accelerator, args):  # EDIT: data
    """Loads the images into memory, and shortens the splits for quick checks.

    Returns:
        tuple: the data; the split to evaluate, `val` or else `test`; a line with a checksum.
    """
    data = local_main_first(accelerator, lambda: load_arrays(args.dataset, seed=args.seed))
    description = agree(accelerator, args.dataset, data)
    held_out = "val" if "val" in data.splits else "test"
    if args.overfit_batch:
        batch = data.splits["train"].first(args.batch_size)
        data.splits = {"train": batch, held_out: batch}
    elif args.dry_run:
        data.splits[held_out] = data.splits[held_out].first(500)
    return data, held_out, description


def build_loaders(accelerator, data, held_out, args):
    """Builds (Split, loader) of the training data and of the held-out ones (list).

    `prepare` splits global batches over the processes. The loaders yield ids of samples, on the
    CPU: `Split.batch` then makes the batch, on the first device of its process.
    """
    splits = on_device(accelerator, data.splits)
    train_set, eval_set = splits["train"], splits[held_out]
    batch_size = args.batch_size // args.gradient_accumulation_steps
    train_loader = DataLoader(range(len(train_set)), batch_size, shuffle=True, drop_last=True)
    batch_size = evaluation_batch_size(accelerator, len(eval_set), 250)
    eval_loader = DataLoader(range(len(eval_set)), batch_size)
    return [
        (split, accelerator.prepare_data_loader(loader, device_placement=False))
        for split, loader in ((train_set, train_loader), (eval_set, eval_loader))
    ]


def compute_loss(model, batch, mean, std, epoch, args):  # EDIT: loss
    """The mean loss of a batch, on the device of the last stage."""
    images = batch["images"]
    if not args.overfit_batch:
        images = augment(images, batch["ids"], epoch, args.seed)
    outputs = model(normalize(images, mean, std))
    return F.cross_entropy(outputs, batch["labels"].to(outputs.device))


@torch.no_grad()
def evaluate(accelerator, model, split, loader, watch, mean, std):  # EDIT: metric
    """Computes exact metrics of a split: each image counts once, on any number of processes.

    Returns:
        dict: `loss`, `accuracy`.
    """
    model.eval()
    outputs, labels = [], []
    for batch in map(split.batch, watch(loader)):
        logits = model(normalize(batch["images"], mean, std)).float().to(accelerator.device)
        logits, target = accelerator.gather_for_metrics((logits, batch["labels"]))
        outputs.append(logits)
        labels.append(target)
    model.train()
    outputs, labels = torch.cat(outputs).cpu(), torch.cat(labels).cpu()
    if len(labels) != len(split):
        raise RuntimeError(f"evaluated {len(labels)} of {len(split)} samples")
    correct = outputs.argmax(1) == labels
    loss = F.cross_entropy(outputs, labels).item()
    return {"loss": loss, "accuracy": correct.double().mean().item()}


# -------------------------------------------------------------------------------------------- main


MAY_CHANGE = flags.MAY_CHANGE | {"devices_per_process", "micro_batches"}


def main():
    args = parse_args()
    on_cpu = launch.set_up(args)  # network, threads, deterministic algorithms
    stages = claim_devices(on_cpu, args.devices_per_process)
    # Keeps Accelerate from passing `device_ids` to DDP: the model is already on several devices.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    trackers = Trackers(args)
    accelerator = Accelerator(cpu=on_cpu, **launch.accelerator_options(args), **trackers.options())
    accumulation = args.gradient_accumulation_steps
    launch.print_banner(accelerator)
    samples = elastic.divide_batch(accelerator, args.batch_size, accumulation)
    if samples % args.micro_batches:
        raise UserError(
            f"--micro_batches {args.micro_batches} does not divide the {samples} samples per "
            "process and batch"
        )
    data, held_out, description = load_data(accelerator, args)
    train_set = data.splits["train"]
    plan = Plan.from_args(args, len(train_set))
    writer = None if args.wait_for_checkpoints else BackgroundWriter(accelerator)
    run = RunFolder(args, accelerator, MAY_CHANGE, [trackers], writer)
    run.open(plan, data=description)  # has a run to continue, a finished one, or none
    if run.finished:
        return
    set_seed(args.seed)
    mean, std = (value.to(accelerator.device) for value in train_set.mean_and_std())
    model = Pipeline(build_blocks(len(data.class_names), args.width), stages, args.micro_batches)
    weight_files.initialize(accelerator, model, run.init_from)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    scheduler = build_scheduler(optimizer, plan, args)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, scheduler, device_placement=[False, None, None]
    )
    (train_set, train_loader), eval_data = build_loaders(accelerator, data, held_out, args)
    first = train_set.batch(torch.arange(2))
    ddp.warm_up(model, lambda: compute_loss(model, first, mean, std, 0, args))
    step = run.start()  # accelerator.load_state, if there is a checkpoint
    schedule.recompute(scheduler)  # the run may have another length now
    run.print(f"stages of the first process on {', '.join(map(str, stages))}")
    guard = Guard(accelerator, args.timeout)
    watchdog = Watchdog(run, guard, accelerator, model, args.timeout)

    def validate(step):
        metrics = evaluate(accelerator, model, *eval_data, guard.watch, mean, std)
        score = metrics["accuracy"] if held_out == "val" else None  # a test split chooses nothing
        run.log(held_out, step, score=score, **metrics)

    train_loss = math.inf
    if run.evaluation_due:  # the run was stopped in it
        validate(step)
    profile = start_profiler(accelerator, run.path, args.profile)
    for epoch, remaining in plan.epochs(start=step):
        train_loader.set_epoch(epoch)
        batches = remaining.rest(train_loader)  # without those before an interruption
        for step, micro_batches in remaining.accumulated(run.timed(batches)):
            losses, ids, norm = [], [], None
            for batch in map(train_set.batch, micro_batches):
                # A restart draws the same dropout masks. After loading, which may draw, too.
                seed_step(accelerator, args.seed, step, len(losses))
                with accelerator.accumulate(model):
                    loss = compute_loss(model, batch, mean, std, epoch, args)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and args.max_grad_norm:
                        norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.detach().to(accelerator.device))
                ids.append(batch["ids"])
            profile.step()
            stop = guard.should_stop(step, losses, ids, norm)  # the same on every process
            if plan.log_due(step):  # one loss, not one per process
                train_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                figures = dict(loss=train_loss, grad_norm=norm, lr=scheduler.get_last_lr()[0])
                run.log("train", step, **figures, **watchdog.figures())
            if stop or run.save_due(step):
                with run.checkpoint(step, guard, model) as folder:
                    accelerator.save_state(folder)
            if stop:
                run.exit_preempted(step)
            if plan.evaluation_due(step):
                validate(step)  # a signal ends it at once: the restart evaluates
        if args.overfit_batch and train_loss < 0.01:
            break
    profile.stop()

    metrics = evaluate(accelerator, model, *eval_data, guard.watch, mean, std)
    if accelerator.is_main_process:
        config = {"model": "model_parallel", "width": args.width, "class_names": data.class_names}
        files.write_weights(run.path, accelerator.unwrap_model(model), config)
    results = {f"{held_out}_{name}": value for name, value in metrics.items()}
    peaks = [memory_bytes(device) for device in stages]
    run.finish(step, **results, peak_memory_bytes_per_stage=peaks)
    if accelerator.is_main_process:
        plots.curves(run.path)
        model_card.write(run)
    run.close()
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        default="uoft-cs/cifar10",
        help="Hub id or local folder of a 32x32 image data set, or `synthetic`",
    )
    group = parser.add_argument_group("model and training")
    group.add_argument(
        "--devices_per_process",
        type=number(int, 1, most=8),  # the number of blocks
        default=2,
        help="number of stages, each on its own device",
    )
    group.add_argument(
        "--micro_batches",
        type=BATCH,
        default=4,
        help="parts that a batch is split into; 1: no pipelining",
    )
    group.add_argument(
        "--width",
        type=number(int, 8, most=1024),  # already 300 million parameters
        default=64,
        help="channels of the first blocks, a multiple of 8",
    )
    parser.add_training_arguments(group, epochs=10, batch_size=512, lr=1e-3)
    flags.add(group, *flags.OPTIMIZER, weight_decay=0.05)
    group = parser.add_run_arguments()
    flags.add(group, "init_from", *flags.EXTRAS)
    args = flags.parse_with_checks(parser)
    if args.width % 8:
        raise UserError(f"--width {args.width} is not a multiple of 8")
    return frozen(args)


if __name__ == "__main__":
    entry.run(main)
