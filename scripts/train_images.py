"""Image classification on your own images, of any size, with any torchvision classifier.

Trains from scratch, or fine-tunes weights from torchvision, a file or an earlier run.

The images stay encoded on disk. Workers decode and transform them; the random numbers for an image
depend only on the seed, the epoch and the image. A run can therefore be killed at any moment and
continues exactly, with any number of workers.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_images.py \\
        --dataset synthetic --preset small --image_size 32 --epochs 8
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_images.py \\
        --dataset my_photos
    accelerate launch --config_file accelerate_configs/1gpu.yaml scripts/train_images.py \\
        --dataset my_photos --preset finetune --model resnet50 --weights DEFAULT
    python scripts/evaluate.py runs/train_images --images holiday/

`my_photos` has one sub-folder per class, or train/ and val/ with such sub-folders. To change
what has no flag, such as the warm-up, edit `PRESETS` in a copy of this script.
"""

import math
import sys
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
from torch.utils.data import DataLoader

from utils import flags, schedule
from utils.compilation import compile_model
from utils.data import evaluation
from utils.data.loaders import EpochSampler, end_workers, explain, fit_batch_size, loader_options
from utils.data.sharing import agree, evaluation_batch_size, local_main_first
from utils.images import classifier_plots, pretrained, scores
from utils.images.augment import normalize
from utils.images.sources import find_images
from utils.images.transforms import EvalTransform, ImageBatches, TrainTransform
from utils.report import model_card, plots
from utils.report.model_card import for_markdown
from utils.report.tracking import Trackers, start_profiler
from utils.run import ddp, devices, entry, files, launch
from utils.run.arguments import Parser, frozen, number
from utils.run.collectives import run_on_main
from utils.run.ddp import seed_step
from utils.run.failures import UserError
from utils.run.folder import RunFolder
from utils.run.guard import Guard
from utils.run.output import notice
from utils.run.plan import Plan
from utils.scale import batch_norm, elastic
from utils.scale.saving import BackgroundWriter
from utils.scale.watchdog import Watchdog

# What has no flag, where a preset does not set it. The last layer learns at `head_lr_multiplier`
# times --lr. A crop has at least the share `min_scale` of an image.
COMMON = dict(
    momentum=0.9, head_lr_multiplier=1.0, warmup_epochs=5, label_smoothing=0.1, min_scale=0.08,
)  # fmt: skip
# The defaults of each --preset; flags override those that have one. `small` trains from scratch on
# hundreds of images.
PRESETS = {  # EDIT: defaults
    "scratch": dict(
        epochs=90, batch_size=256, optimizer="sgd", lr=0.2, weight_decay=5e-5,
        auto_augment="trivial",
    ),
    "finetune": dict(
        epochs=10, batch_size=64, optimizer="adamw", lr=2e-4, weight_decay=0.05, warmup_epochs=1,
        head_lr_multiplier=10, min_scale=0.35,
    ),
    "small": dict(
        epochs=60, batch_size=16, optimizer="adamw", lr=5e-4, weight_decay=0.05, warmup_epochs=3,
        model="resnet18", image_size=64, min_scale=0.35,
    ),
}  # fmt: skip
# Parameters without weight decay, in addition to norms and biases.
NO_DECAY = ("class_token", "pos_embedding", "position_bias_table", "layer_scale")


def build_optimizer(model, args):
    """SGD with Nesterov momentum, or AdamW.

    Norms and biases have no weight decay. The last layer has its own learning rate.
    """
    groups, head = {}, pretrained.head(model) + "."
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = parameter.ndim > 1 and not name.endswith(NO_DECAY)
            groups.setdefault((name.startswith(head), decay), []).append(parameter)
    groups = [
        dict(
            params=parameters,
            lr=args.lr * (args.head_lr_multiplier if last else 1),
            weight_decay=args.weight_decay * decay,
        )
        for (last, decay), parameters in groups.items()
    ]
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=args.lr, fused=True)
    return torch.optim.SGD(
        groups, lr=args.lr, momentum=args.momentum, nesterov=args.momentum > 0, fused=True
    )


