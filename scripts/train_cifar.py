"""Image classification on CIFAR-10: the main template.

Shows one hand-written loop that runs unchanged on a laptop, one GPU, many GPUs and many machines. It can be killed at any
moment: run the same command again to continue from the last checkpoint.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_cifar.py --dataset synthetic
    accelerate launch --config_file accelerate_configs/1gpu.yaml scripts/train_cifar.py
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_cifar.py
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_cifar.py --model resnet18

Measured on 2026-11-22 on 2 cores of an AMD EPYC (Zen 3) in float32, one run, on CIFAR-10 images re-encoded as JPEG, with
--batch_size 500: 89.7 % test accuracy, 91.0 % with --tta, after 14 epochs in 62 minutes. On the same images airbench94,
published with 94 % on the original ones, reaches 91.1 %. Not run on a GPU yet.
"""

import math
import sys
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

from utils import plots, report, topology, tracking, weights
from utils.arguments import Parser, number
from utils.augment import augment, normalize
from utils.guard import Guard
from utils.image_data import BatchedImages, as_is, load_images
from utils.muon import MuonSGD
from utils.plan import Plan
from utils.run_folder import RunFolder

# The defaults of each model; flags override them. 480 is divisible by the usual numbers of GPUs: 1 to 6, 8, 10, 12, 16, 20, 24.
RECIPES = {
    "fastnet": dict(epochs=14, batch_size=480, lr=0.12, warmup=0.0, weight_decay=0.012, label_smoothing=0.2),
    "resnet18": dict(epochs=30, batch_size=480, lr=0.4, weight_decay=5e-4, label_smoothing=0.1, padding=4, cutout=8),
    "net": dict(epochs=20, batch_size=96, lr=0.04, weight_decay=5e-4),
}


class Net(nn.Module):
    """The network of PyTorch's CIFAR tutorial, without batch norm: [batch, 3, 32, 32] -> [batch, classes]."""

    def __init__(self, classes):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def build_resnet18(classes):
    """torchvision's ResNet-18 with a stem for small images: a 3x3 convolution of stride 1 and no max-pool."""
    from torchvision.models import resnet18  # here, because it takes as long to import as Accelerate

    model = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


