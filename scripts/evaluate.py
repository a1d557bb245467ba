"""Evaluates an image classifier trained by train_cifar.py or train_images.py, or classifies pictures with it.

    python scripts/evaluate.py --checkpoint runs/train_cifar
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/evaluate.py --checkpoint runs/train_cifar --tta
    python scripts/evaluate.py --checkpoint runs/train_images
    python scripts/evaluate.py --checkpoint runs/train_images --images holiday/

Reads a run's folder, one of its checkpoints or a `model.safetensors`, written by any topology. Prints the accuracy per class
and writes `results.json`, `predictions.png` and `confusion_matrix.png`; with --images, `predictions.csv` and `.json`, with the
classes of every picture in a folder, and `contact_sheet.png`. Of a run with --ema_decay it takes the averaged weights. Copy it
together with `train_cifar.py` and `train_images.py`, which hold the models and the evaluation.
"""

import contextlib
import csv
import io
import sys
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()  # before torch: a signal during the slow imports below must not be lost

import torch
import train_images
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from train_cifar import RECIPES, build_model, evaluate

from utils import plots, pretrained, topology, weights
from utils.arguments import Parser, number
from utils.augment import normalize
from utils.exits import UserError
from utils.files import read_json, write_json, write_text
from utils.image_cache import cores_per_process
from utils.image_data import BatchedImages, as_is, load_images
from utils.image_files import EvalTransform, ImageBatches
from utils.image_folder import load_pictures, unlabeled


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=topology.check_launch(), dataloader_config=DataLoaderConfiguration(split_batches=True))
    state, config, file = topology.run_on_main(accelerator, lambda: weights.read(args.checkpoint))
    trained, saved = topology.run_on_main(accelerator, lambda: records(file))
    config = config or saved
    if config and "preprocessing" in config:
        evaluate_pictures(accelerator, args, state, config, trained, file)
    elif args.images:
        raise UserError(f"{file} is not from train_images.py: --images needs its record of the preprocessing")
    else:
        evaluate_cifar(accelerator, args, state, config, trained, file)
    accelerator.end_training()


# ------------------------------------------------------------------------------------------------- train_cifar.py


def evaluate_cifar(accelerator, args, state, config, trained, file):
    """Evaluates a model of train_cifar.py on the test split."""
    name = args.model or (config or {}).get("model") or trained.get("model")
    if "n_embd" in (config or trained):
        raise UserError(f"{file} is a GPT: sample from it with `python scripts/train_gpt.py --sample {args.checkpoint}`")
    if name is None:
        raise UserError(f"{file} does not name its model: if it is one of train_cifar.py, give --model")
    if name not in RECIPES:
        raise UserError(f"{file} is not a model of train_cifar.py or train_images.py, but '{name}'")
    dataset, seed = args.dataset or trained.get("dataset", "uoft-cs/cifar10"), trained.get("seed", 0)
    data = topology.local_main_first(accelerator, lambda: load_images(dataset, seed))

    model = build_model(name, len(data.class_names))
    load_state(model, state, file, f"{name} with {len(data.class_names)} classes")
    # Each process evaluates its share of every batch.
    batch = topology.evaluation_batch(accelerator, len(data.test.labels), 250)
    loader = DataLoader(BatchedImages(data.test), batch, collate_fn=as_is)
    model, loader = accelerator.prepare(model, loader)
    mean, std = (x.to(accelerator.device) for x in data.train.mean_and_std())
    metrics = evaluate(accelerator, model, loader, mean, std, tta=args.tta)

    if accelerator.is_main_process:
        results = {"test_accuracy": metrics["accuracy"], "test_loss": metrics["loss"], "tta": args.tta, "weights": str(file)}
        with writing(args, file, "evaluation") as folder:
            plots.classification(folder, data, metrics["predictions"])
            write_json(folder / "results.json", results)
        print(plots.class_table(data, metrics["predictions"]))
        count = len(metrics["predictions"])
        summary = f"{metrics['accuracy']:.2%} of {count:,} test images correct, loss {metrics['loss']:.4f}"
        print(f"{file}: {summary}; pictures in {folder}")


# ------------------------------------------------------------------------------------------------ train_images.py


