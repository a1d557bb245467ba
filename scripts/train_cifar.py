"""Image classification on CIFAR-10: the main template.

Teaches: one hand-written loop that runs unchanged on a laptop, one GPU, many GPUs and many machines, and that can be
killed at any moment. Relaunch the same command and it goes on where it was.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_cifar.py --dataset synthetic
    accelerate launch --config_file accelerate_configs/1gpu.yaml scripts/train_cifar.py
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_cifar.py
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/train_cifar.py --model resnet18

Measured on 2026-11-22 with 2 cores of an AMD EPYC (Zen 3: AVX2, no bf16 units) in float32, one run, on CIFAR-10 images
re-encoded as JPEG, with --batch_size 500: 89.7 % test accuracy, 91.0 % with --tta, 14 epochs in about 62 minutes; with
--epochs 9 89.5 and 90.6 % in 37. Not run on a GPU yet. On the same images airbench94, published at 94 % on the original
ones, comes to 91.1 %.
"""

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
import torch.nn.functional as F
import torchvision
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from utils import checkpoint, plots, report, topology, weights
from utils.arguments import Parser, add_data_arguments, add_run_arguments, number
from utils.augment import augment, normalise
from utils.exits import UserError
from utils.guard import Guard
from utils.image_data import BatchedImages, as_is, load_images
from utils.muon import MuonSGD
from utils.run_folder import RunFolder, scratch_name

# What each model was tuned with; any of it can be overridden on the command line. 480 divides by most numbers of GPUs
# that there are: 1 to 6, 8, 10, 12, 16, 20, 24.
LENGTH = ("epochs", "max_train_steps")
RECIPES = {
    "fastnet": dict(
        epochs=14, batch_size=480, lr=0.12, warmup=0.0, weight_decay=0.012, label_smoothing=0.2, padding=2, cutout=0
    ),
    "resnet18": dict(
        epochs=30, batch_size=480, lr=0.4, warmup=0.2, weight_decay=5e-4, label_smoothing=0.1, padding=4, cutout=8
    ),
    "net": dict(epochs=20, batch_size=96, lr=0.02, warmup=0.2, weight_decay=5e-4, label_smoothing=0.0, padding=2, cutout=0),
}


# ----------------------------------------------------------------------------------------------------------- models


class Net(nn.Module):
    """The network of the well-known CIFAR tutorial: two convolutions, three linear layers, no batch norm.

    [batch, 3, 32, 32] -> [batch, classes].
    """

    def __init__(self, classes):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def resnet18(classes):
    """torchvision's ResNet-18 with a stem for small images: a 3x3 convolution of stride 1 and no max-pool."""
    model = torchvision.models.resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


