"""A network split over several devices in each process, combined with data parallelism.

    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/train_model_parallel.py --dataset synthetic --width 16
    accelerate launch --config_file accelerate_configs/4gpu.yaml --num_processes 2 scripts/train_model_parallel.py

On a machine with 4 GPUs the second command starts two processes. The first has the first half of the network on GPU 0 and
the second half on GPU 1. The second process uses GPUs 2 and 3 in the same way, and DDP averages their gradients. If two
processes would share a GPU, the script stops with an error before NCCL starts. Without a GPU all stages are on the CPU.

Without pipelining, p - 1 of p stages wait while one computes. So a batch is split into m micro-batches, which pass through
the stages one after the other: at any time, each stage works on a different micro-batch (GPipe, Y. Huang et al.,
arXiv:1811.06965). The fraction of time that a device is idle, the bubble, is then (p - 1) / (m + p - 1): with two stages it
is 1/2 for one micro-batch, and 1/5 for four. `Pipeline.forward` implements the schedule. torch.distributed.pipelining runs
one process per stage; here one process runs all stages: CUDA kernels on different devices run concurrently, and autograd
uses one thread per device in the backward pass.

Prefer FSDP when the weights do not fit on one GPU: it has no bubble, and does not need stages of equal cost:

    accelerate launch --config_file accelerate_configs/4gpu_fsdp.yaml scripts/train_gpt.py

Prefer stages when the link between the devices is slow, because only the activations between two stages cross it, not all
weights, or when activations rather than weights fill the memory of a GPU.

Measured on 2026-11-22 with 2cpu.yaml, --dataset synthetic --width 16 --batch_size 128 --max_train_steps 120, on 2 cores of
an Intel Xeon: 98.1 % test accuracy; four micro-batches run at 0.87 times the speed of one, as expected when both stages
share the same cores. Not run on GPUs yet.
"""

import math
import os
import statistics
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()  # before torch: a signal during the slow imports below must not be lost

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader

from utils import devices, plots, report, topology, tracking, weights
from utils.arguments import Parser, number
from utils.augment import augment, normalize
from utils.exits import UserError
from utils.guard import Guard
from utils.image_data import BatchedImages, as_is, load_images
from utils.plan import Plan
from utils.run_folder import RunFolder

# -------------------------------------------------------------------------------------------------------------- model


def build_blocks(classes, width):  # EDIT: model
    """Builds the whole network: eight blocks of about the same cost, then the head. [batch, 3, 32, 32] -> [batch, classes].

    Group norm, not batch norm: batch statistics would depend on the number of micro-batches.
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
    """A sequence of blocks, split into one stage per device. Parameter names are those of the unsplit network.

    Args:
        blocks (nn.Sequential): the network.
        devices (list[torch.device]): one per stage, in order. The input may be on any device; the output is on the last.
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
            # The last stage first: its input is what the stage before it computed in the previous tick.
            for stage in reversed(range(stages)):
                part = tick - stage
                if 0 <= part < len(parts):
                    first, end = self.spans[stage]
                    parts[part] = self.blocks[first:end](parts[part].to(self.devices[stage], non_blocking=True))
        return torch.cat(parts)


def measure(pipeline, images, labels, repeats=3):
    """Times a forward and backward pass with and without pipelining.

    Returns:
        dict: `stages`, `micro_batches`, `seconds` and `seconds_without` (medians), `speed_up`, `bubble_formula`, and
        `bubble_measured`, the fraction of time that a device is idle, estimated from the two times (None if the stages share
        a device, as on a CPU).
    """
    micro_batches, stages = pipeline.micro_batches, len(pipeline.devices)
    seconds = {1: [], micro_batches: []}
    for repeat in range(repeats + 1):
        for count, times in seconds.items():
            pipeline.micro_batches = count
            start_time = time.perf_counter()
            F.cross_entropy(pipeline(images), labels.to(pipeline.devices[-1])).backward()
            for device in pipeline.devices:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            if repeat:  # the first repeat is a warm-up
                times.append(time.perf_counter() - start_time)
    pipeline.zero_grad()
    sequential, pipelined = statistics.median(seconds[1]), statistics.median(seconds[micro_batches])
    separate = len(set(pipeline.devices)) == stages > 1
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "seconds": pipelined,
        "seconds_without": sequential,
        "speed_up": sequential / pipelined,
        "bubble_formula": (stages - 1) / (micro_batches + stages - 1),
        "bubble_measured": 1 - sequential / (stages * pipelined) if separate else None,
    }