def evaluate_pictures(accelerator, args, state, config, trained, file):
    """Evaluates a model of train_images.py on its validation split, or classifies the pictures of --images."""
    if args.tta or args.model:
        raise UserError("--tta and --model are for models of train_cifar.py")
    look = EvalTransform(config["preprocessing"])
    if args.images:
        pictures, split = topology.run_on_all(accelerator, lambda: unlabeled(args.images)), None
        class_names = config["class_names"]
    else:
        options = {name: trained[name] for name in ("seed", "val_fraction", "image_column", "label_column") if name in trained}
        dataset = args.dataset or trained.get("dataset")
        if dataset is None:
            raise UserError(f"{file} does not name its data set: give --dataset")
        data = topology.local_main_first(accelerator, lambda: load_pictures(dataset, **options))
        split, class_names = "val" if "val" in data.splits else "test", data.class_names
        if class_names != config["class_names"]:
            raise UserError(
                f"--dataset {dataset} has other classes than {file}: {describe(class_names, config['class_names'])}"
            )
        pictures = data.splits[split]
    model, averaged = pretrained.build(config), file.parent / "custom_checkpoint_0.pkl"
    if averaged.exists():  # a checkpoint of a run with --ema_decay
        saved = topology.run_on_main(accelerator, lambda: torch.load(averaged, map_location="cpu", weights_only=True))
        state = {name.removeprefix("module."): value for name, value in saved.items() if name.startswith("module.")}
    load_state(model, state, file, config["model"])
    dataset = ImageBatches(pictures, look, "skip")
    workers = dict(num_workers=args.num_workers, collate_fn=as_is, worker_init_fn=exits.worker_init)
    loader = DataLoader(dataset, topology.evaluation_batch(accelerator, len(dataset), 64), **workers)
    model, loader = accelerator.prepare(model.to(memory_format=torch.channels_last), loader)
    mean, std = (255 * torch.tensor(config["preprocessing"][name]).to(accelerator.device) for name in ("mean", "std"))
    if args.images:
        return classify(accelerator, args, model, loader, mean, std, class_names, file)
    metrics, details = train_images.evaluate(accelerator, model, None, loader, mean, std)
    if accelerator.is_main_process:
        with writing(args, file, "evaluation") as folder:
            plots.of_pictures(folder, dataset, details, class_names)
            per_class = plots.class_accuracy(details, class_names)
            figures = {f"{split}_{name}": value for name, value in metrics.items()}
            write_json(folder / "results.json", {**figures, "per_class": per_class, "weights": str(file)})
        width = max(map(len, class_names))
        print("\n".join(f"  {name:{width}}  {100 * share:6.2f} %" for name, share in per_class.items()))
        count = (details["labels"] >= 0).sum().item()
        summary = f"{metrics['accuracy']:.2%} of {count:,} {split} images correct, loss {metrics['loss']:.4f}"
        print(f"{file}: {summary}; pictures in {folder}")


@torch.no_grad()
def classify(accelerator, args, model, loader, mean, std, class_names, file):
    """Writes the most likely classes of every picture: a CSV file, the same as JSON, and a sheet of the pictures."""
    model.eval()
    parts, pictures = [], loader.dataset.pictures
    for batch in loader:
        top = model(normalize(batch["images"], mean, std)).float().softmax(1).topk(min(5, len(class_names)))
        gathered = accelerator.gather_for_metrics((batch["ids"], batch["labels"], top.values, top.indices))
        parts.append([value.cpu() for value in gathered])
    ids, labels, probabilities, classes = (torch.cat(values) for values in zip(*parts, strict=True))
    if not torch.equal(ids, torch.arange(len(pictures))):
        raise RuntimeError(f"classified {len(ids)} of {len(pictures)} pictures, or not in order")
    if not accelerator.is_main_process:
        return
    rows = []
    for index, readable in enumerate((labels >= 0).tolist()):
        likely = zip(classes[index].tolist(), probabilities[index].tolist(), strict=True) if readable else ()
        rows.append({"file": pictures.name(index), "classes": [[class_names[c], round(p, 6)] for c, p in likely]})
    table = io.StringIO()
    columns = [name for rank in range(1, probabilities.shape[1] + 1) for name in (f"class_{rank}", f"probability_{rank}")]
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["file", *columns])
    writer.writerows([row["file"], *(value for pair in row["classes"] for value in pair)] for row in rows)
    with writing(args, file, "predictions") as folder:
        write_text(folder / "predictions.csv", table.getvalue())
        write_json(folder / "predictions.json", rows)
        plots.contact_sheet(folder / "contact_sheet.png", loader.dataset, rows)
    unreadable = sum(not row["classes"] for row in rows)
    note = f", {unreadable} of them unreadable" if unreadable else ""
    count = f"{len(rows)} picture{'s' * (len(rows) != 1)}"
    print(f"{count}{note}: see predictions.csv, predictions.json and contact_sheet.png in {folder}")


# ------------------------------------------------------------------------------------------------------------ both


def load_state(model, state, file, description):
    """Loads weights into a model. Raises UserError if they are of another one."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{file} does not hold a {description}: {str(error).splitlines()[1].strip()}") from None


def describe(found, expected):
    """The first difference between two lists of classes."""
    first = next((pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]), None)
    return f"{first[0]} instead of {first[1]}" if first else f"{len(found)} instead of {len(expected)}"


@contextlib.contextmanager
def writing(args, file, name):
    """Yields the folder for the output: --output_dir, or `name` in the run's folder. An error is one line."""
    parent = file.parent
    if (parent / "manifest.json").exists():  # a checkpoint: adding files to it would make it invalid
        parent = parent.parents[1] if parent.parent.name == "checkpoints" else parent.parent
    folder = Path(args.output_dir or parent / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; give --output_dir") from None


def records(file):
    """The arguments of the run that wrote `file`, and the config that its checkpoints have; {} and None without records."""
    for record in (file.parent / "manifest.json", file.parent / "args.json"):
        run = read_json(record)
        if run:
            return run["arguments"], run.get("progress", {}).get("config")
    return {}, None


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--checkpoint", required=True, help="a run's folder (its final weights), a checkpoint's folder or a .safetensors"
    )
    parser.add_argument("--images", metavar="FOLDER", help="classify the pictures in this folder, or this file")
    parser.add_argument("--dataset", help="default: the one that the model was trained on")
    parser.add_argument("--model", help="default: the one in the records of the run")
    parser.add_argument("--output_dir", help="default: `evaluation` (with --images: `predictions`) in the run's folder")
    parser.add_argument("--tta", action="store_true", help="use test-time augmentation (train_cifar.py)")
    parser.add_argument(
        "--num_workers", type=number(int, 0), default=min(8, cores_per_process()), help="processes that decode pictures"
    )
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
