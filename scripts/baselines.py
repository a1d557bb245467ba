"""The loops that benchmark.py compares the training scripts with, in plain PyTorch.

    python scripts/baselines.py tutorial --options '{"steps": 20, "batch_size": 480}'

Prints the seconds of each step and the peak memory, as JSON. With torchrun, `plain_cifar` uses DDP over gloo.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()  # ends this process when the benchmark that started it does

import torch
import torch.nn.functional as F
import train_cifar
import train_gpt
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from utils import report
from utils.arguments import Parser
from utils.augment import augment, normalize
from utils.image_data import BatchedImages, as_is, synthetic_images
from utils.text_data import Windows, synthetic_text

GPT = dict(n_layer=4, n_head=4, n_embd=128, block_size=64)  # nanoGPT's CPU setting
GPT_BATCH = 12
MATRIX, COPIED = 2048, 2**28  # rows and columns; bytes, far more than any cache holds
RECORD_BATCH, RECORD_EPOCHS = 2000, 8  # airbench94_muon, github.com/KellerJordan/cifar10-airbench
PICTURES = dict(batch_size=32, num_workers=2, persistent_workers=True)


def plain_cifar(model, batch_size, steps):
    """train_cifar.py as a plain PyTorch loop, with DDP if there are several processes; yields after each step."""
    rank, world = connect()
    data = synthetic_images(0)
    mean, std = data.train.mean_and_std()
    rows, shape = data.train.images.flatten(1), data.train.images.shape[1:]
    torch.manual_seed(0)
    args = SimpleNamespace(model=model, momentum=0.85, lr_schedule="linear", **{"warmup": 0.2, **train_cifar.RECIPES[model]})
    network = train_cifar.build_model(model, len(data.class_names))
    optimizer = train_cifar.build_optimizer(network, args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: train_cifar.lr_multiplier(step / steps, args))
    parallel = nn.parallel.DistributedDataParallel(network) if world > 1 else network
    smoothing = getattr(args, "label_smoothing", 0.0)
    for step, ids in enumerate(batches(len(rows), batch_size, steps)):
        ids = ids.chunk(world)[rank]
        size = train_cifar.image_size_at(step / steps, args)
        images, keep = augment(rows[ids].view(-1, *shape), ids, 0, 0, padding=2, cutout=0)
        outputs = parallel(normalize(images, mean, std, keep, size))
        loss = F.cross_entropy(outputs, data.train.labels[ids], label_smoothing=smoothing)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield


def record_cifar(steps, bf16):
    """The network of train_cifar.py at the batch size of airbench94_muon, always at full size; yields after each step."""
    torch.manual_seed(0)
    model, optimizer = fastnet()
    images = torch.randn(RECORD_BATCH, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (RECORD_BATCH,))
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def fastnet():
    """The default model of train_cifar.py and its optimizer."""
    model = train_cifar.build_model("fastnet", 10)
    args = SimpleNamespace(model="fastnet", momentum=0.85, **train_cifar.RECIPES["fastnet"])
    return model, train_cifar.build_optimizer(model, args)


def cifar_flops(batch_size, size):
    """Floating-point operations of a training step of that model: forward pass, backward pass and optimizer.

    PyTorch counts those of convolutions and matrix products, without computing anything: two for a multiplication and addition.
    """
    with torch.device("meta"):
        model, optimizer = fastnet()
        images, labels = torch.empty(batch_size, 3, size, size), torch.zeros(batch_size, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return counter.get_total_flops()


def gpt_flops():
    """The same of a training step of train_gpt.py in nanoGPT's CPU setting."""
    with torch.device("meta"):
        model, optimizer = small_gpt()
        windows = torch.zeros(GPT_BATCH, GPT["block_size"], dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(model(windows).flatten(0, 1), windows.flatten()).backward()
            optimizer.step()
    return counter.get_total_flops()


def matrix_product(steps, bf16):
    """The products of two square matrices; yields after each."""
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


def small_gpt():
    """The model of train_gpt.py in nanoGPT's CPU setting, and its optimizer."""
    model = train_gpt.GPT(**GPT)
    return model, train_gpt.build_optimizer(model, SimpleNamespace(optimizer="muon", **train_gpt.RECIPES["muon"]))


def plain_gpt(steps):
    """train_gpt.py as a plain PyTorch loop, in nanoGPT's CPU setting; yields after each step."""
    torch.manual_seed(0)
    model, optimizer = small_gpt()
    args = SimpleNamespace(lr_schedule="linear", warmup_steps=50)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: train_gpt.lr_multiplier(step, steps, args))
    windows = Windows(torch.frombuffer(bytearray(synthetic_text(0)), dtype=torch.uint8), GPT["block_size"])
    for ids in batches(len(windows), GPT_BATCH, steps):
        batch = windows.__getitems__(ids.tolist())
        F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield


def usual_gpt(steps):
    """nanoGPT's CPU setting in PyTorch's own layers, with GELU, layer norm and AdamW; yields after each step."""
    torch.manual_seed(0)
    width, length = GPT["n_embd"], GPT["block_size"]
    layer = nn.TransformerEncoderLayer(
        width, GPT["n_head"], 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True, bias=False
    )
    blocks = nn.TransformerEncoder(layer, GPT["n_layer"], enable_nested_tensor=False)
    embed, position, head = nn.Embedding(256, width), nn.Embedding(length, width), nn.Linear(width, 256, bias=False)
    parameters = [weight for module in (blocks, embed, position, head) for weight in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-3, (0.9, 0.99), weight_decay=0.1)
    mask, places = nn.Transformer.generate_square_subsequent_mask(length), torch.arange(length)
    text = torch.frombuffer(bytearray(synthetic_text(0)), dtype=torch.uint8).long()
    for _ in range(steps):
        start = torch.randint(len(text) - length - 1, (GPT_BATCH,))
        windows = torch.stack([text[i : i + length + 1] for i in start])
        logits = head(blocks(embed(windows[:, :-1]) + position(places), mask, is_causal=True))
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield


def usual_pictures(folder, steps):
    """Loads photos with torchvision's usual data set and transforms; yields after each pass."""
    import torchvision.transforms as T
    from torchvision.datasets import ImageFolder

    normalized = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    transform = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), normalized])
    dataset = ImageFolder(f"{folder}/photos/train", transform)
    yield from passes(DataLoader(dataset, shuffle=True, drop_last=True, **PICTURES), steps, lambda batch: batch)


def our_pictures(folder, steps, cache=False):
    """Loads photos as train_images.py does, to normalized batches; yields after each pass."""
    from utils import topology
    from utils.image_cache import cached
    from utils.image_files import EpochSampler, ImageBatches, TrainTransform
    from utils.image_folder import load_pictures
    from utils.pretrained import preprocessing

    topology.keep_freed_memory()
    pictures, preprocess = load_pictures(f"{folder}/photos").splits["train"], preprocessing("resnet50", None)
    if cache:
        one = SimpleNamespace(is_local_main_process=True, num_processes=1)
        pictures = cached(one, pictures, "train", preprocess["resize"], Path(folder) / "cache")
    mean, std = (255 * torch.tensor(preprocess[name]) for name in ("mean", "std"))
    dataset, sampler = ImageBatches(pictures, TrainTransform(0, 224, preprocess)), EpochSampler(len(pictures), 32, 0)
    loader = DataLoader(dataset, sampler=sampler, collate_fn=as_is, **PICTURES)
    yield from passes(loader, steps, lambda batch: normalize(batch["images"], mean, std))


def cached_pictures(folder, steps):
    """Loads the same photos from the cache of train_images.py."""
    return our_pictures(folder, steps, cache=True)


def passes(loader, count, use):
    """Goes through `loader` several times; yields after each."""
    torch.set_num_threads(1)  # of this process, which only normalizes: the workers have the cores
    for _ in range(count):
        for batch in loader:
            use(batch)
        yield


class PerSample(Dataset):
    """Decoded PIL images, transformed one by one, like torchvision's CIFAR10 data set."""

    def __init__(self, split, cutout=False):
        import torchvision.transforms as T
        from PIL import Image

        self.labels, self.images = split.labels.tolist(), [Image.fromarray(i.permute(1, 2, 0).numpy()) for i in split.images]
        steps = [T.RandomCrop(32, padding=4, padding_mode="reflect"), T.RandomHorizontalFlip(), T.ToTensor()]
        steps += [T.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))]
        steps += [T.RandomErasing(1.0, (1 / 16, 1 / 16), (1, 1))] if cutout else []
        self.transform = T.Compose(steps)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def tutorial(steps, batch_size, batched=False, channels_last=False, bf16=False, sizes=(32,)):
    """The usual tutorial's loop with the default network, and with one improvement after the other; yields after each step."""
    data = synthetic_images(0)
    mean, std = data.train.mean_and_std()
    torch.manual_seed(0)
    model, optimizer = fastnet()
    if not channels_last:
        model = model.to(memory_format=torch.contiguous_format)
    common = dict(batch_size=batch_size, shuffle=True, drop_last=True)
    if batched:
        loader = DataLoader(BatchedImages(data.train), collate_fn=as_is, **common)
    else:
        loader = DataLoader(PerSample(data.train), num_workers=2, persistent_workers=True, **common)
    step = 0
    while step < steps:
        for batch in loader:
            size = sizes[step * len(sizes) // steps]
            if batched:
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
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    return int(os.environ.get("RANK", 0)), world


LOOPS = (plain_cifar, record_cifar, plain_gpt, usual_gpt, usual_pictures, our_pictures, cached_pictures, tutorial)
LOOPS += (matrix_product, copy)
LOOPS = {loop.__name__: loop for loop in LOOPS}


def main():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--options", default="{}", help="the arguments of the loop, as JSON")
    args = parser.parse_args()
    seconds, start_time = [], time.perf_counter()
    for _ in LOOPS[args.loop](**json.loads(args.options)):
        now = time.perf_counter()
        seconds.append(now - start_time)
        start_time = now
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # without it, a process that uses gloo occasionally aborts at exit
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps({"seconds": seconds, "memory": report.memory_bytes(torch.device("cpu"))}))


if __name__ == "__main__":
    exits.run(main)