def describe(measured):
    """The result of `measure` as a line of text."""
    bubble = measured["bubble_measured"]
    measurement = "not measured on a CPU, where all stages share one device" if bubble is None else f"measured {bubble:.0%}"
    return (
        f"{measured['micro_batches']} micro-batches: {measured['speed_up']:.2f}x the speed of one; "
        f"bubble by formula {measured['bubble_formula']:.0%}, {measurement}"
    )


def lr_multiplier(step, total_steps):
    """The learning-rate multiplier at `step`: linear warm-up over a tenth of the steps, then linear decay to zero."""
    return min((step + 1) / (0.1 * total_steps + 1), (total_steps - step) / (0.9 * total_steps))


# ------------------------------------------------------------------------------------------------- data, evaluation


def build_loaders(accelerator, data, args):  # EDIT: data
    """Builds loaders of global batches; `prepare` gives every process its share of each, on its first device."""
    common = dict(num_workers=args.num_workers, collate_fn=as_is, worker_init_fn=exits.worker_init)
    common["pin_memory"] = accelerator.device.type == "cuda"
    micro_batch = args.batch_size // args.gradient_accumulation_steps
    train = DataLoader(BatchedImages(data.train), micro_batch, shuffle=True, drop_last=True, **common)
    eval_batch = topology.evaluation_batch(accelerator, len(data.test.labels), 250)
    return train, DataLoader(BatchedImages(data.test), eval_batch, **common)


def compute_loss(model, batch, mean, std, epoch, args):  # EDIT: loss
    """The mean loss of a batch, on the device of the last stage."""
    images = batch["images"]
    if not args.overfit_batch:
        images, _ = augment(images, batch["ids"], epoch, args.seed)
    outputs = model(normalize(images, mean, std))
    return F.cross_entropy(outputs, batch["labels"].to(outputs.device))


@torch.no_grad()
def evaluate(accelerator, model, loader, mean, std):  # EDIT: metric
    """Computes exact metrics over the test set: each image counts once, on any number of processes."""
    model.eval()
    outputs, labels = [], []
    for batch in loader:
        logits = model(normalize(batch["images"], mean, std)).float().to(accelerator.device)
        logits, target = accelerator.gather_for_metrics((logits, batch["labels"]))
        outputs.append(logits)
        labels.append(target)
    model.train()
    outputs, labels = torch.cat(outputs).cpu(), torch.cat(labels).cpu()
    if len(labels) != len(loader.dataset):
        raise RuntimeError(f"evaluated {len(labels)} of {len(loader.dataset)} test samples")
    return {"loss": F.cross_entropy(outputs, labels).item(), "accuracy": (outputs.argmax(1) == labels).double().mean().item()}


