"""train_images.py and evaluate.py: loading, scoring, and what helps rare classes."""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from measuring import (
    QUIET,
    SCRIPTS,
    environment,
    make_photos,
    measure_loop,
    measure_script,
    print_speeds,
    ratios_of,
    repeat_files,
    script_words,
    seconds_of,
)
from torch.utils.data import DataLoader

from utils import weight_files
from utils.data.loaders import already_a_batch
from utils.images.arrays import load_arrays
from utils.images.augment import normalize
from utils.run import devices, process

IMAGE_LOADER = dict(batch_size=32, num_workers=2, persistent_workers=True)


def image_loading(args, rounds):
    """Images per second of train_images.py, without and with --cache, over ImageFolder.

    500 x 375 JPEGs, two workers each, to normalized batches of random 224 x 224 crops.
    """
    passes, count = 4, 160 if args.quick else 960
    speeds = {"usual_images": [], "our_images": [], "cached_images": []}
    with tempfile.TemporaryDirectory() as folder:
        make_photos(Path(folder) / "photos" / "train", count)
        make_photos(Path(folder) / "photos" / "val", 2)
        for _ in rounds.each():
            for name, values in speeds.items():
                seconds = measure_loop(rounds, f"images.{name}", folder=folder, steps=passes)[
                    "seconds"
                ]
                # The first pass starts the workers.
                values.append(count * (passes - 1) / sum(seconds[1:]))
    print_speeds(speeds, "images/s")
    unit = "images per second over ImageFolder (more is better), ratio"
    return {
        f"image_loading/{name}": (
            ratios_of(speeds[f"{name}_images"], speeds["usual_images"]),
            unit,
        )
        for name in ("our", "cached")
    }


def scoring(args, rounds):
    """Images per second of evaluate.py, from its start to its end, on 100,000 500 x 375 JPEGs.

    With two workers and a small model at 64 pixels: over its loader alone, and over a plain loop of
    this loader and the model.
    """
    files, different = (2000, 100) if args.quick else (100_000, 1000)
    speeds = {"loader": [], "loader_and_model": [], "evaluate.py": []}
    with tempfile.TemporaryDirectory() as folder:
        few, many, run = f"{folder}/few", f"{folder}/many", f"{folder}/run"
        for data, split, count in ((few, "train", 8), (few, "val", 2), (many, "test", different)):
            make_photos(Path(data, split), count)
        repeat_files(Path(many, "test"), files // different)
        options = "--model mobilenet_v3_small --image_size 64 --batch_size 8 --max_train_steps 1"
        train_words = script_words(f"train_images.py --dataset {few} {options}", run)
        subprocess.run([sys.executable, *train_words], check=True, env=environment(), **QUIET)
        words = script_words(f"evaluate.py {run} --dataset {many} --num_workers 2", f"{folder}/out")

        def evaluate():
            subprocess.run([sys.executable, *words], check=True, env=environment(), **QUIET)

        for _ in rounds.each():
            for name in ("loader", "loader_and_model"):
                options = dict(folder=many, run=run, forward=name != "loader", steps=1)
                (seconds,) = measure_loop(rounds, "images.plain_scoring", **options)["seconds"]
                speeds[name].append(files / seconds)
            speeds["evaluate.py"].append(files / seconds_of(rounds, evaluate))
    print_speeds(speeds, "images/s")
    ours = speeds.pop("evaluate.py")
    unit = "images per second over a plain loop (more is better), ratio"
    return {f"scoring/{name}": (ratios_of(ours, theirs), unit) for name, theirs in speeds.items()}


def imbalance(args, rounds):
    """train_images.py on imbalanced CIFAR-10: 5,000 images of the first class, 50 of the last.

    Plain, with --class_weights balanced, and with the recipe rare_classes.diff, with
    another seed in each round: accuracy and macro F1 score on the whole test set, and the mean
    recall of the three rarest classes.
    """
    names = ("accuracy", "macro_f1", "rare_recall")
    model = "--model shufflenet_v2_x0_5 --image_size 64 --min_scale 0.35 --eval_resize 64"
    length = "--batch_size 64 --optimizer adamw --lr 2e-3 --weight_decay 0.05 --epochs 8"
    length += " --max_train_steps 4" if args.quick else ""
    options = (
        f"{model} {length} --warmup_epochs 1 --eval_every 100000 --checkpoint_every 0 --track none"
    )
    with tempfile.TemporaryDirectory() as folder:
        data, rarest = write_imbalanced(args.images, folder)
        sampled = write_recipe("rare_classes", folder)
        ways = {
            "plain": f"train_images.py --dataset {data} {options}",
            "weights": f"train_images.py --dataset {data} {options} --class_weights balanced",
            "sampler": f"{sampled} --dataset {data} {options}",
        }
        values = {f"{name}_{way}": [] for name in names for way in ways}
        for seed in rounds.each():
            for way, command in ways.items():
                _, results = measure_script(rounds, f"{command} --seed {seed}")
                recalls = [results["per_class"][name] for name in rarest]
                figures = [results["val_accuracy"], results["val_macro_f1"]]
                shown = ", ".join(f"{value:.3f}" for value in figures + recalls)
                print(f"    {way}: {shown} ({', '.join(rarest)})", flush=True)
                figures.append(statistics.mean(recalls))
                for name, value in zip(names, figures, strict=True):
                    values[f"{name}_{way}"].append(value)
    unit = "on the test set (more is better)"
    return {f"imbalance/{name}": (rounds, unit) for name, rounds in values.items()}


def write_imbalanced(images, folder):
    """Writes CIFAR-10 with 100 times as many training images of the first class as of the last.

    The test set stays as it is. It has the name of the split that train_images.py evaluates at
    the end, by which this benchmark selects nothing.

    Returns:
        tuple[str, list]: the file, for `--dataset`; the names of the three rarest classes.
    """
    data = load_arrays(images)
    train, test = data.splits["train"], data.splits["test"]
    of_classes = [(train.labels == label).nonzero()[:, 0] for label in range(10)]
    most = min(map(len, of_classes))
    kept = [ids[: round(most * 0.01 ** (label / 9))] for label, ids in enumerate(of_classes)]
    train = train.select(torch.cat(kept).numpy())
    path = Path(folder) / "imbalanced.npz"
    arrays = dict(train_images=train.images, train_labels=train.labels)
    arrays |= dict(val_images=test.images, val_labels=test.labels)
    np.savez(path, class_names=data.class_names, **arrays)
    return str(path), data.class_names[-3:]


def write_recipe(name, folder):
    """Writes train_images.py as a recipe changes it to `folder`; returns the file."""
    changed, recipe = Path(folder) / "train_changed.py", SCRIPTS / "recipes" / f"{name}.diff"
    words = ["patch", "-o", changed, SCRIPTS / "train_images.py", recipe]
    subprocess.run(words, check=True, **QUIET)
    (Path(folder) / "utils").symlink_to(Path(process.__file__).resolve().parents[1])
    return str(changed)


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
    dataset = ImageBatches(images, TrainTransform(0, 224, preprocess))
    sampler = EpochSampler(len(images), IMAGE_LOADER["batch_size"], 0)
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
