"""A network split over several devices inside each process, times data parallel.

    accelerate launch --config_file accelerate_configs/2cpu.yaml scripts/train_model_parallel.py --dataset synthetic --width 16
    accelerate launch --config_file accelerate_configs/4gpu.yaml --num_processes 2 scripts/train_model_parallel.py

On a machine with 4 GPUs the second starts two processes: one has its first half of the network on GPU 0 and the second
on GPU 1, the other uses GPUs 2 and 3, and DDP averages their gradients. Two processes with two devices each need four:
two that would share a GPU are refused before NCCL sees them. Without a GPU all stages are on the CPU.

Left alone, one stage of p waits while another works. So a batch is cut into m micro-batches which follow each other
through the stages: at every tick of the clock each stage has another one (GPipe, Y. Huang et al., arXiv:1811.06965).
The share of the time that a device idles, the bubble, is then (p - 1) / (m + p - 1): 1/2 with two stages and one
micro-batch, 1/5 with four. The schedule is the dozen lines of `Pipeline.forward`. torch.distributed.pipelining does
it for one process per stage; here all stages belong to one process, where CUDA runs launches for different devices side
by side and autograd, with a thread per device, does the same backwards.

Prefer FSDP when the weights do not fit one GPU: it has no bubble, splits evenly, and needs no stages of equal cost:

    accelerate launch --config_file accelerate_configs/4gpu_fsdp.yaml scripts/train_gpt.py

Prefer stages where the link between devices is slow (one activation crosses it, not all the weights), or where one
layer's activations are what fills the memory.

Measured on 2026-11-21 with 2cpu.yaml, --dataset synthetic --width 16 --batch_size 128 --max_train_steps 120, on 2 cores of
an AMD EPYC: 98.1 % test accuracy; four micro-batches 0.90 times as fast as one, as is to be expected where both stages
share the same cores. Not run on GPUs yet.
"""

import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from itertools import islice, pairwise
from pathlib import Path

# `utils` lies beside this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()  # before torch: a signal during the slow imports below must not be lost

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from utils import checkpoint, plots, report, topology, weights
from utils.arguments import Parser, add_data_arguments, add_run_arguments, number
from utils.augment import augment, normalize
from utils.exits import UserError
from utils.guard import Guard
from utils.image_data import BatchedImages, as_is, load_images
from utils.run_folder import RunFolder, scratch_name

# ------------------------------------------------------------------------------------------------------------ devices


def arrange_gpus(gpus, local_processes, per_process):
    """The order in which to number a machine's GPUs, so that process r finds its own at r and behind the others' first.

    Accelerate puts process r on cuda:r, and synchronises there. In the new order that is the first of *its* GPUs:
    with two processes and two each, GPUs 0 1 2 3 are numbered 0 2 1 3, and process 1 owns cuda:1 and cuda:3.

    Returns:
        list[int]: all GPUs in the new order.
    """
    firsts = [rank * per_process for rank in range(local_processes)]
    others = [gpu for gpu in range(local_processes * per_process) if gpu not in firsts]
    return firsts + others + list(range(local_processes * per_process, gpus))


def refuse_shared(places):
    """Raises UserError if two ranks would use one device.

    Args:
        places: (rank, host, device) of every stage of every rank; `device` identifies it on its host.
    """
    owners = {}
    for rank, host, device in places:
        owner = owners.setdefault((host, device), rank)
        if owner != rank:
            raise UserError(
                f"ranks {owner} and {rank} would share {device} on {host}: every rank needs as many GPUs of its own as "
                "--devices_per_process says. Start fewer processes (accelerate launch --num_processes ...)"
            )


def claim_gpus(per_process):
    """Gives this process its GPUs; call it before CUDA is used.

    Returns:
        list[torch.device]: one for each stage.

    Raises:
        UserError: there are too few; names two ranks that would share one.
    """
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    rank, first = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("RANK", 0)) - int(os.environ.get("LOCAL_RANK", 0))
    stages = [(r, stage) for r in range(processes) for stage in range(per_process)]
    refuse_shared((first + r, socket.gethostname(), f"GPU {(r * per_process + stage) % gpus}") for r, stage in stages)
    if per_process > gpus:
        raise UserError(f"--devices_per_process {per_process}: this machine has {gpus}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] for i in arrange_gpus(gpus, processes, per_process))
    behind = processes + rank * (per_process - 1)
    return [torch.device("cuda", index) for index in (rank, *range(behind, behind + per_process - 1))]


def check_gpus(accelerator, devices, timeout):
    """Compares the GPUs that all processes really got, by their serial ids, over gloo: NCCL would fail obscurely."""
    if accelerator.num_processes == 1:
        return
    own = [(accelerator.process_index, socket.gethostname(), str(torch.cuda.get_device_properties(d).uuid)) for d in devices]
    places = [None] * accelerator.num_processes
    dist.all_gather_object(places, own, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))
    refuse_shared(place for of_rank in places for place in of_rank)


