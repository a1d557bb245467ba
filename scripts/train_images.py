"""Image classification on one's own pictures, of any size, with any classifier of torchvision, from scratch or fine-tuned.

The pictures stay encoded on disk. Workers decode and transform each of them with random numbers that follow from the seed, the
epoch and the picture, so this run can also be killed at any moment and continues exactly, with any number of workers.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_images.py --dataset synthetic \\
        --model resnet18 --image_size 32 --epochs 8 --batch_size 50 --lr 0.02 --min_scale 0.5 --auto_augment none
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_images.py --dataset my_photos
    accelerate launch --config_file accelerate_configs/1gpu.yaml scripts/train_images.py --dataset my_photos \\
        --preset finetune --weights DEFAULT
    python scripts/evaluate.py --checkpoint runs/train_images --images holiday/

`my_photos` has one sub-folder per class, or train/ and val/ with such sub-folders. Not run on a GPU yet.
"""

import argparse
import math
import os
import sys
from datetime import timedelta
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()  # before torch: a signal during the slow imports below must not be lost

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, broadcast, set_seed
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from utils import image_cache, plots, pretrained, report, topology, tracking, weights
from utils.arguments import Parser, number
from utils.augment import normalize
from utils.exits import UserError
from utils.files import write_text
from utils.guard import Guard
from utils.image_data import as_is
from utils.image_files import EpochSampler, EvalTransform, ImageBatches, TrainTransform, ending_workers
from utils.image_folder import load_pictures
from utils.mixing import Mix
from utils.plan import Plan
from utils.run_folder import RunFolder

# The defaults of each --preset; flags override them. `small` trains from scratch on hundreds of pictures. `torchvision` is the
# recipe of its references/classification for ResNet-50 (80.9 % on ImageNet there, 8 GPUs), without repeated augmentation.
PRESETS = {
    "scratch": dict(
        epochs=90, batch_size=256, optimizer="sgd", lr=0.2, weight_decay=5e-5, warmup_epochs=5, auto_augment="trivial"
    ),
    "finetune": dict(
        epochs=10, batch_size=64, optimizer="adamw", lr=2e-4, weight_decay=0.05, warmup_epochs=1, head_lr_multiplier=10,
        min_scale=0.35,
    ),
    "small": dict(
        model="resnet18", image_size=64, epochs=60, batch_size=16, optimizer="adamw", lr=5e-4, weight_decay=0.05,
        warmup_epochs=3, min_scale=0.35,
    ),
    "torchvision": dict(
        epochs=600, batch_size=1024, optimizer="sgd", lr=0.5, weight_decay=2e-5, warmup_epochs=5, auto_augment="trivial",
        random_erasing=0.1, mixup=0.2, cutmix=1.0, ema_decay=0.99998, train_size=176, image_size=224, eval_resize=232,
    ),
}  # fmt: skip
NO_DECAY = ("class_token", "pos_embedding", "position_bias_table", "layer_scale")  # besides norms and biases


def build_optimizer(model, args):
    """SGD with Nesterov momentum or AdamW; norms and biases have no weight decay, and the last layer its own learning rate."""
    groups, head = {}, pretrained.head(model) + "."
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = parameter.ndim > 1 and not name.endswith(NO_DECAY)
            groups.setdefault((name.startswith(head), decay), []).append(parameter)
    groups = [
        dict(params=parameters, lr=args.lr * (args.head_lr_multiplier if last else 1), weight_decay=args.weight_decay * decay)
        for (last, decay), parameters in groups.items()
    ]
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=args.lr, fused=True)
    return torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum, nesterov=args.momentum > 0, fused=True)


def build_ema(accelerator, model, decay):
    """The exponential moving average of all weights and statistics, saved with every checkpoint; None without a decay."""
    if not decay:
        return None
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    accelerator.register_for_checkpointing(ema)
    return ema


def lr_multiplier(step, plan, args):
    """The learning-rate multiplier at `step`: linear warm-up (at most a fifth of the run), then cosine, linear or no decay."""
    warmup = min(args.warmup_epochs * plan.steps_per_epoch, plan.total_steps / 5)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / (plan.total_steps - warmup))
    return {"cosine": 0.5 + 0.5 * math.cos(math.pi * progress), "linear": 1 - progress, "constant": 1.0}[args.lr_schedule]


