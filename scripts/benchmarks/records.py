"""train_cifar.py against the two fastest published recipes for its network."""

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import train_cifar
from cifar import fastnet
from measuring import batches, measure_loop, measure_script, rounds
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from utils.images.arrays import Split, load_arrays
from utils.images.augment import augment, normalize
from utils.muon import MuonSGD
from utils.run import devices

# The fastest published recipes for CIFAR-10, with the network of train_cifar.py: both reach 94 % on
# the original images, on one A100, in 2.59 s (github.com/KellerJordan/cifar10-airbench,
# airbench94_muon.py) and in 1.99 s (github.com/hiverge/cifar10-speedrun). Rates are for a loss that
# is summed over the batch. `whiten_epochs`: how long the bias of the whitening is trained.
# `brightness` and `contrast`: the largest random change of an image. `norm_every`: steps from one
# scaling of the filters to the next, at the start and how many more at the end. `viewed`: the share
# of test images, the least certain ones, of which six views are evaluated, and `views`: the weight
# of an image, and of the image shifted by a pixel in one direction and the other.
RECORDS = {
    "airbench": dict(
        batch_size=2000, epochs=8, whiten_epochs=3, lr=0.24, momentum=0.6, filter_decay=0.0,
        norm_every=(1, 0), bias_lr=0.053, head_lr=0.67, sgd_momentum=0.85, decay=4e-3,
        batch_norm=0.4, activation=nn.GELU, label_smoothing=0.2, brightness=0.0, contrast=0.0,
        viewed=1.0, views=(1 / 4, 1 / 8, 1 / 8),
    ),
    "hiverge": dict(
        batch_size=1536, epochs=7.59, whiten_epochs=0.19, lr=0.205, momentum=0.655,
        filter_decay=1.6e-3, norm_every=(2, 15), bias_lr=0.0573, head_lr=0.5415,
        sgd_momentum=0.825, decay=1.6e-3, batch_norm=0.4434, activation=nn.SiLU,
        label_smoothing=0.09, brightness=0.1399, contrast=0.1308,
        viewed=0.25, views=(1 / 6, 1 / 6, 1 / 6),
    ),
}  # fmt: skip
DEFAULTS = SimpleNamespace(model="fastnet", lr_schedule="linear")  # of train_cifar.py
TEST_IMAGES = 10_000  # of CIFAR-10


def time_to_accuracy(args):
    """Training time of train_cifar.py --tta on CIFAR-10, with another seed in each round.

    Over those of two records with the same network on the same images: airbench94_muon and
    Hiverge's; also floating-point operations, and the accuracy of each.
    """
    bf16 = torch.cuda.is_available() or devices.has_bf16()
    batch = train_cifar.RECIPES["fastnet"]["batch_size"]
    command = f"train_cifar.py --dataset {args.images} --tta --eval_every 100000"
    # In fewer epochs than by default, the accuracy of the records on the same images.
    command += " --checkpoint_every 0" + (" --max_train_steps 4" if args.quick else " --epochs 10")
    shortened = {"steps": 2} if args.quick else {}
    ratio = "time (flops: operations) over that record (less is better), ratio"
    units = {f"{name}{suffix}": ratio for name in RECORDS for suffix in ("", "_flops")}
    ways = {"accuracy": "test accuracy", "tta": "test accuracy with views"}
    for way, unit in ways.items():
        names = [way, *(f"{way}_{name}" for name in RECORDS)]
        units |= dict.fromkeys(names, f"{unit} (more is better)")
    values = {name: [] for name in units}
    for seed in rounds(args):
        _, results = measure_script(f"{command} --seed {seed}", bf16=bf16)
        steps = results["global_step"]
        sizes = [train_cifar.image_size_at(step / steps, DEFAULTS) for step in range(1, steps + 1)]
        flops = evaluation_flops(6 * TEST_IMAGES)
        for size, count in Counter(sizes).items():
            flops += count * step_flops(fastnet, batch, size)
        values["accuracy"].append(results["test_accuracy"])
        values["tta"].append(results["test_accuracy_tta"])
        for name in RECORDS:
            options = dict(recipe=name, images=args.images, seed=seed, bf16=bf16, **shortened)
            record = measure_loop("records.record", **options)
            values[name].append(results["train_seconds"] / sum(record["seconds"][1:]))
            values[f"{name}_flops"].append(flops / record_flops(name))
            values[f"accuracy_{name}"].append(record["results"]["accuracy"])
            values[f"tta_{name}"].append(record["results"]["accuracy_tta"])
        shown = (f"{name} {of_rounds[-1]:.4f}" for name, of_rounds in values.items())
        print(f"    {', '.join(shown)}; {results['train_seconds']:.0f} s", flush=True)
    return {f"time_to_accuracy/{name}": (values[name], unit) for name, unit in units.items()}