# -------------------------------------------------------------------------------------------------------------- model


def build_blocks(classes, width):
    """The unsplit network: eight blocks of about the same cost, then the head. [batch, 3, 32, 32] -> [batch, classes].

    Group norm, not batch norm: batch statistics would depend on the number of micro-batches.
    """

    def block(inputs, outputs, stride):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(8, outputs), nn.GELU())

    # Half the pixels each way, twice the channels: the same number of multiplications.
    widths = [3, width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width]
    blocks = [block(i, o, 2 if o > i > 3 else 1) for i, o in pairwise(widths)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes))
    return nn.Sequential(*blocks, head)


class Pipeline(nn.Module):
    """A sequence of blocks, cut into one stage per device. Its weights have the names they have unsplit.

    Args:
        blocks (nn.Sequential): the network.
        devices: of the stages, in order; the input may be anywhere, the output is on the last.
        micro_batches (int): parts of a batch that are on their way at the same time; 1: no pipelining.
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
            # The last stage first: it takes what the one before made in the previous tick.
            for stage in reversed(range(stages)):
                part = tick - stage
                if 0 <= part < len(parts):
                    first, end = self.spans[stage]
                    parts[part] = self.blocks[first:end](parts[part].to(self.devices[stage], non_blocking=True))
        return torch.cat(parts)


def measure(pipeline, images, labels, repeats=3):
    """Times a forward and backward pass with pipelining and without.

    Returns:
        dict: `stages`, `micro_batches`, `seconds` and `seconds_without` (medians), `speed_up`, `bubble_formula`, and
        `bubble_measured`, the idle share of the devices, if the time without pipelining is taken for the work there is
        (None on a CPU, where the stages share one device and none can idle for another).
    """
    micro_batches, stages = pipeline.micro_batches, len(pipeline.devices)
    seconds = {1: [], micro_batches: []}
    for repeat in range(repeats + 1):
        for count, times in seconds.items():
            pipeline.micro_batches = count
            began = time.perf_counter()
            F.cross_entropy(pipeline(images), labels.to(pipeline.devices[-1])).backward()
            for device in pipeline.devices:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            if repeat:  # the first time warms up
                times.append(time.perf_counter() - began)
    pipeline.zero_grad()
    without, with_ = statistics.median(seconds[1]), statistics.median(seconds[micro_batches])
    apart = len(set(pipeline.devices)) == stages > 1
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "seconds": with_,
        "seconds_without": without,
        "speed_up": without / with_,
        "bubble_formula": (stages - 1) / (micro_batches + stages - 1),
        "bubble_measured": 1 - without / (stages * with_) if apart else None,
    }


# ------------------------------------------------------------------------------------------------- data, evaluation


def build_loaders(accelerator, data, args):
    """Loaders of global batches: `prepare` gives every process its share of each, on its first device."""
    common = dict(num_workers=args.num_workers, collate_fn=as_is, worker_init_fn=exits.worker_init)
    common["pin_memory"] = accelerator.device.type == "cuda"
    train = DataLoader(
        BatchedImages(data.train), args.batch_size // args.gradient_accumulation_steps, shuffle=True, drop_last=True, **common
    )
    return train, DataLoader(BatchedImages(data.test), 250 * accelerator.num_processes, **common)


@torch.no_grad()
def evaluate(accelerator, model, loader, mean, std, max_batches=None):
    """Loss and accuracy over the test set, each image counted once, on any number of processes."""
    model.eval()
    outputs, labels = [], []
    for batch in islice(loader, max_batches):
        logits = model(normalize(batch["images"], mean, std)).float().to(accelerator.device)
        logits, target = accelerator.gather_for_metrics((logits, batch["labels"]))
        outputs.append(logits)
        labels.append(target)
    model.train()
    outputs, labels = torch.cat(outputs).cpu(), torch.cat(labels).cpu()
    if max_batches is None and len(labels) != len(loader.dataset):
        raise RuntimeError(f"evaluated {len(labels)} of {len(loader.dataset)} test samples")
    return {"loss": F.cross_entropy(outputs, labels).item(), "accuracy": (outputs.argmax(1) == labels).double().mean().item()}


# ------------------------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    on_cpu = topology.check_launch()
    devices = [torch.device("cpu")] * args.devices_per_process if on_cpu else claim_gpus(args.devices_per_process)
    # The model is on several devices already: Accelerate must not tell DDP that it is on one.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    accelerator = Accelerator(
        cpu=on_cpu,
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=args.seed, non_blocking=True
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(args.gradient_accumulation_steps, sync_with_dataloader=False),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))],
        log_with="tensorboard",
        project_config=ProjectConfiguration(logging_dir=args.output_dir),
    )
    say = accelerator.on_main_process(print)  # accelerator.print speaks once per machine
    if not on_cpu:
        check_gpus(accelerator, devices, args.timeout)
    banner = topology.banner(accelerator, "train_model_parallel", args.batch_size, args.gradient_accumulation_steps)
    share = topology.split_batch(accelerator, args.batch_size, args.gradient_accumulation_steps)
    if share % args.micro_batches:
        raise UserError(f"--micro_batches {args.micro_batches} does not divide the {share} samples a process takes at a time")
    data = topology.node_first(accelerator, lambda: load_images(args.dataset, args.seed))
    if args.overfit_batch:
        data.train = data.test = data.train.first(args.batch_size)
    steps_per_epoch = len(data.train.labels) // args.batch_size
    if steps_per_epoch == 0:
        raise UserError(f"--batch_size {args.batch_size} is more than the {len(data.train.labels)} training images")
    total_steps = args.max_train_steps or args.epochs * steps_per_epoch
    eval_every = args.eval_every or steps_per_epoch
    checkpoint_every = steps_per_epoch if args.checkpoint_every is None else args.checkpoint_every

    # ---- what this folder holds already: nothing, a run to continue, or one that must not be touched
    run = RunFolder(args, accelerator)
    finished, found = run.open()
    if finished:
        say(report.summary(finished, run.path, "this run is finished already, nothing to do"))
        return

    set_seed(args.seed)
    mean, std = (x.to(accelerator.device) for x in data.train.mean_and_std())
    model = Pipeline(build_blocks(len(data.class_names), args.width), devices, args.micro_batches)
    say(f"{banner}\n{args.devices_per_process} stages on {', '.join(map(str, devices))} (of the first process)")
    example = normalize(data.train.images[:share].to(accelerator.device), mean, std)
    with accelerator.autocast():  # in the precision of the training below
        pipelining = measure(model, example, data.train.labels[:share])
    say(
        f"{pipelining['micro_batches']} micro-batches: {pipelining['speed_up']:.2f}x the speed of one, bubble by formula "
        f"{pipelining['bubble_formula']:.0%}, "
        + (
            "which a CPU cannot show: its stages share one device"
            if pipelining["bubble_measured"] is None
            else f"measured {pipelining['bubble_measured']:.0%}"
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    # Linear warm-up over a tenth, then linear decay to 0.
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * total_steps + 1), (total_steps - step) / (0.9 * total_steps))
    )
    train_loader, test_loader = build_loaders(accelerator, data, args)
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader, device_placement=[False, None, None, None, None]
    )
    topology.settle_gradient_buckets(accelerator, model, lambda: model(example[:2]).sum())

    progress = {"step": 0, "train_seconds": 0.0, "score": None}
    if found:
        checkpoint.load(accelerator, found[0])
        progress = found[1]["progress"]
    step = resumed_from = saved_at = progress["step"]
    run.begin(step, topology.describe(accelerator))
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": step + 1}})
    say(f"{total_steps} steps, {steps_per_epoch} an epoch; everything goes to {run.path}")
    say(f"continuing from {found[0]}" if found else "starting at step 0")

    began = time.perf_counter()
    guard = Guard(accelerator, args.timeout)
    meter = report.Meter(accelerator, args.batch_size, total_steps, step)
    bar = tqdm(total=total_steps, initial=step, disable=not (accelerator.is_main_process and sys.stderr.isatty()))

    def save():
        guard.check_loss()
        now = progress | {"step": step, "train_seconds": progress["train_seconds"] + time.perf_counter() - began}
        written, seconds = checkpoint.save(accelerator, run.path, now, args.keep_checkpoints, run.record)
        run.log("checkpoint", step, seconds=seconds, written=written)
        return step if written else saved_at

    # ---- the loop
    stop, tested = False, None
    model.train()
    with report.profiler(accelerator, run.path, args.profile) as profile_step:
        while step < total_steps and not stop:
            epoch, done = divmod(step, steps_per_epoch)
            train_loader.set_epoch(epoch)
            batches = skip_first_batches(train_loader, done * args.gradient_accumulation_steps) if done else train_loader
            # Whole optimizer steps only: what is left of the epoch is the same for every accumulation.
            steps = min(steps_per_epoch - done, total_steps - step)
            step_loss, ids = 0.0, []
            meter.data_wanted()
            for batch in islice(batches, steps * args.gradient_accumulation_steps):
                meter.data_arrived()
                with accelerator.accumulate(model):
                    images = batch["images"]
                    if not args.overfit_batch:
                        images, _ = augment(images, batch["ids"], epoch, args.seed)
                    outputs = model(normalize(images, mean, std))
                    loss = F.cross_entropy(outputs, batch["labels"].to(outputs.device))  # on the last stage's device
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                step_loss = step_loss + loss.detach() / args.gradient_accumulation_steps
                ids.append(batch["ids"])
                if accelerator.sync_gradients:
                    step += 1
                    bar.update()
                    profile_step()
                    stop = guard.should_stop(step, step_loss, ids)
                    if step % args.log_every == 0 or step == total_steps:
                        # Of the whole global batch, not of this process' share: one loss, not one per rank.
                        loss = accelerator.reduce(step_loss.to(accelerator.device), "mean").item()
                        line = meter.line(step, epoch=step / steps_per_epoch, loss=loss, lr=scheduler.get_last_lr()[-1])
                        run.log("train", **line)
                        accelerator.log({f"train/{n}": line[n] for n in ("loss", "lr", "samples_per_second")}, step=step)
                        bar.write(meter.text(line)) if not bar.disable else say(meter.text(line))
                        stop = stop or (args.overfit_batch and loss < 0.01)
                    if step % eval_every == 0 or step == total_steps:
                        tested = evaluate(accelerator, model, test_loader, mean, std, 2 if args.dry_run else None)
                        progress["score"] = tested["accuracy"]
                        run.log("test", step, epoch=step / steps_per_epoch, **tested)
                        accelerator.log({f"test/{n}": tested[n] for n in ("loss", "accuracy")}, step=step)
                        say(f"step {step}  test loss {tested['loss']:.4f}  accuracy {tested['accuracy']:.2%}")
                    if step == total_steps or (checkpoint_every and step % checkpoint_every == 0):
                        saved_at = save()
                    if progress["score"] is not None:
                        progress["score"] = None  # of this step only
                        meter.restart(step)
                    step_loss, ids = 0.0, []
                    if stop:
                        break
                meter.data_wanted()
    bar.close()
    if step < total_steps and not args.overfit_batch:
        if saved_at != step:
            saved_at = save()
        run.preempted(f"at step {step}, saved at step {saved_at}", step=saved_at)

    # ---- the results
    train_seconds = progress["train_seconds"] + time.perf_counter() - began
    if tested is None or step < total_steps:
        tested = evaluate(accelerator, model, test_loader, mean, std)
    results = {
        "test_accuracy": tested["accuracy"],
        "test_loss": tested["loss"],
        "pipelining": pipelining,
        "global_step": step,
        "samples_seen": step * args.batch_size,
        "train_seconds": train_seconds,
        "samples_per_second": step * args.batch_size / train_seconds,
        "num_processes": accelerator.num_processes,
        "peak_memory_bytes": report.memory_bytes(accelerator.device),
        "peak_memory_bytes_per_stage": [report.memory_bytes(device) for device in devices],
        "resumed_from": resumed_from,
    }
    if accelerator.is_main_process:
        config = {"model": "model_parallel", "width": args.width, "class_names": data.class_names}
        weights.export(run.path / "model.safetensors", accelerator.unwrap_model(model), config)
        plots.curves(run.path)
        run.finish(results)
        print(report.summary(results, run.path, "done"))
    accelerator.wait_for_everyone()  # a scheduler may end the other machines once one has left
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("model and training")
    at_least_1 = number(int, 1)
    group.add_argument("--devices_per_process", type=at_least_1, default=2, help="stages the network is cut into")
    group.add_argument("--micro_batches", type=at_least_1, default=4, help="parts of a batch on their way through the stages")
    group.add_argument("--width", type=number(int, 8), default=64, help="channels of the first blocks, a multiple of 8")
    group.add_argument("--epochs", type=at_least_1, default=10, help="passes over the training set")
    group.add_argument("--max_train_steps", type=at_least_1, help="optimizer steps; wins over --epochs")
    group.add_argument("--batch_size", type=at_least_1, default=512, help="samples per optimizer step over all processes")
    group.add_argument("--gradient_accumulation_steps", type=at_least_1, default=1, help="batches per optimizer step")
    group.add_argument("--lr", type=number(float, 0), default=1e-3, help="peak learning rate")
    group.add_argument("--weight_decay", type=number(float, 0), default=0.05, help="AdamW's")
    add_run_arguments(parser, "runs/train_model_parallel")
    add_data_arguments(parser, "uoft-cs/cifar10", "Hub id or local folder of a 32x32 image data set, or `synthetic`")
    args = parser.parse_args()
    if args.devices_per_process > 8 or args.width % 8:
        raise UserError("--devices_per_process is at most 8, the number of blocks, and --width a multiple of 8")
    args.output_dir = scratch_name(args)
    if args.dry_run:
        args.max_train_steps, args.eval_every, args.checkpoint_every, args.log_every = 2, 1, 1, 1
    if args.overfit_batch:
        args.max_train_steps = args.max_train_steps or 200
    return args


if __name__ == "__main__":
    exits.run(main)