# ------------------------------------------------------------------------------------------------- data, evaluation


def find_data(accelerator, args):
    """Finds the pictures on every machine, which must be the same, and shortens the splits for quick checks."""
    options = {name: getattr(args, name) for name in ("seed", "val_fraction", "image_column", "label_column")}
    data = topology.local_main_first(
        accelerator, lambda: load_pictures(args.dataset, index_folder=Path(args.cache_dir), **options)
    )
    everywhere = sorted(set(topology.gather(accelerator, data.description)))
    if len(everywhere) > 1:
        raise UserError(f"--dataset {args.dataset} differs between machines: {' against '.join(everywhere)}")
    args.pictures = data.description  # a run continues with the same pictures only
    if accelerator.is_main_process:
        fewest = min(len(pictures) for split, pictures in data.splits.items() if split != "train")
        print(f"data: {data.description}" + f"; one of {fewest} is {1 / fewest:.1%} of the held-out accuracy" * (fewest < 100))
    if args.overfit_batch:
        data.splits = dict.fromkeys(("train", "val"), data.splits["train"].spread(args.batch_size))
    elif args.dry_run:
        data.splits |= {split: pictures.spread(500) for split, pictures in data.splits.items() if split != "train"}
    for split, pictures in data.splits.items() if args.check_images else ():
        image_cache.check(accelerator, pictures, split, args.on_bad_image)
    return data