def record(recipe, images, seed, bf16, steps=None):
    """Trains by one of `RECORDS`; yields before the first step, after each, and after the test.

    Our own writing: filters are orthogonalized with the coefficients of utils/muon.py, and the
    whole filter decays before its update, not after.

    Args:
        recipe (str): a name in `RECORDS`.
        images (str): CIFAR-10, as for train_cifar.py.
        steps (int | None): those of a shortened run.

    Returns:
        dict: `accuracy` on the test set, and `accuracy_tta` with views of the least certain images.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    devices.keep_freed_memory()
    published, splits = SimpleNamespace(**RECORDS[recipe]), load_arrays(images, seed=seed).splits
    train, test = (
        Split(splits[split].images.to(device), splits[split].labels.to(device), device)
        for split in ("train", "test")
    )
    mean, std = (value.to(device) for value in train.mean_and_std())
    precision = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    torch.manual_seed(seed)
    model, optimizer = record_network(recipe)
    model.fit_whitening(normalize(train.images[:5000], mean, std).cpu())
    model.to(device)
    per_epoch, total, whiten_steps = record_steps(published, len(train))
    filters, whitening = optimizer.param_groups[:2]
    rates = [group["lr"] for group in optimizer.param_groups]
    first, more = published.norm_every
    normed = 0  # steps since the last scaling of the filters
    yield
    for step, ids in enumerate(batches(len(train), published.batch_size, steps or total)):
        batch = train.batch(ids)
        shown, _ = augment(batch["images"], ids, step // per_epoch, seed, padding=2)
        shown = jitter(normalize(shown, mean, std), published.brightness, published.contrast)
        model.whiten.bias.requires_grad_(step < whiten_steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / (whiten_steps if group is whitening else total))
        normed += 1
        filters["fixed_norm"] = normed >= first + int(more * (step + 1) / total)
        normed *= not filters["fixed_norm"]
        with precision:
            smoothing = dict(label_smoothing=published.label_smoothing, reduction="sum")
            loss = F.cross_entropy(model(shown), batch["labels"], **smoothing)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda" and step + 1 == (steps or total):
            torch.cuda.synchronize()  # the time of this step includes what the GPU has left to do
        yield
    model.eval()
    with torch.no_grad(), precision:
        shown = normalize(test.images, mean, std)
        outputs = torch.cat([model(part).float() for part in shown.split(2000)])
        certainty = outputs.softmax(1).amax(1)
        again = certainty.topk(int(published.viewed * len(test)), largest=False).indices
        views = [view_all(model, shown[some], published.views) for some in again.split(2000)]
        with_views = outputs.index_copy(0, again, torch.cat(views))
    found = {"accuracy": outputs, "accuracy_tta": with_views}
    right = {k: (v.argmax(1) == test.labels).double().mean().item() for k, v in found.items()}
    yield
    return right


def record_steps(recipe, samples):
    """The steps of an epoch, of the training, and of the training of the whitening's bias."""
    per_epoch = samples // recipe.batch_size
    return per_epoch, *(math.ceil(n * per_epoch) for n in (recipe.epochs, recipe.whiten_epochs))


def record_network(name):
    """Builds the model of one of `RECORDS`, and its optimizer."""
    recipe, model = SimpleNamespace(**RECORDS[name]), train_cifar.build_model("fastnet", 10)
    for place, layer in enumerate(model.blocks):
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum, layer.eps = recipe.batch_norm, 1e-12
        elif isinstance(layer, nn.GELU):
            model.blocks[place] = recipe.activation()
    filters = [layer.weight for layer in model.blocks if isinstance(layer, nn.Conv2d)]
    biases = [layer.bias for layer in model.blocks if isinstance(layer, nn.BatchNorm2d)]
    muon = dict(muon=True, momentum=recipe.momentum, iterations=3, weight_decay=recipe.filter_decay)
    groups = [dict(params=filters, lr=recipe.lr, **muon)]
    # The published head has weights `width` times as large and divides its outputs by that.
    head_lr = recipe.head_lr / model.head.in_features**2
    for parameters, lr in (
        ([model.whiten.bias], recipe.bias_lr),
        (biases, recipe.bias_lr),
        ([model.head.weight], head_lr),
    ):
        groups.append(dict(params=parameters, lr=lr, weight_decay=recipe.decay / lr, muon=False))
    return model, MuonSGD(groups, lr=recipe.lr, momentum=recipe.sgd_momentum, nesterov=True)


def jitter(images, brightness, contrast):
    """Changes normalized images [batch, 3, height, width], each by other random amounts."""
    if not brightness and not contrast:
        return images
    shift, scale = torch.rand(2, len(images), 1, 1, 1, device=images.device) * 2 - 1
    return (images + brightness * shift) * (1 + contrast * scale)


def view_all(model, images, weights):
    """The weighted sum of the outputs for images and two shifted ones, each also mirrored."""
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    views = images, padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]
    outputs = 0
    for weight, view in zip(weights, views, strict=True):
        for image in (view, view.flip(-1)):
            outputs = outputs + weight * model(image).float()
    return outputs


def record_flops(name):
    """Counts the operations of one of `RECORDS` on 50,000 training and 10,000 test images."""
    recipe = SimpleNamespace(**RECORDS[name])
    _, total, whiten_steps = record_steps(recipe, 50_000)
    build = partial(record_network, name)
    with_bias, without = (
        step_flops(build, recipe.batch_size, 32, whiten_bias) for whiten_bias in (True, False)
    )
    training = whiten_steps * with_bias + (total - whiten_steps) * without
    first_view = recipe.viewed < 1  # else the six views are all
    return training + (first_view + 6 * recipe.viewed) * evaluation_flops(10_000)


def step_flops(build, batch_size, size, whiten_bias=True):
    """Counts the floating-point operations of a training step of a model and its optimizer.

    They are those of the forward pass, the backward pass and the optimizer. PyTorch counts those of
    convolutions and matrix products, without computing anything: two for a multiplication and
    addition.

    Args:
        build: returns the model and the optimizer.
        whiten_bias (bool): whether the bias of the first layer is trained.
    """
    with torch.device("meta"):
        model, optimizer = build()
        model.whiten.bias.requires_grad_(whiten_bias)
        for group in optimizer.param_groups:
            group["fused"] = False  # not on this device; the operations are the same
        images = torch.empty(batch_size, 3, size, size)
        labels = torch.zeros(batch_size, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return counter.get_total_flops()


def evaluation_flops(count):
    """Counts the operations of a forward pass of `count` images of full size."""
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        train_cifar.build_model("fastnet", 10)(torch.empty(count, 3, 32, 32))
    return counter.get_total_flops()
