"""Runs one of the loops that benchmark.py compares the training scripts with, in plain PyTorch.

    python scripts/baselines.py tutorial --options '{"steps": 20, "batch_size": 480}'

Prints the seconds of each step, the peak memory, and what the loop returns, as JSON. With torchrun,
`plain_cifar` uses DDP over gloo.
"""

import hashlib
import json
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # ends this process when the benchmark that started it does

import torch
import torch.nn.functional as F
import train_cifar
import train_gpt
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from utils import weight_files
from utils.data.loaders import already_a_batch
from utils.images.arrays import Split, load_arrays, synthetic_arrays
from utils.images.augment import augment, normalize
from utils.language.text import Windows, synthetic_text
from utils.muon import MuonSGD
from utils.run import devices, entry
from utils.run.arguments import Parser
from utils.run.metrics import memory_bytes

GPT = dict(n_layer=4, n_head=4, n_embd=128, block_size=64)  # nanoGPT's CPU setting
GPT_BATCH = 12
MATRIX, COPIED = 2048, 2**28  # rows and columns; bytes, far more than any cache holds
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
IMAGE_LOADER = dict(batch_size=32, num_workers=2, persistent_workers=True)


# ------------------------------------------------------------------------------------------- CIFAR


def plain_cifar(model, batch_size, steps):
    """train_cifar.py as a plain PyTorch loop; yields after each step.

    With DDP, if there are several processes.
    """
    devices.keep_freed_memory()  # as the scripts do: what is compared is the loop
    rank, world = connect()
    data = synthetic_arrays(0)
    split = data.splits["train"]
    mean, std = split.mean_and_std()
    torch.manual_seed(0)
    args = SimpleNamespace(model=model, lr_schedule="linear", **train_cifar.RECIPES[model])
    plan = SimpleNamespace(total_steps=steps)
    network = train_cifar.build_model(model, len(data.class_names))
    optimizer = train_cifar.build_optimizer(network, args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: train_cifar.lr_multiplier(step, plan, args)
    )
    parallel = nn.parallel.DistributedDataParallel(network) if world > 1 else network
    for step, ids in enumerate(batches(len(split), batch_size, steps)):
        ids = ids.chunk(world)[rank]
        size = train_cifar.image_size_at(step / steps, args)
        images, keep = augment(split.images[ids], ids, 0, 0, padding=2, cutout=0)
        outputs = parallel(normalize(images, mean, std, keep, size))
        smoothing = args.label_smoothing
        loss = F.cross_entropy(outputs, split.labels[ids], label_smoothing=smoothing)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield


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


def tutorial(steps, batch_size, batched=False, channels_last=False, bf16=False, sizes=(32,)):
    """The usual tutorial's loop with the default network; yields after each step.

    Each option is one improvement over the tutorial.
    """
    data = synthetic_arrays(0)
    split = data.splits["train"]
    mean, std = split.mean_and_std()
    torch.manual_seed(0)
    model, optimizer = fastnet()
    if not channels_last:
        model = model.to(memory_format=torch.contiguous_format)
    options = dict(batch_size=batch_size, shuffle=True, drop_last=True)
    if batched:
        loader = DataLoader(range(len(split)), **options)
    else:
        loader = DataLoader(PerSample(split), num_workers=2, persistent_workers=True, **options)
    step = 0
    while step < steps:
        for batch in loader:
            size = sizes[step * len(sizes) // steps]
            if batched:
                batch = split.batch(batch)
                labels = batch["labels"]
                images, keep = augment(batch["images"], batch["ids"], 0, 0, padding=2)
                images = normalize(images, mean, std, keep, size)
                images = images if channels_last else images.contiguous()
            else:
                images, labels = batch
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            yield
            step += 1
            if step == steps:
                break


class PerSample(Dataset):
    """Decoded PIL images, transformed one by one, like torchvision's CIFAR10 data set."""

    def __init__(self, split, cutout=False):
        import torchvision.transforms as T
        from PIL import Image

        arrays = split.images.permute(0, 2, 3, 1).numpy()
        self.images = [Image.fromarray(array) for array in arrays]
        self.labels = split.labels.tolist()
        steps = [
            T.RandomCrop(32, padding=4, padding_mode="reflect"),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)),
        ]
        if cutout:
            steps.append(T.RandomErasing(1.0, (1 / 16, 1 / 16), (1, 1)))
        self.transform = T.Compose(steps)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def fastnet():
    """Builds the default model of train_cifar.py and its optimizer."""
    model = train_cifar.build_model("fastnet", 10)
    args = SimpleNamespace(model="fastnet", **train_cifar.RECIPES["fastnet"])
    return model, train_cifar.build_optimizer(model, args)