def build_loaders(accelerator, data, preprocess, args):  # EDIT: data
    """Builds loaders of global batches, one per split; `prepare` gives every process its share of each batch."""
    common = dict(collate_fn=as_is, worker_init_fn=exits.worker_init, num_workers=args.num_workers)
    common["pin_memory"] = accelerator.device.type == "cuda"
    train_size = args.train_size or preprocess["crop"]
    if args.cache:
        # A little more than the training size, and at least the size to which the evaluation resizes.
        side = max(preprocess["resize"], round(1.15 * train_size))
        options = (side, args.cache_dir, preprocess["interpolation"])
        data.splits = {split: image_cache.cached(accelerator, data.splits[split], split, *options) for split in data.splits}
    look = EvalTransform(preprocess)
    options = {name: getattr(args, name) for name in ("min_scale", "flip", "auto_augment", "random_erasing")}
    change = look if args.overfit_batch else TrainTransform(args.seed, train_size, preprocess, **options)
    # In training, the next picture replaces one that cannot be read, so that all batches are full.
    train_set = ImageBatches(data.splits["train"], change, args.on_bad_image, replace=True)
    training = dict(sampler=EpochSampler(len(train_set), args.batch_size, args.seed), drop_last=True)
    training["persistent_workers"] = args.persistent_workers and args.num_workers > 0
    loaders = {"train": DataLoader(train_set, args.batch_size // args.gradient_accumulation_steps, **training, **common)}
    for split in data.splits.keys() - {"train"}:
        dataset = ImageBatches(data.splits[split], look, args.on_bad_image)
        loaders[split] = DataLoader(dataset, topology.evaluation_batch(accelerator, len(dataset), 64), **common)
    return {split: accelerator.prepare(loaders[split]) for split in sorted(loaders)}


def epoch_batches(loaders, epoch, batches_done, bad):
    """Yields the remaining batches of `epoch`, and collects in `bad` (set) the ids of pictures that could not be read.

    Skipping needs another loader, with workers of its own; a whole epoch does not.
    """
    loader = loaders["train"]
    loader.set_epoch(epoch)
    if batches_done:
        loader = loaders["rest"] = skip_first_batches(loader, batches_done)
    for batch in loader:
        bad.update(batch.pop("bad"))
        yield batch


def of_all(accelerator, ids):
    """The ids (set) of all processes, sorted."""
    return sorted(set().union(*topology.gather(accelerator, ids)))


def compute_loss(model, batch, mean, std, mix, step, args):  # EDIT: loss
    """The mean loss of a micro-batch. Mixup and CutMix follow from the seed, the step and the positions in the global batch."""
    images, labels = normalize(batch["images"], mean, std), batch["labels"]
    if mix:
        images, labels = mix(images, labels, step)
    return F.cross_entropy(model(images), labels, label_smoothing=args.label_smoothing)


@torch.no_grad()
def evaluate(accelerator, model, ema, loader, mean, std):  # EDIT: metric
    """Computes exact metrics over a split: each picture counts once, on any number of processes.

    Args:
        ema (AveragedModel | None): evaluate these weights instead of those of `model`.

    Returns:
        tuple[dict, dict]: `loss`, `accuracy`, `top5` (of 5 or more classes); and of each picture, in the order of the data:
        `labels`, `predictions`, int64, and `losses`, float32. An unreadable picture has the label -1 and does not count.
    """
    if ema and accelerator.num_processes > 1:
        for buffer in ema.buffers():
            broadcast(buffer)  # the statistics of batch norm: as in DDP, those of the first process
    evaluated = ema.module if ema else model
    evaluated.eval()
    parts = []
    for batch in loader:
        with accelerator.autocast():
            outputs = evaluated(normalize(batch["images"], mean, std)).float()
        losses = F.cross_entropy(outputs, batch["labels"], reduction="none", ignore_index=-1)
        top = outputs.topk(min(5, outputs.shape[1])).indices
        # Gather per batch and per sample: gather_for_metrics then drops the samples repeated to fill up the last batch.
        gathered = accelerator.gather_for_metrics((batch["ids"], batch["labels"], losses, top))
        parts.append([value.cpu() for value in gathered])
    if not ema:
        pretrained.train(model)
    ids, labels, losses, top = (torch.cat(values) for values in zip(*parts, strict=True))
    if not torch.equal(ids, torch.arange(len(loader.dataset))):
        raise RuntimeError(f"evaluated {len(ids)} of {len(loader.dataset)} pictures, or not in order")
    counts, hits = labels >= 0, top == labels[:, None]
    shares = {"loss": losses[counts], "accuracy": hits[counts, 0]} | ({"top5": hits[counts].any(1)} if top.shape[1] > 4 else {})
    figures = {name: values.double().mean().item() for name, values in shares.items()}
    return figures, {"labels": labels, "predictions": top[:, 0], "losses": losses}


def write_outputs(run, config, model, ema, data, split, details, bad):
    """Writes the weights and the pictures of a run; main process only. Returns pictures for the trackers."""
    weights.export(run.path, ema.module if ema else model, config)
    if ema:
        (run.path / "without_ema").mkdir(exist_ok=True)
        weights.export(run.path / "without_ema", model, config)
    if bad:
        write_text(run.path / "bad_images.txt", "".join(f"{name}\n" for name in bad))
        run.print(f"{len(bad)} pictures could not be read and were left out: see {run.path / 'bad_images.txt'}")
    plots.curves(run.path)
    dataset = ImageBatches(data.splits[split], EvalTransform(config["preprocessing"]), "skip")
    return plots.of_pictures(run.path, dataset, details, data.class_names)


# ------------------------------------------------------------------------------------------------------------- main

MAY_CHANGE = ("cache_dir", "check_images", "on_bad_image", "persistent_workers")


def main():
    args = parse_args()
    # --batch_size is global: each batch is split over the processes, so every topology sees the same batches in the same order.
    loading = DataLoaderConfiguration(split_batches=True, non_blocking=True)
    accelerator = Accelerator(
        cpu=topology.check_launch(training=True),
        dataloader_config=loading,
        gradient_accumulation_plugin=GradientAccumulationPlugin(args.gradient_accumulation_steps, sync_with_dataloader=False),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))],
        log_with=tracking.trackers(args.track),
        project_dir=f"{args.output_dir}/tensorboard",
    )
    together = topology.print_banner(accelerator, args.batch_size, args.gradient_accumulation_steps)
    if (args.mixup or args.cutmix) and together % 2:
        raise UserError(f"Mixup and CutMix mix pairs: {together} samples per process and micro-batch cannot be paired")
    data = find_data(accelerator, args)
    held_out = "val" if "val" in data.splits else "test"
    plan = Plan.from_args(args, len(data.splits["train"]))
    run = RunFolder(args, accelerator, MAY_CHANGE)
    run.open(plan)  # the folder is empty, or has a run to continue, or a finished run
    if run.finished:
        return

    set_seed(args.seed)
    start_from = None if run.progress else args.weights
    sizes = (args.image_size, args.eval_resize)
    config = run.progress.get("config") or topology.run_on_main(
        accelerator, lambda: pretrained.describe(args.model, start_from, data.class_names, *sizes)
    )
    model = pretrained.build(config).to(memory_format=torch.channels_last)  # EDIT: model
    pretrained.initialize(accelerator, model, config, start_from)
    pretrained.train(pretrained.freeze(model) if args.freeze else model)
    if args.compile:
        model.compile()  # in place: torch.compile(model) would add its prefix to every parameter name in a checkpoint
    optimizer = build_optimizer(model, args)
    model = topology.sync_batch_norm(accelerator, model, together, args.sync_batchnorm)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_multiplier(step, plan, args))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loaders = build_loaders(accelerator, data, config["preprocessing"], args)
    plain = accelerator.unwrap_model(model)
    ema = build_ema(accelerator, plain, args.ema_decay)
    mean, std = (255 * torch.tensor(config["preprocessing"][name]).to(accelerator.device) for name in ("mean", "std"))
    mix = Mix(args.mixup, args.cutmix, len(data.class_names), args.seed) if args.mixup or args.cutmix else None
    size = loaders["train"].dataset.size
    topology.set_up_ddp(accelerator, model, torch.randn(2, 3, size, size, device=accelerator.device))
    step = run.start(scheduler)  # accelerator.load_state, if there is a checkpoint
    guard = Guard(accelerator, args.timeout)
    train_loss, evaluated, bad = math.inf, None, set(run.progress.get("bad", ()))
    with ending_workers(loaders), report.profiler(accelerator, run.path, args.profile) as profiler:
        for epoch, todo in plan.epochs(start=step):
            batches = epoch_batches(loaders, epoch, todo.batches_done, bad)
            for step, micro_batches in todo.steps(run.timed(batches)):
                losses, ids, norm = [], [], None
                for batch in micro_batches:
                    # Makes a restart draw the same dropout masks. Seeds after loading the batch, which may draw numbers too.
                    topology.seed_step(accelerator, args.seed, step, len(losses))
                    with accelerator.accumulate(model):
                        loss = compute_loss(model, batch, mean, std, mix, step, args)
                        accelerator.backward(loss)
                        if accelerator.sync_gradients and args.max_grad_norm:
                            norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    losses.append(loss.detach())
                    ids.append(batch["ids"])
                if ema:
                    ema.update_parameters(plain)
                profiler.step()
                stop = guard.should_stop(step, losses, ids, norm)  # the same answer on every process
                if plan.log_due(step):
                    train_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()  # one loss, not one per rank
                    run.log("train", step, loss=train_loss, grad_norm=norm, lr=scheduler.get_last_lr()[0])
                if plan.evaluation_due(step):
                    evaluated = evaluate(accelerator, model, ema, loaders[held_out], mean, std)
                    run.log(held_out, step, score=evaluated[0]["accuracy"], **evaluated[0])
                if stop or plan.save_due(step, improved=run.improved_at(step)):
                    guard.check(model)  # a checkpoint never holds a diverged model
                    with run.checkpoint(step, config=config, bad=of_all(accelerator, bad)) as folder:
                        accelerator.save_state(folder)
                if stop and step < plan.total_steps:
                    run.exit_preempted(step)
            if args.overfit_batch and train_loss < 0.01:
                break

    if evaluated is None or step < plan.total_steps:  # resumed after the last step, or --overfit_batch ended early
        evaluated = evaluate(accelerator, model, ema, loaders[held_out], mean, std)
    results = {f"{held_out}_{name}": value for name, value in evaluated[0].items()}
    if held_out == "val" and "test" in loaders:
        tested, _ = evaluate(accelerator, model, ema, loaders["test"], mean, std)
        results |= {f"test_{name}": value for name, value in tested.items()}
    bad = [("train", i) for i in of_all(accelerator, bad)]
    bad += [(held_out, i) for i in (evaluated[1]["labels"] < 0).nonzero()[:, 0].tolist()]
    results |= {"bad_images": len(bad), "per_class": plots.class_accuracy(evaluated[1], data.class_names)}
    if accelerator.is_main_process:
        bad = [data.splits[split].name(i) for split, i in bad]
        pictures = write_outputs(run, config, plain, ema, data, held_out, evaluated[1], bad)
        tracking.log_images(accelerator, pictures, step)
    run.finish(step, next_command=f"python scripts/evaluate.py --checkpoint {run.path} --images FOLDER", **results)
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    share, positive = number(float, 0, below=1), number(int, 1)
    group = parser.add_argument_group("model and training (the defaults shown are those of the chosen --preset)")
    group.add_argument("--preset", choices=PRESETS, default="scratch", help="defaults; small: for hundreds of pictures")
    group.add_argument("--model", default="resnet50", help="any classifier of torchvision, by its name there")
    group.add_argument(
        "--weights",
        metavar="NAME|PATH",
        help="start with these: a name of torchvision (DEFAULT, IMAGENET1K_V1), a .pth or .safetensors file, or a run's folder",
    )
    group.add_argument("--freeze", action="store_true", help="train the last layer only")
    group.add_argument("--head_lr_multiplier", type=number(float, 0), default=1.0, help="factor of --lr for the last layer")
    parser.add_training_arguments(group)
    parser.add_optimizer_arguments(group)
    group.add_argument("--optimizer", choices=["sgd", "adamw"], help="update rule")
    group.add_argument("--momentum", type=share, default=0.9, help="of SGD")
    group.add_argument("--lr_schedule", choices=["cosine", "linear", "constant"], default="cosine", help="after warm-up")
    group.add_argument("--warmup_epochs", type=number(float, 0), help="epochs of warm-up, at most a fifth of all")
    group.add_argument("--label_smoothing", type=share, default=0.1, help="label smoothing; 0: none")
    group.add_argument("--ema_decay", type=share, default=0.0, help="decay of averaged weights, to evaluate; 0: none")
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group.add_argument("--sync_batchnorm", action="store_true", help="batch norm over all processes; on GPUs")
    group = parser.add_argument_group("pictures")
    group.add_argument("--image_size", type=positive, help="pixels of the model's input; default: that of --weights, or 224")
    group.add_argument("--train_size", type=positive, help="pixels of the input in training; default: --image_size")
    group.add_argument("--eval_resize", type=positive, help="shorter side before center crop; default: 8/7 --image_size")
    group.add_argument("--min_scale", type=number(float, 0, above=True), default=0.08, help="least area of a crop, as a share")
    group.add_argument("--flip", type=number(float, 0), default=0.5, help="probability of a mirror image")
    group.add_argument("--auto_augment", choices=["none", "trivial", "rand"], default="none", help="Trivial- or RandAugment")
    group.add_argument("--random_erasing", type=share, default=0.0, help="probability of random erasing")
    group.add_argument("--mixup", type=number(float, 0), default=0.0, help="alpha of Mixup; 0: none")
    group.add_argument("--cutmix", type=number(float, 0), default=0.0, help="alpha of CutMix; with both, a step has one")
    parser.add_run_arguments()
    parser.add_data_arguments(None, "folder with a sub-folder per class, Hub id, or `synthetic`")
    group = parser.add_argument_group("data set")
    part = number(float, 0, above=True, below=1)
    group.add_argument("--val_fraction", type=part, default=0.1, help="held-out share of each class, without a val split")
    group.add_argument("--image_column", help="of a Hub data set; default: the only one")
    group.add_argument("--label_column", help="of a Hub data set; default: the only one")
    group.add_argument("--check_images", action="store_true", help="read every picture before training")
    group.add_argument("--on_bad_image", choices=["stop", "skip"], default="stop", help="what to do if one cannot be read")
    group.add_argument("--cache", action="store_true", help="scale all pictures once, and keep them in --cache_dir")
    cache_dir = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "train_images"
    group.add_argument("--cache_dir", default=str(cache_dir), help="on a disk of each machine")
    keep = argparse.BooleanOptionalAction
    group.add_argument("--persistent_workers", action=keep, default=True, help="keep workers between epochs")
    parser.set_defaults(num_workers=min(8, image_cache.cores_per_process()), **PRESETS.get(parser.choice("preset"), {}))
    args = parser.parse_training_args()
    pretrained.check_name(args.model)
    if args.weights and args.init_from:
        raise UserError("--weights and --init_from both name weights to start with: give only one of them")
    args.weights = args.weights or args.init_from
    if args.weights and (Path(args.weights).exists() or args.weights.endswith(pretrained.SUFFIXES)):
        args.weights = str(Path(args.weights).resolve())
    if args.overfit_batch:
        args.lr_schedule, args.label_smoothing, args.mixup, args.cutmix, args.ema_decay = "constant", 0.0, 0.0, 0.0, 0.0
    return args


if __name__ == "__main__":
    exits.run(main)
