"""Image classification on CIFAR-10: the main template.

Shows one hand-written loop that runs unchanged on a laptop, one GPU, many GPUs and many machines.
It can be killed at any moment: run the same command again to continue from the last checkpoint.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_cifar.py \\
        --dataset synthetic
    accelerate launch --config_file accelerate_configs/1gpu.yaml scripts/train_cifar.py
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_cifar.py
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_cifar.py \\
        --model resnet18

Measured on 2026-11-22 on 2 cores of an AMD EPYC (Zen 3) in float32, one run, on CIFAR-10 images
re-encoded as JPEG, with --batch_size 500, after 14 epochs in 62 minutes: 89.7 % test accuracy, and
91.0 % with evaluate.py --tta. airbench94, published with 94 % on the original images, has 90.8 %.
"""

import math
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
from utils.compilation import compile_model
from utils.data.sharing import agree, evaluation_batch_size, local_main_first
from utils.images import classifier_plots
from utils.images.arrays import load_arrays, on_device
from utils.images.augment import augment, cut_out, normalize
from utils.muon import MuonSGD
from utils.report import model_card, plots
from utils.report.model_card import for_markdown
from utils.report.tracking import Trackers, start_profiler
from utils.run import ddp, entry, files, launch
from utils.run.arguments import Parser, frozen, number
from utils.run.ddp import seed_step
from utils.run.failures import UserError
from utils.run.folder import RunFolder
from utils.run.guard import Guard
from utils.run.plan import Plan
from utils.scale import batch_norm, elastic
from utils.scale.saving import BackgroundWriter
from utils.scale.watchdog import Watchdog

# The defaults of each model; flags override those that have one. 480 is divisible by the usual
# numbers of GPUs: 1 to 6, 8, 10, 12, 16, 20, 24. `warmup`: fraction of the steps in which the
# learning rate rises. `padding`: largest random shift, and `cutout`: side of the painted square, in
# pixels.
RECIPES = {
    "fastnet": dict(
        epochs=14, batch_size=480, lr=0.12, momentum=0.85, weight_decay=0.012, warmup=0.0,
        label_smoothing=0.2, padding=2, cutout=0,
    ),
    "resnet18": dict(
        epochs=30, batch_size=480, lr=0.4, momentum=0.85, weight_decay=5e-4, warmup=0.2,
        label_smoothing=0.1, padding=4, cutout=8,
    ),
    "net": dict(
        epochs=20, batch_size=96, lr=0.04, momentum=0.85, weight_decay=5e-4, warmup=0.2,
        label_smoothing=0.0, padding=2, cutout=0,
    ),
}  # fmt: skip


class Net(nn.Module):
    """The network of PyTorch's CIFAR tutorial, without batch norm.

    [batch, 3, 32, 32] -> [batch, classes].
    """

    def __init__(self, classes):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def build_resnet18(classes):
    """torchvision's ResNet-18 with a stem for small images: a 3x3 convolution, no max-pool."""
    # Imported here, because this import takes as long as that of Accelerate.
    from torchvision.models import resnet18

    model = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