def cifar_flops(batch_size, size):
    """Counts the operations of a training step of the default model of train_cifar.py."""
    return step_flops(fastnet, batch_size, size)


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


# --------------------------------------------------------------------------------------------- GPT


def plain_gpt(steps):
    """train_gpt.py as a plain PyTorch loop, in nanoGPT's CPU setting; yields after each step."""
    devices.keep_freed_memory()
    torch.manual_seed(0)
    model, optimizer = small_gpt()
    args = SimpleNamespace(lr_schedule="linear", warmup_steps=50)
    plan = SimpleNamespace(total_steps=steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: train_gpt.lr_multiplier(step, plan, args)
    )
    windows = Windows(text_tensor(), GPT["block_size"])
    for ids in batches(len(windows), GPT_BATCH, steps):
        batch = windows.__getitems__(ids.tolist())
        logits = model(batch["inputs"])
        F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield


def usual_gpt(steps):
    """nanoGPT's CPU setting in PyTorch's own layers; yields after each step.

    With GELU, layer norm and AdamW.
    """
    torch.manual_seed(0)
    width, length = GPT["n_embd"], GPT["block_size"]
    layer = nn.TransformerEncoderLayer(
        width, GPT["n_head"], 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True, bias=False
    )
    blocks = nn.TransformerEncoder(layer, GPT["n_layer"], enable_nested_tensor=False)
    embed, position = nn.Embedding(256, width), nn.Embedding(length, width)
    head = nn.Linear(width, 256, bias=False)
    parameters = list(nn.ModuleList([blocks, embed, position, head]).parameters())
    optimizer = torch.optim.AdamW(parameters, 1e-3, (0.9, 0.99), weight_decay=0.1)
    mask, places = nn.Transformer.generate_square_subsequent_mask(length), torch.arange(length)
    text = text_tensor().long()
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (GPT_BATCH,))
        windows = torch.stack([text[start : start + length + 1] for start in starts])
        logits = head(blocks(embed(windows[:, :-1]) + position(places), mask, is_causal=True))
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield


def small_gpt():
    """Builds the model of train_gpt.py in nanoGPT's CPU setting, and its optimizer."""
    model = train_gpt.GPT(**GPT)
    args = SimpleNamespace(optimizer="muon", **train_gpt.RECIPES["muon"])
    return model, train_gpt.build_optimizer(model, args)


def text_tensor():
    """Synthetic text: uint8 [bytes]."""
    return torch.frombuffer(bytearray(synthetic_text(0)), dtype=torch.uint8)


def gpt_flops():
    """Counts the operations of a training step of `small_gpt`."""
    model, optimizer = small_gpt()
    windows = torch.zeros(GPT_BATCH, GPT["block_size"], dtype=torch.int64)
    # The counter does not know the attention of CPUs in one kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(windows, windows).mean().backward()
        optimizer.step()
    return counter.get_total_flops()


# ---------------------------------------------------------------------------------- loading images