class FastNet(nn.Module):
    """Six convolutions behind fixed whitening filters, for few epochs; in the manner of K. Jordan, arXiv:2404.00498.

    [batch, 3, size, size] -> [batch, classes], for any size from 16 on.
    """

    def __init__(self, classes, widths=(64, 64, 256, 256, 256, 256)):
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad_(False)
        layers = []
        for depth, (inputs, outputs) in enumerate(pairwise((24, *widths))):
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            nn.init.dirac_(convolution.weight[:inputs])  # starts by passing its input on
            norm = nn.BatchNorm2d(outputs, momentum=0.4)  # the filters turn fast: PyTorch's 0.1 lags behind them
            norm.weight.requires_grad_(False)
            pool = [nn.MaxPool2d(2)] if depth % 2 == 0 else []
            layers += [convolution, *pool, norm, nn.GELU()]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes, bias=False)
        nn.init.normal_(self.head.weight, std=1 / widths[-1])

    @torch.no_grad()
    def fit_whitening(self, images):
        """Sets the first layer so that its outputs on `images` (normalised) are uncorrelated and of unit variance."""
        patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
        variance, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (directions / (variance + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
        self.whiten.weight.copy_(torch.cat([filters, -filters]))
        self.whiten.bias.zero_()

    def forward(self, x):
        x = self.blocks(F.gelu(self.whiten(x)))
        return self.head(x.amax((2, 3)))


def build_model(name, classes):
    """The model called `name`, with fresh weights."""
    model = {"net": Net, "resnet18": resnet18, "fastnet": FastNet}[name](classes)
    return model.to(memory_format=torch.channels_last)


def build_optimizer(model, args):
    """SGD with Nesterov momentum; for fastnet Muon for the filters, and SGD with rates of their own for the rest."""
    common = dict(lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay, nesterov=True)
    if args.model != "fastnet":
        return torch.optim.SGD(model.parameters(), **common)
    filters = [layer.weight for layer in model.blocks.modules() if isinstance(layer, nn.Conv2d)]
    biases = [layer.bias for layer in model.blocks.modules() if isinstance(layer, nn.BatchNorm2d)]
    groups = [dict(params=filters, weight_decay=0.0, muon=True, momentum=0.6, fixed_norm=True)]
    for weights_, scale in (([model.head.weight], 1 / 16), (biases, 320), ([model.whiten.bias], 320)):
        # The same relative decay for all of them, whatever their rates.
        groups.append(dict(params=weights_, lr=args.lr * scale, weight_decay=args.weight_decay / scale, muon=False))
    return MuonSGD(groups, **common)


def lr_at(progress, args):
    """The share of the peak rate at `progress` in [0, 1]: linear warm-up and decay to zero, or all of it throughout."""
    if args.lr_schedule == "constant":
        return 1.0  # on no account of the length of the run, which can be prolonged
    if progress < args.warmup:
        return (progress + 0.01) / (args.warmup + 0.01)
    return (1 - progress) / (1 - args.warmup)


def image_size_at(progress, args):
    """Pixels to train at: small images first. Costs 0.66 of full size throughout, and the end sees what the test sees."""
    if args.model == "net" or args.lr_schedule == "constant":
        return 32
    return 24 if progress < 0.6 else 28 if progress < 0.8 else 32


# ------------------------------------------------------------------------------------------------- data, evaluation


def build_loaders(accelerator, data, args):
    """Loaders of global batches: `prepare` gives every process its share of each, whatever their number."""
    common = dict(num_workers=args.num_workers, collate_fn=as_is, worker_init_fn=exits.worker_init)
    common["pin_memory"] = accelerator.device.type == "cuda"
    micro_batch = args.batch_size // args.gradient_accumulation_steps
    train = DataLoader(BatchedImages(data.train), micro_batch, shuffle=True, drop_last=True, **common)
    return train, DataLoader(BatchedImages(data.test), 250 * accelerator.num_processes, **common)


@torch.no_grad()
def evaluate(accelerator, model, loader, mean, std, classes, *, tta=False, size=32, max_batches=None):
    """Exact figures over the test set, each image counted once, on any number of processes.

    Args:
        tta (bool): test-time augmentation: sum the outputs for an image, its mirror image, and both shifted a pixel.
        size (int): pixels to resize to: a model that has seen only small images is tested on small ones.

    Returns:
        dict: `loss`, `accuracy`, `confusion` (int64 [true, predicted]), `predictions` (int64, in the data's order).
    """
    model.eval()
    outputs, labels = [], []
    for batch in islice(loader, max_batches):
        images = normalise(batch["images"], mean, std, size=size)
        logits = model(images).float()
        if tta:
            padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
            views = [images, padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]]
            weights = [0.25, 0.125, 0.125]
            logits = sum(w * (model(v).float() + model(v.flip(-1)).float()) for w, v in zip(weights, views, strict=True))
        # Per sample and per batch: what makes the last, uneven batch come out right.
        logits, target = accelerator.gather_for_metrics((logits, batch["labels"]))
        outputs.append(logits)
        labels.append(target)
    model.train()
    outputs, labels = torch.cat(outputs).cpu(), torch.cat(labels).cpu()
    if max_batches is None and len(labels) != len(loader.dataset):
        raise RuntimeError(f"evaluated {len(labels)} of {len(loader.dataset)} test samples")
    predictions = outputs.argmax(1)
    return {
        "loss": F.cross_entropy(outputs, labels).item(),
        "accuracy": (predictions == labels).double().mean().item(),
        "confusion": torch.bincount(labels * classes + predictions, minlength=classes**2).view(classes, classes),
        "predictions": predictions,
    }


# ------------------------------------------------------------------------------------------------------------- main


def main():
    args = parse_args()
    accelerator = Accelerator(
        cpu=topology.check_launch(),
        # --batch_size is global: every batch is split over the processes, so each topology sees the same ones in order.
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=args.seed, non_blocking=True
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(args.gradient_accumulation_steps, sync_with_dataloader=False),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.timeout))],
        log_with="tensorboard",
        project_config=ProjectConfiguration(logging_dir=args.output_dir),
    )
    say = accelerator.on_main_process(print)  # accelerator.print speaks once per machine
    banner = topology.banner(accelerator, "train_cifar", args.batch_size, args.gradient_accumulation_steps)
    data = topology.node_first(accelerator, lambda: load_images(args.dataset, args.seed))
    if args.overfit_batch:
        data.train = data.test = data.train.first(args.batch_size)
    classes, steps_per_epoch = len(data.class_names), len(data.train.labels) // args.batch_size
    if steps_per_epoch == 0:
        raise UserError(f"--batch_size {args.batch_size} is more than the {len(data.train.labels)} training images")
    total_steps = args.max_train_steps or args.epochs * steps_per_epoch
    eval_every = args.eval_every or steps_per_epoch
    checkpoint_every = steps_per_epoch if args.checkpoint_every is None else args.checkpoint_every

    # ---- what this folder holds already: nothing, a run to continue, or one that must not be touched
    run = RunFolder(args, accelerator, free=LENGTH if args.lr_schedule == "constant" else ())
    finished, found = run.open()
    if finished:
        say(report.summary(finished, run.path, "this run is finished already, nothing to do"))
        return

    set_seed(args.seed)
    mean, std = (x.to(accelerator.device) for x in data.train.mean_and_std())
    model = build_model(args.model, classes)
    if args.model == "fastnet":
        model.fit_whitening(normalise(data.train.images[:5000], mean.cpu(), std.cpu()))
    if args.compile:
        model.compile()  # in place: torch.compile(model) would put its prefix before every name that DDP saves
    optimizer = build_optimizer(model, args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_at(step / total_steps, args))
    train_loader, test_loader = build_loaders(accelerator, data, args)
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )

    def compute_loss(batch, epoch, size):
        images, keep = batch["images"], None
        if not args.overfit_batch:
            images, keep = augment(images, batch["ids"], epoch, args.seed, padding=args.padding, cutout=args.cutout)
        outputs = model(normalise(images, mean, std, keep, size))
        return F.cross_entropy(outputs, batch["labels"], label_smoothing=args.label_smoothing)

    example = {name: value.to(accelerator.device) for name, value in train_loader.dataset.__getitems__([0, 1]).items()}
    topology.settle_gradient_buckets(accelerator, model, lambda: compute_loss(example, 0, 32))
    progress = {"step": 0, "train_seconds": 0.0, "score": None, "best": 0.0}
    if found:
        checkpoint.load(accelerator, found[0])
        progress = found[1]["progress"] | {"score": None}
    step = resumed_from = saved_at = progress["step"]
    run.begin(step, topology.describe(accelerator))
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": step + 1}})
    say(f"{banner}\n{total_steps} steps, {steps_per_epoch} an epoch; everything goes to {run.path}")
    say(f"continuing from {found[0]}" if found else "starting at step 0")

    began = time.perf_counter()
    guard = Guard(accelerator, args.timeout)
    meter = report.Meter(accelerator, args.batch_size, total_steps, step)
    bar = tqdm(total=total_steps, initial=step, disable=not (accelerator.is_main_process and sys.stderr.isatty()))

    def test(size, tta=False):
        limit = 2 if args.dry_run else None
        return evaluate(accelerator, model, test_loader, mean, std, classes, tta=tta, size=size, max_batches=limit)

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
                if not ids:
                    # For dropout and the like: drawn anew from the step, so a restart changes nothing.
                    set_seed((args.seed + 1_000_003 * step + 7_919 * accelerator.process_index) % 2**32)
                size = image_size_at(step / total_steps, args)
                with accelerator.accumulate(model):
                    loss = compute_loss(batch, epoch, size)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and args.max_grad_norm:
                        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
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
                        loss = accelerator.reduce(step_loss, "mean").item()
                        line = meter.line(step, epoch=step / steps_per_epoch, loss=loss, lr=scheduler.get_last_lr()[0])
                        run.log("train", **line)
                        accelerator.log({f"train/{n}": line[n] for n in ("loss", "lr", "samples_per_second")}, step=step)
                        bar.write(meter.text(line)) if not bar.disable else say(meter.text(line))
                        stop = stop or (args.overfit_batch and loss < 0.01)
                    improved = False
                    if step % eval_every == 0 or step == total_steps:
                        tested = test(32 if step == total_steps else size)
                        improved = tested["accuracy"] > progress["best"]
                        progress |= {"score": tested["accuracy"], "best": max(tested["accuracy"], progress["best"])}
                        run.log("test", step, epoch=step / steps_per_epoch, loss=tested["loss"], accuracy=tested["accuracy"])
                        accelerator.log({f"test/{n}": tested[n] for n in ("loss", "accuracy")}, step=step)
                        say(f"step {step}  test loss {tested['loss']:.4f}  accuracy {tested['accuracy']:.2%}")
                    if step == total_steps or (checkpoint_every and (improved or step % checkpoint_every == 0)):
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
        tested = test(32)
    results = {"test_accuracy": tested["accuracy"], "test_loss": tested["loss"]}
    if args.tta:
        results["test_accuracy_tta"] = test(32, tta=True)["accuracy"]
    results |= {
        "global_step": step,
        "samples_seen": step * args.batch_size,
        "train_seconds": train_seconds,
        "samples_per_second": step * args.batch_size / train_seconds,
        "num_processes": accelerator.num_processes,
        "peak_memory_bytes": report.memory_bytes(accelerator.device),
        "resumed_from": resumed_from,
    }
    if accelerator.is_main_process:
        bare = accelerator.unwrap_model(model)
        weights.export(run.path / "model.safetensors", bare, {"model": args.model, "class_names": data.class_names})
        print(plots.class_table(tested["confusion"], data.class_names))
        for name in plots.classification(run.path, data.test, tested, data.class_names):
            picture = plots.pixels(run.path / f"{name}.png")
            accelerator.get_tracker("tensorboard").log_images({name: picture}, step=step, dataformats="NHWC")
        plots.curves(run.path)
        flags = {name: value for name, value in run.arguments.items() if value is not None}
        metrics = {f"final/{name}": value for name, value in results.items() if name.startswith("test_")}
        accelerator.get_tracker("tensorboard", unwrap=True).add_hparams(flags, metrics, run_name=".")
        run.finish(results)
        print(report.summary(results, run.path, "done"))
    accelerator.wait_for_everyone()  # a scheduler may end the other machines once one has left
    accelerator.end_training()


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    group = parser.add_argument_group("model and training (defaults marked * depend on --model)")
    group.add_argument("--model", choices=RECIPES, default="fastnet")
    group.add_argument("--epochs", type=number(int, 1), help="passes over the training set *")
    group.add_argument("--max_train_steps", type=number(int, 1), help="optimizer steps; wins over --epochs")
    group.add_argument("--batch_size", type=number(int, 1), help="samples per optimizer step over all processes *")
    group.add_argument("--gradient_accumulation_steps", type=number(int, 1), default=1, help="micro-batches per step")
    group.add_argument("--lr", type=number(float, 0), help="peak learning rate *")
    group.add_argument("--warmup", type=number(float, 0), help="share of the steps in which the rate rises to its peak *")
    group.add_argument(
        "--lr_schedule", choices=["linear", "constant"], default="linear", help="constant: no warm-up either; can be prolonged"
    )
    group.add_argument("--momentum", type=number(float, 0, above=True), default=0.85)
    group.add_argument("--weight_decay", type=number(float, 0), help="*")
    group.add_argument("--max_grad_norm", type=number(float, 0), default=0, help="clip gradients to this norm; 0: do not")
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group = parser.add_argument_group("augmentation and evaluation")
    group.add_argument("--label_smoothing", type=number(float, 0), help="*")
    group.add_argument("--padding", type=number(int, 0), help="largest random shift in pixels *")
    group.add_argument("--cutout", type=number(int, 0), help="side of the blanked square in pixels, 0: none *")
    group.add_argument("--tta", action="store_true", help="also report test-time augmented accuracy")
    add_run_arguments(parser, "runs/train_cifar")
    add_data_arguments(parser, "uoft-cs/cifar10", "Hub id or local folder of a 32x32 image data set, or `synthetic`")
    args = parser.parse_args()
    args.output_dir = scratch_name(args)
    if args.warmup is not None and args.warmup >= 1:
        raise UserError(f"--warmup {args.warmup} is a share of the steps: below 1")
    for name, value in RECIPES[args.model].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.dry_run:
        args.max_train_steps, args.eval_every, args.checkpoint_every, args.log_every = 2, 1, 1, 1
    if args.overfit_batch:
        args.lr_schedule, args.label_smoothing, args.max_train_steps = "constant", 0.0, args.max_train_steps or 200
    return args


if __name__ == "__main__":
    exits.run(main)