class FastNet(nn.Module):
    """Six convolutions behind fixed whitening filters, for training in a few epochs (after K. Jordan, arXiv:2404.00498).

    [batch, 3, size, size] -> [batch, classes], for any size from 16 on.
    """

    def __init__(self, classes, widths=(64, 64, 256, 256, 256, 256)):
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad_(False)
        layers = []
        for depth, (inputs, outputs) in enumerate(pairwise((24, *widths))):
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            nn.init.dirac_(convolution.weight[:inputs])  # starts as the identity
            norm = nn.BatchNorm2d(outputs, momentum=0.4)  # the filters change too fast for PyTorch's 0.1
            norm.weight.requires_grad_(False)
            pool = [nn.MaxPool2d(2)] if depth % 2 == 0 else []
            layers += [convolution, *pool, norm, nn.GELU()]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes, bias=False)
        nn.init.normal_(self.head.weight, std=1 / widths[-1])

    @torch.no_grad()
    def fit_whitening(self, images):
        """Sets the first layer so that its outputs for `images` (normalized) are uncorrelated, with unit variance."""
        patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
        variance, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (directions / (variance + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        self.whiten.weight.copy_(torch.cat([filters, -filters]))
        self.whiten.bias.zero_()

    def forward(self, x):
        x = self.blocks(F.gelu(self.whiten(x)))
        return self.head(x.amax((2, 3)))


def build_model(name, classes):  # EDIT: model
    """Builds the model called `name`, with random weights."""
    model = {"net": Net, "resnet18": build_resnet18, "fastnet": FastNet}[name](classes)
    return model.to(memory_format=torch.channels_last)


def build_optimizer(model, args):
    """SGD with Nesterov momentum; for fastnet, Muon for the filters and SGD with separate learning rates for the rest."""
    common = dict(lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay, nesterov=True)
    if args.model != "fastnet":
        return torch.optim.SGD(model.parameters(), **common)
    filters = [layer.weight for layer in model.blocks.modules() if isinstance(layer, nn.Conv2d)]
    biases = [layer.bias for layer in model.blocks.modules() if isinstance(layer, nn.BatchNorm2d)]
    groups = [dict(params=filters, weight_decay=0.0, muon=True, momentum=0.6, fixed_norm=True)]
    for parameters, scale in (([model.head.weight], 1 / 16), (biases, 320), ([model.whiten.bias], 320)):
        # Dividing the decay by the scale keeps lr * weight_decay, the decay per step, the same for all groups.
        groups.append(dict(params=parameters, lr=args.lr * scale, weight_decay=args.weight_decay / scale, muon=False))
    return MuonSGD(groups, **common)


def lr_multiplier(progress, args):
    """The learning-rate multiplier at `progress` in [0, 1]: linear warm-up and decay to zero, or constant."""
    if args.lr_schedule == "constant":
        return 1.0
    if progress < args.warmup:
        return (progress + 0.01) / (args.warmup + 0.01)
    return (1 - progress) / (1 - args.warmup)


def image_size_at(progress, args):
    """Image size in pixels: small images first take two thirds of the time; the last fifth trains at full size."""
    if args.model == "net" or args.lr_schedule == "constant":
        return 32
    return 24 if progress <= 0.6 else 28 if progress <= 0.8 else 32


# ------------------------------------------------------------------------------------------------- data, evaluation


def build_loaders(accelerator, data, args):  # EDIT: data
    """Builds loaders of global batches; `prepare` gives every process its share of each."""
    common = dict(num_workers=args.num_workers, collate_fn=as_is, worker_init_fn=exits.worker_init)
    common["pin_memory"] = accelerator.device.type == "cuda"
    micro_batch = args.batch_size // args.gradient_accumulation_steps
    train = DataLoader(BatchedImages(data.train), micro_batch, shuffle=True, drop_last=True, **common)
    eval_batch = topology.evaluation_batch(accelerator, len(data.test.labels), 250)
    return train, DataLoader(BatchedImages(data.test), eval_batch, **common)


def compute_loss(model, batch, mean, std, epoch, size, args):  # EDIT: loss
    """The mean loss of a batch. Its augmentation depends only on the seed, the epoch and the ids of the samples."""
    images, keep = batch["images"], None
    if not args.overfit_batch:
        images, keep = augment(images, batch["ids"], epoch, args.seed, padding=args.padding, cutout=args.cutout)
    outputs = model(normalize(images, mean, std, keep, size))
    return F.cross_entropy(outputs, batch["labels"], label_smoothing=args.label_smoothing)


@torch.no_grad()
def evaluate(accelerator, model, loader, mean, std, *, tta=False, size=32):  # EDIT: metric
    """Computes exact metrics over the test set: each image counts once, on any number of processes.

    Args:
        tta (bool): test-time augmentation: sum the outputs for an image, its mirror image, and both shifted by a pixel.
        size (int): resize to this height and width; before the end of training, the size of the current training images.

    Returns:
        dict: `loss`, `accuracy`, and `predictions`, int64 [samples] in the order of the data.
    """
    model.eval()
    outputs, labels = [], []
    for batch in loader:
        images = normalize(batch["images"], mean, std, size=size)
        if tta:
            padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
            views = (0.25, images), (0.125, padded[:, :, :-2, :-2]), (0.125, padded[:, :, 2:, 2:])
            logits = sum(share * (model(view).float() + model(view.flip(-1)).float()) for share, view in views)
        else:
            logits = model(images).float()
        # Gather per batch and per sample: gather_for_metrics then drops the samples repeated to fill up the last batch.
        logits, target = accelerator.gather_for_metrics((logits, batch["labels"]))
        outputs.append(logits)
        labels.append(target)
    model.train()
    outputs, labels = torch.cat(outputs).cpu(), torch.cat(labels).cpu()
    if len(labels) != len(loader.dataset):
        raise RuntimeError(f"evaluated {len(labels)} of {len(loader.dataset)} test samples")
    predictions = outputs.argmax(1)
    accuracy = (predictions == labels).double().mean().item()
    return {"loss": F.cross_entropy(outputs, labels).item(), "accuracy": accuracy, "predictions": predictions}


# ------------------------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    # --batch_size is global: each batch is split over the processes, so every topology sees the same batches in the same order.
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=args.seed, non_blocking=True)
    accelerator = Accelerator(
        cpu=topology.check_launch(training=True),
        dataloader_config=loading,
        gradient_accumulation_plugin=GradientAccumulationPlugin(args.gradient_accumulation_steps, sync_with_dataloader=False),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))],
        log_with=tracking.trackers(args.track),
        project_dir=f"{args.output_dir}/tensorboard",
    )
    micro_batch = topology.print_banner(accelerator, args.batch_size, args.gradient_accumulation_steps)
    data = topology.local_main_first(accelerator, lambda: load_images(args.dataset, args.seed))
    if args.overfit_batch:
        data.train = data.test = data.train.first(args.batch_size)
    elif args.dry_run:
        data.test = data.test.first(500)
    plan = Plan.from_args(args, len(data.train.labels))
    run = RunFolder(args, accelerator, may_change=["tta"])
    run.open(plan)  # the folder is empty, or has a run to continue, or a finished run
    if run.finished:
        return

    set_seed(args.seed)
    mean, std = (x.to(accelerator.device) for x in data.train.mean_and_std())
    model = build_model(args.model, len(data.class_names))
    if args.model == "fastnet":
        model.fit_whitening(normalize(data.train.images[:5000], mean.cpu(), std.cpu()))
    weights.initialize(accelerator, model, run.init_from)
    if args.compile:
        model.compile()  # in place: torch.compile(model) would add its prefix to every parameter name in a checkpoint
    optimizer = build_optimizer(model, args)
    model = topology.sync_batch_norm(accelerator, model, micro_batch, args.sync_batchnorm)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_multiplier(step / plan.total_steps, args))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train_loader, test_loader = accelerator.prepare(*build_loaders(accelerator, data, args))
    topology.set_up_ddp(accelerator, model, normalize(data.train.images[:2].to(accelerator.device), mean, std))
    step = run.start(scheduler)  # accelerator.load_state, if there is a checkpoint
    guard = Guard(accelerator, args.timeout)
    train_loss, metrics = math.inf, None
    with report.profiler(accelerator, run.path, args.profile) as profiler:
        for epoch, todo in plan.epochs(start=step):
            train_loader.set_epoch(epoch)
            batches = skip_first_batches(train_loader, todo.batches_done)
            for step, micro_batches in todo.steps(run.timed(batches)):
                size = image_size_at(step / plan.total_steps, args)
                losses, ids, norm = [], [], None
                for batch in micro_batches:
                    # Makes a restart draw the same dropout masks. Seeds after loading the batch, which may draw numbers too.
                    topology.seed_step(accelerator, args.seed, step, len(losses))
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
                profiler.step()
                stop = guard.should_stop(step, losses, ids, norm)  # the same answer on every process
                if plan.log_due(step):
                    train_loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()  # one loss, not one per rank
                    run.log("train", step, loss=train_loss, grad_norm=norm, lr=scheduler.get_last_lr()[0])
                if plan.evaluation_due(step):
                    metrics = evaluate(accelerator, model, test_loader, mean, std, size=size)
                    run.log("test", step, score=metrics["accuracy"], loss=metrics["loss"], accuracy=metrics["accuracy"])
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
    results = {"test_accuracy": metrics["accuracy"], "test_loss": metrics["loss"]}
    if args.tta:
        results["test_accuracy_tta"] = evaluate(accelerator, model, test_loader, mean, std, tta=True)["accuracy"]
    if accelerator.is_main_process:
        config = {"model": args.model, "class_names": data.class_names, "mean": mean.tolist(), "std": std.tolist()}
        weights.export(run.path, accelerator.unwrap_model(model), config)
        print(plots.class_table(data, metrics["predictions"]))
        tracking.log_images(accelerator, plots.classification(run.path, data, metrics["predictions"]), step)
        plots.curves(run.path)
    run.finish(step, next_command=f"python scripts/evaluate.py --checkpoint {run.path}", **results)
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("model and training (the defaults shown are those of the chosen --model)")
    group.add_argument("--model", choices=RECIPES, default="fastnet", help="network to train")
    parser.add_training_arguments(group)
    parser.add_optimizer_arguments(group)
    group.add_argument("--momentum", type=number(float, 0, above=True), default=0.85, help="momentum of SGD")
    group.add_argument(
        "--warmup", type=number(float, 0, below=1), default=0.2, help="fraction of the steps in which the learning rate rises"
    )
    group.add_argument("--lr_schedule", choices=["linear", "constant"], default="linear", help="constant: no warm-up either")
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group.add_argument("--sync_batchnorm", action="store_true", help="batch norm over all processes; on GPUs")
    group = parser.add_argument_group("augmentation and evaluation")
    group.add_argument("--label_smoothing", type=number(float, 0), default=0.0, help="label smoothing; 0: none")
    group.add_argument("--padding", type=number(int, 0), default=2, help="largest random shift in pixels")
    group.add_argument("--cutout", type=number(int, 0), default=0, help="side of the masked square in pixels; 0: none")
    group.add_argument("--tta", action="store_true", help="also report test-time augmented accuracy")
    parser.add_run_arguments()
    parser.add_data_arguments("uoft-cs/cifar10", "Hub id or local folder of a 32x32 image data set, or `synthetic`")
    parser.set_defaults(**RECIPES.get(parser.choice("model"), {}))
    args = parser.parse_training_args()
    if args.overfit_batch:
        args.lr_schedule, args.label_smoothing = "constant", 0.0
    return args


if __name__ == "__main__":
    exits.run(main)
