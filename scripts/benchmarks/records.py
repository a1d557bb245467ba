"""train_cifar.py against a record, airbench94, with the same network."""

import math
from collections import Counter
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

# airbench94_muon.py of github.com/KellerJordan/cifar10-airbench, with the network of
# train_cifar.py: 94 % on the original images of CIFAR-10, on one A100, in 2.59 s. Rates are for a
# loss that is summed over the batch.
BATCH_SIZE, EPOCHS = 2000, 8
WHITEN_EPOCHS = 3  # in which the bias of the whitening is trained
MUON_LR, MUON_MOMENTUM = 0.24, 0.6
BIAS_LR, HEAD_LR, SGD_MOMENTUM, DECAY = 0.053, 0.67, 0.85, 4e-3
DEFAULTS = SimpleNamespace(model="fastnet", lr_schedule="linear")  # of train_cifar.py
TEST_IMAGES = 10_000  # of CIFAR-10


def time_to_accuracy(args):
    """Training time of train_cifar.py on CIFAR-10, with another seed in each round.

    Over that of airbench94_muon, the record with the same network on the same images; also
    floating-point operations, and the accuracy of both.
    """
    bf16 = torch.cuda.is_available() or devices.has_bf16()
    batch = train_cifar.RECIPES["fastnet"]["batch_size"]
    command = f"train_cifar.py --dataset {args.images} --eval_every 100000"
    # In fewer epochs than by default, the accuracy of the record on the same images.
    command += " --checkpoint_every 0" + (" --max_train_steps 4" if args.quick else " --epochs 10")
    shortened = {"steps": 2} if args.quick else {}
    ratio = "time (flops: operations) over the record (less is better), ratio"
    units = {"airbench": ratio, "airbench_flops": ratio}
    units |= dict.fromkeys(("accuracy", "accuracy_airbench"), "test accuracy (more is better)")
    values = {name: [] for name in units}
    for seed in rounds(args):
        _, results = measure_script(f"{command} --seed {seed}", bf16=bf16)
        steps = results["global_step"]
        sizes = [train_cifar.image_size_at(step / steps, DEFAULTS) for step in range(1, steps + 1)]
        flops = evaluation_flops(TEST_IMAGES)
        for size, count in Counter(sizes).items():
            flops += count * step_flops(fastnet, batch, size)
        options = dict(images=args.images, seed=seed, bf16=bf16, **shortened)
        record = measure_loop("records.record", **options)
        values["airbench"].append(results["train_seconds"] / sum(record["seconds"][1:]))
        values["airbench_flops"].append(flops / record_flops())
        values["accuracy"].append(results["test_accuracy"])
        values["accuracy_airbench"].append(record["results"]["accuracy"])
        shown = (f"{name} {of_rounds[-1]:.4f}" for name, of_rounds in values.items())
        print(f"    {', '.join(shown)}; {results['train_seconds']:.0f} s", flush=True)
    return {f"time_to_accuracy/{name}": (values[name], unit) for name, unit in units.items()}


def record(images, seed, bf16, steps=None):
    """Trains as the record does; yields before the first step, after each, and after the test.

    Our own writing: filters are orthogonalized with the coefficients of utils/muon.py, and the
    whole filter decays before its update, not after.

    Args:
        images (str): CIFAR-10, as for train_cifar.py.
        steps (int | None): those of a shortened run.

    Returns:
        dict: `accuracy` on the test set.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    devices.keep_freed_memory()
    splits = load_arrays(images, seed=seed).splits
    train, test = (
        Split(splits[split].images.to(device), splits[split].labels.to(device))
        for split in ("train", "test")
    )
    mean, std = (value.to(device) for value in train.mean_and_std())
    precision = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    torch.manual_seed(seed)
    model, optimizer = record_network()
    model.fit_whitening(normalize(train.images[:5000], mean, std).cpu())
    model.to(device)
    per_epoch, total, whiten_steps = record_steps(len(train))
    whitening = optimizer.param_groups[1]
    rates = [group["lr"] for group in optimizer.param_groups]
    yield
    for step, ids in enumerate(batches(len(train), BATCH_SIZE, steps or total)):
        batch = train.batch(ids)
        shown = augment(batch["images"], ids, step // per_epoch, seed, padding=2)
        model.whiten.bias.requires_grad_(step < whiten_steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / (whiten_steps if group is whitening else total))
        with precision:
            outputs = model(normalize(shown, mean, std))
            smoothing = dict(label_smoothing=0.2, reduction="sum")
            loss = F.cross_entropy(outputs, batch["labels"], **smoothing)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda" and step + 1 == (steps or total):
            torch.cuda.synchronize()  # the time of this step includes what the GPU has left to do
        yield
    model.eval()
    with torch.no_grad(), precision:
        parts = normalize(test.images, mean, std).split(2000)
        outputs = torch.cat([model(part).float() for part in parts])
    accuracy = (outputs.argmax(1) == test.labels).double().mean().item()
    yield
    return {"accuracy": accuracy}


def record_steps(samples):
    """The steps of an epoch, of the training, and of the training of the whitening's bias."""
    per_epoch = samples // BATCH_SIZE
    return per_epoch, *(math.ceil(epochs * per_epoch) for epochs in (EPOCHS, WHITEN_EPOCHS))


def record_network():
    """Builds the model of the record and its optimizer."""
    model = train_cifar.build_model("fastnet", 10)
    norms = [layer for layer in model.blocks if isinstance(layer, nn.BatchNorm2d)]
    for layer in norms:
        layer.momentum, layer.eps = 0.4, 1e-12
    filters = [layer.weight for layer in model.blocks if isinstance(layer, nn.Conv2d)]
    muon = dict(muon=True, fixed_norm=True, iterations=3, weight_decay=0.0)
    groups = [dict(params=filters, lr=MUON_LR, momentum=MUON_MOMENTUM, **muon)]
    # The published head has weights `width` times as large and divides its outputs by that.
    head_lr = HEAD_LR / model.head.in_features**2
    for parameters, lr in (
        ([model.whiten.bias], BIAS_LR),
        ([layer.bias for layer in norms], BIAS_LR),
        ([model.head.weight], head_lr),
    ):
        groups.append(dict(params=parameters, lr=lr, weight_decay=DECAY / lr, muon=False))
    return model, MuonSGD(groups, lr=MUON_LR, momentum=SGD_MOMENTUM, nesterov=True)


def record_flops():
    """Counts the operations of the record on 50,000 training and 10,000 test images."""
    _, total, whiten_steps = record_steps(50_000)
    with_bias, without = (
        step_flops(record_network, BATCH_SIZE, 32, whiten_bias) for whiten_bias in (True, False)
    )
    training = whiten_steps * with_bias + (total - whiten_steps) * without
    return training + evaluation_flops(TEST_IMAGES)


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