class FastNet(nn.Module):
    """Six convolutions behind fixed whitening filters, for training in a few epochs.

    After K. Jordan, arXiv:2404.00498. [batch, 3, size, size] -> [batch, classes], for any size
    from 16 on.
    """

    def __init__(self, classes, widths=(64, 64, 256, 256, 256, 256)):
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad_(False)
        layers = []
        for depth, (inputs, outputs) in enumerate(pairwise((24, *widths))):
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            nn.init.dirac_(convolution.weight[:inputs])  # starts as the identity
            # The filters change too fast for PyTorch's momentum of 0.1.
            norm = nn.BatchNorm2d(outputs, momentum=0.4)
            norm.weight.requires_grad_(False)
            pool = [nn.MaxPool2d(2)] if depth % 2 == 0 else []
            layers += [convolution, *pool, norm, nn.GELU()]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes, bias=False)
        nn.init.normal_(self.head.weight, std=1 / widths[-1])

    @torch.no_grad()
    def fit_whitening(self, images):
        """Sets the first layer: its outputs for `images` are uncorrelated, with unit variance.

        Args:
            images: normalized, float32 [count, 3, height, width].
        """
        patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
        variance, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (directions / (variance + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        self.whiten.weight.copy_(torch.cat([filters, -filters]))
        self.whiten.bias.zero_()

    def forward(self, x):
        x = self.blocks(F.gelu(self.whiten(x)))
        return self.head(F.max_pool2d(x, x.shape[2:]).flatten(1))


def build_model(name, classes):  # EDIT: model
    """Builds the model called `name`, with random weights."""
    model = {"net": Net, "resnet18": build_resnet18, "fastnet": FastNet}[name](classes)
    return model.to(memory_format=torch.channels_last)


def build_optimizer(model, args):
    """SGD with Nesterov momentum; for fastnet, Muon for the filters.

    The other parameters of fastnet have separate learning rates.
    """
    common = dict(lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    common |= dict(nesterov=True, fused=True)
    if args.model != "fastnet":
        return torch.optim.SGD(model.parameters(), **common)
    filters = [layer.weight for layer in model.blocks.modules() if isinstance(layer, nn.Conv2d)]
    biases = [layer.bias for layer in model.blocks.modules() if isinstance(layer, nn.BatchNorm2d)]
    groups = [dict(params=filters, weight_decay=0.0, muon=True, momentum=0.6, fixed_norm=True)]
    scales = [([model.head.weight], 1 / 16), (biases, 320), ([model.whiten.bias], 320)]
    for parameters, scale in scales:
        # Dividing the decay by the scale keeps lr * weight_decay, the decay per step, the same for
        # all groups.
        rates = dict(lr=args.lr * scale, weight_decay=args.weight_decay / scale)
        groups.append(dict(params=parameters, muon=False, **rates))
    return MuonSGD(groups, **common)


def lr_multiplier(step, plan, args):
    """The learning-rate multiplier at `step`."""
    total = plan.total_steps
    return schedule.multiplier(args.lr_schedule, step, total, warmup=args.warmup * total)


def build_scheduler(optimizer, plan, args):
    """Multiplies each learning rate by `lr_multiplier` after each step."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_multiplier(step, plan, args)
    )


def image_size_at(progress, args):
    """The image size in pixels: smaller at first, which saves a third of the time.

    The last fifth of training uses the full size.
    """
    if args.model == "net" or args.lr_schedule == "constant":
        return 32
    return 24 if progress <= 0.6 else 28 if progress <= 0.8 else 32


# -------------------------------------------------------------------------------- data, evaluation


def load_data(accelerator, args):  # EDIT: data
    """Loads the images of every split into memory, and shortens the splits for quick checks.

    Returns `ImageSplits`, whose description has a checksum: a run continues with the same data.
    """
    options = dict(seed=args.seed, val_fraction=args.val_fraction, columns=args.columns)
    data = local_main_first(accelerator, lambda: load_arrays(args.dataset, **options))
    if args.patience and "val" not in data.splits:
        raise UserError("--patience needs held-out images: give --val_fraction 0.1, for example")
    agree(accelerator, args.dataset, data)
    if args.overfit_batch:
        batch = data.splits["train"].first(args.batch_size)
        data.splits = dict.fromkeys(data.splits, batch)
    elif args.dry_run:
        held_out = data.splits.keys() - {"train"}
        data.splits |= {split: data.splits[split].first(500) for split in held_out}
    return data


def build_loaders(accelerator, data, args):
    """Builds loaders of global batches (dict: name of a split -> Split, loader).

    `prepare` splits each batch over the processes. The loaders yield the ids of the samples, on the
    CPU: `Split.batch` then makes the batch.
    """
    splits = on_device(accelerator, data.splits)
    batch_size = args.batch_size // args.gradient_accumulation_steps
    samples = range(len(splits["train"]))
    loaders = {"train": DataLoader(samples, batch_size, shuffle=True, drop_last=True)}
    for name in sorted(splits.keys() - {"train"}):
        samples = range(len(splits[name]))
        batch_size = evaluation_batch_size(accelerator, len(samples), 250)
        loaders[name] = DataLoader(samples, batch_size)
    return {
        name: (splits[name], accelerator.prepare_data_loader(loader, device_placement=False))
        for name, loader in loaders.items()
    }


def compute_loss(model, batch, mean, std, epoch, size, args):  # EDIT: loss
    """The mean loss of a batch.

    The augmentation depends only on the seed, the epoch and the ids of the samples.
    """
    images = batch["images"]
    if not args.overfit_batch:
        images = augment(images, batch["ids"], epoch, args.seed, padding=args.padding)
        if args.cutout:
            images = cut_out(images, batch["ids"], epoch, args.seed, args.cutout, mean)
    outputs = model(normalize(images, mean, std, size))
    return F.cross_entropy(outputs, batch["labels"], label_smoothing=args.label_smoothing)


@torch.no_grad()
def evaluate(accelerator, model, split, loader, watch, mean, std, size=32):  # EDIT: metric
    """Computes exact metrics of a split: each image counts once, on any number of processes.

    Args:
        split (Split): the images.
        loader: yields their ids.
        watch: `guard.watch`, with which a signal ends the evaluation; `iter` without one.
        size (int): resize to this height and width; before the end of training, the size of the
            current training images.

    Returns:
        tuple: `loss` and `accuracy` (dict); and a dict with a value per image, in the order of the
        data: `labels` and `predictions`, int64, and `losses`, float32.
    """
    model.eval()
    outputs, labels = [], []
    for batch in map(split.batch, watch(loader)):
        images = normalize(batch["images"], mean, std, size=size)
        logits = model(images).float()
        # Gather per batch and per sample: gather_for_metrics then drops the samples that were
        # repeated to fill up the last batch.
        logits, target = accelerator.gather_for_metrics((logits, batch["labels"]))
        outputs.append(logits.clone())  # a CUDA graph (--compile reduce-overhead) overwrites them
        labels.append(target)
    model.train()
    outputs, labels = torch.cat(outputs).cpu(), torch.cat(labels).cpu()
    if len(labels) != len(split):
        raise RuntimeError(f"evaluated {len(labels)} of {len(split)} samples")
    predictions, losses = outputs.argmax(1), F.cross_entropy(outputs, labels, reduction="none")
    accuracy = (predictions == labels).double().mean().item()
    metrics = {"loss": losses.mean().item(), "accuracy": accuracy}
    return metrics, {"labels": labels, "predictions": predictions, "losses": losses}


# -------------------------------------------------------------------------------------- model card

USAGE = """Next to `{module}.py` and `utils/`:

```python
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torchvision.transforms import v2
from {module} import build_model

model = build_model("{model}", {classes}).eval()
model.load_state_dict(load_file("model.safetensors"))
image = ImageOps.exif_transpose(Image.open("image.png")).convert("RGB")
pixels = v2.functional.pil_to_tensor(image)
pixels = v2.functional.center_crop(v2.functional.resize(pixels, [32]), [32, 32]).float()
x = v2.functional.normalize(pixels, {mean}, {std})
probabilities = model(x[None]).softmax(1)[0]  # of the classes above
```"""


def describe_model(config):
    """What the model card says about a model, for `model_card.write`."""
    names = config["class_names"]
    colors = {name: [round(value, 3) for value in config[name]] for name in ("mean", "std")}
    module = Path(sys.argv[0]).stem
    usage = USAGE.format(module=module, model=config["model"], classes=len(names), **colors)
    return {
        "title": f"{config['model']}, {len(names)} classes",
        "task": "image-classification",
        "about": f"Classes: {', '.join(map(for_markdown, names))}.",
        "usage": usage,
    }


# -------------------------------------------------------------------------------------------- main


def final_results(accelerator, model, loaders, watch, mean, std):
    """Evaluates every held-out split at full size, once more.

    Args: loaders, watch, mean, std: as in `main`; see `evaluate`.

    Returns:
        tuple: the metrics, for `run.finish`; the name of the last split, that of the test if there
        is one; and of each image in it what `evaluate` returns.
    """
    results = {}
    for name in sorted(loaders.keys() - {"train"}, reverse=True):  # val, then test
        metrics, samples = evaluate(accelerator, model, *loaders[name], watch, mean, std)
        results |= {f"{name}_{metric}": value for metric, value in metrics.items()}
    return results, name, samples


def write_outputs(run, split, samples, config):
    """Writes plots and the model card; main process only. Returns images for trackers (dict)."""
    smoothed = run.record["arguments"]["label_smoothing"]
    plots.curves(run.path, {"loss": "loss (training: with label smoothing)"} if smoothed else {})
    model_card.write(run, **describe_model(config))
    return classifier_plots.of_images(run.path, split, samples, config["class_names"])


def main():
    args = parse_args()
    on_cpu = launch.set_up(args)  # network, threads, deterministic algorithms
    trackers = Trackers(args)
    accelerator = Accelerator(cpu=on_cpu, **launch.accelerator_options(args), **trackers.options())
    accumulation = args.gradient_accumulation_steps
    launch.print_banner(accelerator)
    micro_batch_size = elastic.divide_batch(accelerator, args.batch_size, accumulation)
    data = load_data(accelerator, args)
    # Validation data is held out of training and chooses a checkpoint. The test split never does.
    held_out = "val" if "val" in data.splits else "test"
    plan = Plan.from_args(args, len(data.splits["train"]))
    writer = None if args.wait_for_checkpoints else BackgroundWriter(accelerator)
    run = RunFolder(args, accelerator, flags.MAY_CHANGE, [trackers], writer)
    run.open(plan, data=data.description)  # has a run to continue, a finished one, or none
    if run.finished:
        return

    set_seed(args.seed)
    images = data.splits["train"].images
    mean, std = (value.to(accelerator.device) for value in data.splits["train"].mean_and_std())
    model = build_model(args.model, len(data.class_names))
    if args.model == "fastnet":
        model.fit_whitening(normalize(images[:5000], mean.cpu(), std.cpu()))
    weight_files.initialize(accelerator, model, run.init_from)
    config = {"model": args.model, "class_names": data.class_names}
    config |= {"mean": mean.tolist(), "std": std.tolist()}
    compile_model(accelerator, [model], args.compile, dynamic=False)  # each image size on its own
    optimizer = build_optimizer(model, args)
    batch_norm.check(accelerator, model, micro_batch_size)
    scheduler = build_scheduler(optimizer, plan, args)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loaders = build_loaders(accelerator, data, args)
    train_set, train_loader = loaders["train"]
    batch_norm.broadcast_less(model)
    first = train_set.batch(torch.arange(2))
    # Hidden passes, for an exact resume.
    ddp.warm_up(model, lambda: compute_loss(model, first, mean, std, 0, None, args))
    step = run.start()  # accelerator.load_state, if there is a checkpoint
    schedule.recompute(scheduler)  # the run may have another length now
    guard = Guard(accelerator, args.timeout)
    watchdog = Watchdog(run, guard, accelerator, model, args.timeout)

    def validate(step):
        data, size = loaders[held_out], image_size_at(step / plan.total_steps, args)
        metrics, _ = evaluate(accelerator, model, *data, guard.watch, mean, std, size=size)
        score = metrics["accuracy"] if held_out == "val" else None
        run.log(held_out, step, score=score, **metrics)

    train_loss = math.inf
    if run.evaluation_due:  # the run was stopped in it
        validate(step)
    profile = start_profiler(accelerator, run.path, args.profile)
    for epoch, remaining in plan.epochs(start=step, done=run.best.out_of_patience):
        train_loader.set_epoch(epoch)
        batches = remaining.rest(train_loader)  # without those before an interruption
        for step, micro_batches in remaining.accumulated(run.timed(batches)):
            size = image_size_at(step / plan.total_steps, args)
            losses, ids, norm = [], [], None
            for batch in map(train_set.batch, micro_batches):
                # A restart draws the same dropout masks. After loading, which may draw, too.
                seed_step(accelerator, args.seed, step, len(losses))
                with accelerator.accumulate(model):
                    loss = compute_loss(model, batch, mean, std, epoch, size, args)
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
                with run.checkpoint(step, guard, model, config=config) as folder:
                    accelerator.save_state(folder)
            if stop:
                run.exit_preempted(step)
            if plan.evaluation_due(step):
                validate(step)  # a signal ends it at once: the restart evaluates
        if args.overfit_batch and train_loss < 0.01:
            break
    profile.stop()

    final = final_results(accelerator, model, loaders, guard.watch, mean, std)
    results, shown, samples = final
    if accelerator.is_main_process:
        files.write_weights(run.path, accelerator.unwrap_model(model), config)
    run.finish(step, **results)
    if accelerator.is_main_process:
        images = write_outputs(run, data.splits[shown], samples, config)
        trackers.log_images(images, step)
    run.close(model_card.command("evaluate.py", run.path))
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        default="uoft-cs/cifar10",
        help="Hub id, local folder or file of images, which become 32x32, or `synthetic`",
    )
    flags.add(group, "val_fraction", "columns")
    group = parser.add_argument_group(
        "model and training (the defaults shown are those of the chosen --model)"
    )
    share = number(float, 0, below=1)
    group.add_argument("--model", choices=RECIPES, default="fastnet", help="network to train")
    parser.add_training_arguments(group)
    flags.add(group, *flags.OPTIMIZER, "lr_schedule", "compile", lr_schedule="linear")
    group.add_argument("--label_smoothing", type=share, help="0: none")
    group = parser.add_run_arguments()
    flags.add(group, "init_from", "patience", *flags.EXTRAS)
    parser.set_defaults(**RECIPES.get(flags.choice(parser, "model"), {}))
    args = flags.parse_with_checks(parser)
    if args.overfit_batch:
        args.lr_schedule, args.warmup, args.label_smoothing = "constant", 0.0, 0.0
    return frozen(args)


if __name__ == "__main__":
    entry.run(main)