# ------------------------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    on_cpu = topology.check_launch(training=True)
    stages = [torch.device("cpu")] * args.devices_per_process if on_cpu else devices.claim_gpus(args.devices_per_process)
    # The model is already on several devices: keeps Accelerate from passing `device_ids` to DDP.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    # --batch_size is global: each batch is split over the processes, so every topology sees the same batches in the same order.
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=args.seed, non_blocking=True)
    accelerator = Accelerator(
        cpu=on_cpu,
        dataloader_config=loading,
        gradient_accumulation_plugin=GradientAccumulationPlugin(args.gradient_accumulation_steps, sync_with_dataloader=False),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))],
        log_with=tracking.trackers(args.track),
        project_dir=f"{args.output_dir}/tensorboard",
    )
    if not on_cpu:
        devices.check_gpus(accelerator, stages, args.timeout)
    share = topology.print_banner(accelerator, args.batch_size, args.gradient_accumulation_steps)
    if share % args.micro_batches:
        raise UserError(f"--micro_batches {args.micro_batches} does not divide the {share} samples per process and batch")
    data = topology.local_main_first(accelerator, lambda: load_images(args.dataset, args.seed))
    if args.overfit_batch:
        data.train = data.test = data.train.first(args.batch_size)
    elif args.dry_run:
        data.test = data.test.first(500)
    plan = Plan.from_args(args, len(data.train.labels))
    run = RunFolder(args, accelerator, may_change=["devices_per_process", "micro_batches"])
    run.open(plan)  # the folder is empty, or has a run to continue, or a finished run
    if run.finished:
        return

    set_seed(args.seed)
    mean, std = (x.to(accelerator.device) for x in data.train.mean_and_std())
    model = Pipeline(build_blocks(len(data.class_names), args.width), stages, args.micro_batches)
    weights.initialize(accelerator, model, run.init_from)
    example = normalize(data.train.images[:share].to(accelerator.device), mean, std)
    with accelerator.autocast():  # measure in the precision of the training
        pipelining = measure(model, example, data.train.labels[:share])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_multiplier(step, plan.total_steps))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler, device_placement=[False, None, None])
    train_loader, test_loader = accelerator.prepare(*build_loaders(accelerator, data, args))
    topology.set_up_ddp(accelerator, model, example[:2])
    step = run.start(scheduler)  # accelerator.load_state, if there is a checkpoint
    run.print(f"stages of the first process on {', '.join(map(str, stages))}; {describe(pipelining)}")
    guard = Guard(accelerator, args.timeout)
    train_loss, metrics = math.inf, None
    with report.profiler(accelerator, run.path, args.profile) as profiler:
        for epoch, todo in plan.epochs(start=step):
            train_loader.set_epoch(epoch)
            batches = skip_first_batches(train_loader, todo.batches_done)
            for step, micro_batches in todo.steps(run.timed(batches)):
                losses, ids, norm = [], [], None
                for batch in micro_batches:
                    # Makes a restart draw the same dropout masks. Seeds after loading the batch, which may draw numbers too.
                    topology.seed_step(accelerator, args.seed, step, len(losses))
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
                profiler.step()
                stop = guard.should_stop(step, losses, ids, norm)  # the same answer on every process
                if plan.log_due(step):
                    train_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()  # one loss, not one per rank
                    run.log("train", step, loss=train_loss, grad_norm=norm, lr=scheduler.get_last_lr()[0])
                if plan.evaluation_due(step):
                    metrics = evaluate(accelerator, model, test_loader, mean, std)
                    run.log("test", step, score=metrics["accuracy"], **metrics)
                if stop or plan.save_due(step, improved=run.improved_at(step)):
                    guard.check(model)  # a checkpoint never holds a diverged model
                    with run.checkpoint(step) as folder:
                        accelerator.save_state(folder)
                if stop and step < plan.total_steps:
                    run.exit_preempted(step)
            if args.overfit_batch and train_loss < 0.01:
                break

    if metrics is None or step < plan.total_steps:  # resumed after the last step, or --overfit_batch ended early
        metrics = evaluate(accelerator, model, test_loader, mean, std)
    if accelerator.is_main_process:
        config = {"model": "model_parallel", "width": args.width, "class_names": data.class_names}
        weights.export(run.path, accelerator.unwrap_model(model), config)
        plots.curves(run.path)
    results = {"test_accuracy": metrics["accuracy"], "test_loss": metrics["loss"], "pipelining": pipelining}
    memory = [report.memory_bytes(device) for device in stages]
    run.finish(step, **results, peak_memory_bytes_per_stage=memory)
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("model and training")
    group.add_argument("--devices_per_process", type=number(int, 1), default=2, help="number of stages, each on its own device")
    group.add_argument(
        "--micro_batches", type=number(int, 1), default=4, help="parts that a batch is split into; 1: no pipelining"
    )
    group.add_argument("--width", type=number(int, 8), default=64, help="channels of the first blocks, a multiple of 8")
    parser.add_training_arguments(group, epochs=10, batch_size=512, lr=1e-3)
    parser.add_optimizer_arguments(group, weight_decay=0.05)
    parser.add_run_arguments()
    parser.add_data_arguments("uoft-cs/cifar10", "Hub id or local folder of a 32x32 image data set, or `synthetic`")
    args = parser.parse_training_args()
    if args.devices_per_process > 8 or args.width % 8:
        raise UserError("--devices_per_process is at most 8, the number of blocks, and --width a multiple of 8")
    return args


if __name__ == "__main__":
    exits.run(main)