def usual_images(folder, steps):
    """Loads photos with torchvision's usual data set and transforms; yields after each pass."""
    import torchvision.transforms as T
    from torchvision.datasets import ImageFolder

    transform = T.Compose(
        [
            T.RandomResizedCrop(224),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    dataset = ImageFolder(f"{folder}/photos/train", transform)
    loader = DataLoader(dataset, shuffle=True, drop_last=True, **IMAGE_LOADER)
    yield from passes(loader, steps, lambda batch: batch)


def our_images(folder, steps, cache=False):
    """Loads photos as train_images.py does, to normalized batches; yields after each pass."""
    # Here, because importing torchvision takes a second.
    from utils.data.loaders import EpochSampler
    from utils.images.image_batches import ImageBatches
    from utils.images.image_cache import cached
    from utils.images.pretrained import preprocessing
    from utils.images.sources import find_images
    from utils.images.transforms import TrainTransform

    devices.keep_freed_memory()
    images = find_images(f"{folder}/photos").splits["train"]
    preprocess = preprocessing("resnet50", None)
    if cache:
        one = SimpleNamespace(is_local_main_process=True, num_processes=1)
        images = cached(one, images, "train", preprocess["resize"], Path(folder) / "cache")
    mean, std = (255 * torch.tensor(preprocess[name]) for name in ("mean", "std"))
    dataset = ImageBatches(images, TrainTransform(0, preprocess))
    sampler = EpochSampler(len(images), IMAGE_LOADER["batch_size"], 0, with_epoch=True)
    loader = DataLoader(dataset, sampler=sampler, collate_fn=already_a_batch, **IMAGE_LOADER)
    yield from passes(loader, steps, lambda batch: normalize(batch["images"], mean, std))


def cached_images(folder, steps):
    """Loads the same photos from the cache of train_images.py."""
    return our_images(folder, steps, cache=True)


@torch.no_grad()
def plain_scoring(folder, run, steps, forward):
    """Loads the photos in `folder` as evaluate.py does, with what it reads in the folder `run`, and
    with `forward` classifies them; yields after each pass.
    """
    from utils.images import pretrained
    from utils.images.image_batches import ImageBatches
    from utils.images.sources import find_to_evaluate
    from utils.images.transforms import EvalTransform

    devices.keep_freed_memory()
    config = weight_files.read(run).config
    preprocess, model = config["preprocessing"], pretrained.build(config)
    model = model.to(memory_format=torch.channels_last).eval()
    mean, std = (255 * torch.tensor(preprocess[name]) for name in ("mean", "std"))
    split = find_to_evaluate(folder, config["class_names"]).splits["test"]
    dataset = ImageBatches(split, EvalTransform(preprocess))
    options = IMAGE_LOADER | {"batch_size": 64}
    loader = DataLoader(dataset, collate_fn=already_a_batch, **options)

    def classify(batch):
        model(normalize(batch["images"], mean, std)).argmax(1)

    use = classify if forward else lambda batch: batch
    yield from passes(loader, steps, use, threads=None)


def passes(loader, count, use, threads=1):
    """Calls `use` on all batches of `loader`, `count` times; yields after each pass.

    Args:
        threads (int | None): of this process; 1: it only normalizes, and the workers have the
            cores; None: the default.
    """
    if threads:
        torch.set_num_threads(threads)
    for _ in range(count):
        for batch in loader:
            use(batch)
        yield


# --------------------------------------------------------------------------- limits of the machine


def matrix_product(steps, bf16):
    """Multiplies two square matrices; yields after each product."""
    left, right = torch.randn(2, MATRIX, MATRIX, dtype=torch.bfloat16 if bf16 else torch.float32)
    for _ in range(steps):
        torch.mm(left, right)
        yield


def copy(steps):
    """Copies `COPIED` bytes in memory; yields after each copy."""
    source = torch.zeros(COPIED, dtype=torch.uint8)
    target = torch.zeros_like(source)
    for _ in range(steps):
        target.copy_(source)
        yield


def sha256(steps):
    """Hashes `COPIED` bytes, as of a checkpoint, on one core; yields after each time."""
    source = bytes(COPIED)
    for _ in range(steps):
        hashlib.sha256(source).digest()
        yield


# ---------------------------------------------------------------------------------- language models


def lm_loss(model, chunked, steps):
    """Forward and backward passes of the causal language model in a folder, on 4 blocks of 1,024
    tokens: with its own loss, or with that of train_lm.py.
    """
    from transformers import AutoModelForCausalLM

    from utils.language.lm_loss import chunk_loss

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    tokens = torch.randint(256, (4, 1024), device=device)
    targets = tokens.roll(-1, dims=1)
    if chunked:
        chunk_loss(model)
    for _ in range(steps):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            if chunked:
                loss = model(input_ids=tokens, targets=targets) / targets.numel()
            else:
                loss = model(input_ids=tokens, labels=tokens, shift_labels=targets).loss
        loss.backward()
        model.zero_grad()
        yield loss.item()


# -------------------------------------------------------------------------------------------- main


def batches(samples, batch_size, steps):
    """Yields the ids of `steps` batches, in another order in each epoch."""
    while True:
        for ids in torch.randperm(samples).split(batch_size):
            if len(ids) == batch_size:
                if steps == 0:
                    return
                steps -= 1
                yield ids


def connect():
    """Connects the processes of torchrun over gloo; returns (rank, number of processes)."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(max(1, devices.cores() // world))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    return int(os.environ.get("RANK", 0)), world


LOOPS = {
    loop.__name__: loop
    for loop in (
        plain_cifar,
        record,
        tutorial,
        plain_gpt,
        usual_gpt,
        usual_images,
        our_images,
        cached_images,
        plain_scoring,
        matrix_product,
        copy,
        sha256,
        lm_loss,
    )
}


def main():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("loop", choices=LOOPS, help="which loop to run")
    parser.add_argument("--options", default="{}", help="the arguments of the loop, as JSON")
    args = parser.parse_args()
    seconds, results = [], {}

    def steps():
        results.update((yield from LOOPS[args.loop](**json.loads(args.options))) or {})

    start_time = time.perf_counter()
    for _ in steps():
        now = time.perf_counter()
        seconds.append(now - start_time)
        start_time = now
    if torch.distributed.is_initialized():
        # Without it, a process that uses gloo occasionally aborts at exit.
        torch.distributed.destroy_process_group()
    if process.is_main():
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        answer = {"seconds": seconds, "memory": memory_bytes(device), "results": results}
        print(json.dumps(answer))


if __name__ == "__main__":
    entry.run(main)