def lr_multiplier(step, plan, args):
    """The learning-rate multiplier at `step`; the warm-up takes at most a fifth of the run."""
    warmup = min(args.warmup_epochs * plan.steps_per_epoch, plan.total_steps / 5)
    return schedule.multiplier(args.lr_schedule, step, plan.total_steps, warmup)


def build_scheduler(optimizer, plan, args):
    """Multiplies each learning rate by `lr_multiplier` after each step."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_multiplier(step, plan, args)
    )


# -------------------------------------------------------------------------------- data, evaluation


def load_data(accelerator, args):  # EDIT: data
    """Finds the images, which must be the same on every machine.

    Returns `ImageSplits`, whose description has a checksum: a run continues with the same images.
    """
    options = dict(seed=args.seed, val_fraction=args.val_fraction, columns=args.columns)
    data = local_main_first(accelerator, lambda: find_images(args.dataset, **options))
    if "val" not in data.splits:
        raise UserError("there are no validation images: give --val_fraction 0.1, say")
    fewest = min(len(images) for split, images in data.splits.items() if split != "train")
    if fewest < 100:
        data.details.append(f"only {fewest} held-out images: each is {1 / fewest:.1%} of accuracy")
    agree(accelerator, args.dataset, data)
    return data


def fit_batch(accelerator, data, args):
    """Divides the global batch, of a size that fits the data; shortens these for quick checks.

    Returns the arguments, with that batch size, and the samples per process and micro-batch.
    """
    power = 1 if args.optimizer == "sgd" else 0.5
    args = fit_batch_size(args, len(data.splits["train"]), power)
    accumulation = args.gradient_accumulation_steps
    micro_batch_size = elastic.divide_batch(accelerator, args.batch_size, accumulation)
    if args.overfit_batch:
        batch = data.splits["train"].subsample(args.batch_size)
        data.splits = {"train": batch, "val": batch}
    elif args.dry_run:
        for split in data.splits.keys() - {"train"}:
            data.splits[split] = data.splits[split].subsample(500)
    return args, micro_batch_size


def build_loaders(accelerator, data, preprocess, eval_samples, plan, args):
    """Builds loaders of global batches, one per split; `prepare` splits each over the processes.

    Another is `sample`, `eval_samples` of the validation images. Held-out splits in `data` are
    shortened to what the last evaluation takes.
    """
    options = loader_options(accelerator, args.num_workers, args.timeout)
    eval_transform = train_transform = EvalTransform(preprocess)
    if not args.overfit_batch:
        train_transform = TrainTransform(
            args.seed,
            preprocess,
            min_scale=args.min_scale,
            flip=args.flip,
            auto_augment=args.auto_augment,
        )
    # In training, the next image replaces one that cannot be read, so that all batches are full.
    train_set = ImageBatches(data.splits["train"], train_transform, args.on_bad_image, replace=True)
    train_loader = DataLoader(
        train_set,
        args.batch_size // args.gradient_accumulation_steps,
        sampler=EpochSampler(len(train_set), args.batch_size, args.seed, with_epoch=True),
        drop_last=True,
        persistent_workers=args.num_workers > 0,
        **options,
    )
    loaders = {"train": accelerator.prepare(train_loader)}
    sample = evaluation.choose(data.splits["val"], eval_samples, args.seed)
    for split, images in {**data.splits, "sample": sample}.items():
        if split == "train":
            continue
        if split != "sample":
            last = evaluation.count_last(plan, args, len(images))
            data.splits[split] = images = evaluation.choose(images, last, args.seed)
        dataset = ImageBatches(images, eval_transform, args.on_bad_image)
        batch_size = evaluation_batch_size(accelerator, len(dataset), 64)
        loaders[split] = accelerator.prepare(DataLoader(dataset, batch_size, **options))
    return loaders


def blank_batch(size, device):
    """Two black images of `size` pixels, for a first forward pass."""
    images = torch.zeros(2, 3, size, size, dtype=torch.uint8, device=device)
    return {"images": images, "labels": torch.zeros(2, dtype=torch.int64, device=device)}


def class_weights(data, device, args):
    """Weights of the classes with which each counts as much in the mean loss as the others.

    Returns:
        float32 [classes]: inverse to the number of images; the mean weight of a training image is
        1. None: `--class_weights none`.
    """
    if args.class_weights == "none":
        return None
    labels, classes = data.splits["train"].labels, len(data.class_names)
    counts = torch.from_numpy(labels).bincount(minlength=classes).clamp(min=1)
    return (len(labels) / (classes * counts)).float().to(device)


def compute_loss(model, batch, mean, std, args, balance=None):  # EDIT: loss
    """The mean loss of a micro-batch.

    With class weights (`balance`), the sum of the weighted losses is divided by the
    number of images and not by the sum of their weights, which would weigh an image by the others
    on its process.
    """
    images, labels = normalize(batch["images"], mean, std), batch["labels"]
    options = dict(weight=balance, label_smoothing=args.label_smoothing, reduction="sum")
    return F.cross_entropy(model(images), labels, **options) / len(labels)


@torch.no_grad()
def evaluate(accelerator, model, loader, watch, mean, std):  # EDIT: metric
    """Computes exact metrics of a split: each image counts once, on any number of processes.

    Args: watch: `guard.watch`, with which a signal ends the evaluation.

    Returns:
        tuple: what `scores.summarize` returns; and a dict with one value per image, in the order of
        the data: `labels` and `predictions`, int64, and `losses`, float32. An unreadable image has
        the label -1 and does not count.
    """
    model.eval()
    parts = []
    for batch in watch(loader):
        with accelerator.autocast():
            outputs = model(normalize(batch["images"], mean, std)).float()
        losses = F.cross_entropy(outputs, batch["labels"], reduction="none", ignore_index=-1)
        top = outputs.topk(min(5, outputs.shape[1])).indices
        # Gather per batch and per sample: gather_for_metrics then drops the samples that were
        # repeated to fill up the last batch.
        gathered = accelerator.gather_for_metrics((batch["ids"], batch["labels"], losses, top))
        parts.append([value.cpu() for value in gathered])
    pretrained.train(model)
    ids, labels, losses, top = (torch.cat(values) for values in zip(*parts, strict=True))
    if not torch.equal(ids, torch.arange(len(loader.dataset))):
        raise RuntimeError(f"evaluated {len(ids)} of {len(loader.dataset)} images, or not in order")
    metrics = scores.summarize(labels, losses, top)
    return metrics, {"labels": labels, "predictions": top[:, 0], "losses": losses}


def final_results(accelerator, model, loaders, watch, mean, std):
    """Evaluates each held-out split; returns all metrics, and the values per image of `val`."""
    results, samples = {}, None
    for split in ("test", "val"):
        if split in loaders:
            metrics, samples = evaluate(accelerator, model, loaders[split], watch, mean, std)
            results |= {f"{split}_{name}": value for name, value in metrics.items()}
    return results, samples


def write_outputs(run, config, data, samples):
    """Writes the plots of a run; main process only. Returns images for the trackers (dict)."""
    smoothed = run.record["arguments"]["label_smoothing"]
    plots.curves(run.path, {"loss": "loss (training: with label smoothing)"} if smoothed else {})
    dataset = ImageBatches(data.splits["val"], EvalTransform(config["preprocessing"]), "skip")
    return classifier_plots.of_images(run.path, dataset, samples, data.class_names)


USAGE = """```python
import torch
import torchvision
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torchvision.transforms import v2

model = torchvision.models.get_model("{model}", num_classes={classes}).eval()
model.load_state_dict(load_file("model.safetensors"))
preprocess = v2.Compose([
    v2.Resize({resize}, v2.InterpolationMode("{interpolation}"), antialias=True),
    v2.CenterCrop({crop}),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize({mean}, {std}),
])
image = ImageOps.exif_transpose(Image.open("image.jpg")).convert("RGB")
x = preprocess(v2.functional.pil_to_tensor(image))
probabilities = model(x[None]).softmax(1)[0]  # of the classes above
```"""


def describe_model(config):
    """What the model card says about a model, for `model_card.write`."""
    names = config["class_names"]
    values = dict(model=config["model"], classes=len(names))
    more = f" and {len(names) - 50} more" if len(names) > 50 else ""
    return {
        "title": f"{config['model']}, {len(names)} classes",
        "library": "torchvision",
        "task": "image-classification",
        "about": f"Classes: {', '.join(map(for_markdown, names[:50]))}{more}.",
        "usage": USAGE.format(**values, **config["preprocessing"]),
    }


# -------------------------------------------------------------------------------------------- main

MAY_CHANGE = flags.MAY_CHANGE | {"on_bad_image"}


def describe_start(accelerator, start_from, data, args):
    """The config of a new model (dict): its architecture, classes and preprocessing."""

    def find_out():
        return pretrained.preprocessing(pretrained.find(args.model, start_from), args.image_size)

    preprocessing = run_on_main(accelerator, find_out)
    names = list(data.class_names)
    return dict(model=args.model, class_names=names, preprocessing=preprocessing)


def main():
    args = parse_args()
    on_cpu = launch.set_up(args)  # network, threads, deterministic algorithms
    trackers = Trackers(args)
    accelerator = Accelerator(cpu=on_cpu, **launch.accelerator_options(args), **trackers.options())
    launch.print_banner(accelerator)
    data = load_data(accelerator, args)
    args, micro_batch_size = fit_batch(accelerator, data, args)
    plan = Plan.from_args(args, len(data.splits["train"]))
    writer = None if args.wait_for_checkpoints else BackgroundWriter(accelerator)
    run = RunFolder(args, accelerator, MAY_CHANGE, [trackers], writer)
    run.open(plan, data=data.description)  # has a run to continue, a finished one, or none
    if run.finished:
        return
    eval_samples = evaluation.count_evaluated(run, plan, args, len(data.splits["val"]))
    set_seed(args.seed)
    start_from = None if run.progress else args.weights  # a run that continues has its own
    config = run.progress.get("config") or describe_start(accelerator, start_from, data, args)
    model = pretrained.build(config).to(memory_format=torch.channels_last)  # EDIT: model
    pretrained.initialize(accelerator, model, config, start_from)
    pretrained.train(pretrained.freeze(model) if args.freeze else model)
    compile_model(accelerator, [model], args.compile)
    optimizer = build_optimizer(model, args)
    batch_norm.check(accelerator, model, micro_batch_size)
    scheduler = build_scheduler(optimizer, plan, args)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    batch_norm.broadcast_less(model)
    held_out = len(data.splits["val"])
    loaders = build_loaders(accelerator, data, config["preprocessing"], eval_samples, plan, args)
    mean, std = pretrained.colors(config, accelerator.device)
    balance = class_weights(data, accelerator.device, args)
    first = blank_batch(loaders["train"].dataset.size, accelerator.device)
    ddp.warm_up(model, lambda: compute_loss(model, first, mean, std, args))
    step = run.start()  # accelerator.load_state, if there is a checkpoint
    schedule.recompute(scheduler)  # the run may have another length now
    guard = Guard(accelerator, args.timeout)
    watchdog = Watchdog(run, guard, accelerator, model, args.timeout)
    progress = evaluation.Progress(accelerator, guard.watch)

    def validate(step):
        metrics, _ = evaluate(accelerator, model, loaders["sample"], progress, mean, std)
        run.log("val", step, score=scores.score(metrics, args.score), **metrics)

    train_loss = math.inf
    saved = dict(config=config, eval_samples=eval_samples)  # with each checkpoint
    if run.evaluation_due:  # the run was stopped in it
        validate(step)
    profile = start_profiler(accelerator, run.path, args.profile)
    for epoch, remaining in plan.epochs(start=step, done=run.best.out_of_patience):
        loaders["train"].set_epoch(epoch)
        batches = loaders["rest"] = remaining.rest(loaders["train"])  # not those before a restart
        for step, micro_batches in remaining.accumulated(run.timed(batches)):
            losses, ids, norm = [], [], None
            for batch in micro_batches:
                # A restart draws the same dropout masks. After loading, which may draw, too.
                seed_step(accelerator, args.seed, step, len(losses))
                with accelerator.accumulate(model):
                    loss = compute_loss(model, batch, mean, std, args, balance)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and args.max_grad_norm:
                        norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
                ids.append(batch["ids"])
            profile.step()
            stop = guard.should_stop(step, losses, ids, norm)  # the same on every process
            if plan.log_due(step):  # one loss, not one per process
                train_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                figures = dict(loss=train_loss, grad_norm=norm, lr=scheduler.get_last_lr()[0])
                run.log("train", step, **figures, **watchdog.figures())
            if stop or run.save_due(step):
                with run.checkpoint(step, guard, model, **saved) as folder:
                    accelerator.save_state(folder)
            if stop:
                run.exit_preempted(step)
            if plan.evaluation_due(step):
                validate(step)  # a signal ends it at once: the restart evaluates
        if args.overfit_batch and train_loss < 0.01:
            break
    profile.stop()
    end_workers(loaders)

    plain = accelerator.unwrap_model(model)
    run_on_main(accelerator, lambda: files.write_weights(run.path, plain, config))
    counts = progress.announce(len(data.splits["val"]), held_out, run.path)
    results, samples = final_results(accelerator, model, loaders, progress, mean, std)
    results |= scores.per_class(samples["labels"], samples["predictions"], data.class_names)
    run.finish(step, **results, **counts)
    if accelerator.is_main_process:
        model_card.write(run, **describe_model(config))
        trackers.log_images(write_outputs(run, config, data, samples), step)
    run.close(model_card.command("evaluate.py", run.path, "--images", "FOLDER"))
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        required=True,
        help="folder with a sub-folder per class, Hub id, or `synthetic`",
    )
    flags.add(group, "num_workers", "val_fraction", "columns", val_fraction=0.1)
    group.add_argument(
        "--on_bad_image",
        choices=["stop", "skip"],
        default="stop",
        help="what to do with an image that cannot be read",
    )
    group = parser.add_argument_group(
        "model and training (the defaults shown are those of the chosen --preset)"
    )
    group.add_argument(
        "--preset",
        choices=PRESETS,
        default="scratch",
        help="defaults, which --preset NAME --help shows, and what has no flag (PRESETS in the "
        "script); finetune: with --weights; small: for hundreds of images",
    )
    group.add_argument("--model", default="resnet50", help="name of any classifier of torchvision")
    group.add_argument(
        "--weights",
        metavar="NAME|PATH",
        help="fine-tune these: weights of torchvision by name (DEFAULT, IMAGENET1K_V1), a .pth or "
        ".safetensors file, or a run's folder; the last layer may have other classes",
    )
    group.add_argument("--freeze", action="store_true", help="train the last layer only")
    parser.add_training_arguments(group)
    flags.add(group, *flags.OPTIMIZER, "lr_schedule", "compile", lr_schedule="cosine")
    group.add_argument("--optimizer", choices=["sgd", "adamw"], help="update rule")
    group.add_argument(
        "--class_weights",
        choices=["none", "balanced"],
        default="none",
        help="balanced: every class counts equally in the loss",
    )
    group.add_argument(
        "--score",
        choices=["accuracy", "balanced_accuracy", "macro_f1", "loss"],
        default="accuracy",
        help="held-out metric for the best checkpoint and for --patience",
    )
    group = parser.add_argument_group("size and augmentation of the images")
    group.add_argument(
        "--image_size",
        type=number(int, 8, most=4096),  # some models need more: `pretrained.check_size`
        help="pixels of the model's input; default: that of --weights, or 224",
    )
    group.add_argument(
        "--flip", type=number(float, 0, most=1), default=0.5, help="probability of a mirror image"
    )
    group.add_argument(
        "--auto_augment",
        choices=["none", "trivial", "rand"],
        default="none",
        help="Trivial- or RandAugment",
    )
    group = parser.add_run_arguments()
    flags.add(group, "patience", "eval_samples", *flags.EXTRAS)
    preset = PRESETS.get(flags.choice(parser, "preset"), {})
    parser.set_defaults(num_workers=min(8, devices.cores_per_process()), **COMMON | preset)
    args = flags.parse_with_checks(parser)
    if args.preset == "finetune" and not args.weights and process.is_main():
        notice("--preset finetune without --weights: the network starts with random weights")
    pretrained.check_name(args.model)
    if args.image_size:
        pretrained.check_size(args.model, args.image_size)
    # A path also if nothing is there any more: a run that continues does not read it.
    weights = args.weights or ""
    if "/" in weights or weights.endswith(pretrained.SUFFIXES) or Path(weights or " ").exists():
        args.weights = str(Path(weights).resolve())
    if args.overfit_batch:
        args.lr_schedule, args.label_smoothing = "constant", 0.0
    return frozen(args)


if __name__ == "__main__":
    entry.run(main, explain)
