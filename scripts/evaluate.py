"""Evaluates the model of a run on its held-out data or other data; classifies images.

    python scripts/evaluate.py runs/train_cifar
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/evaluate.py \\
        runs/train_cifar --tta
    python scripts/evaluate.py runs/train_images
    python scripts/evaluate.py runs/train_images --images holiday/
    python scripts/evaluate.py runs/train_gpt --dataset another.txt
    python scripts/evaluate.py runs/train_lm

Reads a run's folder, one of its checkpoints or a `model.safetensors`; of train_lm.py and of a
sharded model, the folder of a finished run. Writes `results.json`.

Of a classifier, prints the accuracy per class, and writes `predictions.png`,
`confusion_matrix.png`, and `predictions.csv`: the true and the most likely classes of every image,
with their probabilities. With --images (a photo or a folder, for a run of train_images.py), prints
the most likely classes of up to ten images, and writes `predictions.csv`.

Of a language model, prints the loss per byte (train_gpt.py), or per token (train_lm.py) with the
perplexity, its standard error, and bits per byte.

If you copy this script, also copy the script of the run, which defines its model (not
train_images.py).
"""

import contextlib
import csv
import importlib
import io
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils.run import process

if __name__ == "__main__":
    process.handle_signals()  # before torch: a signal during the slow imports must not be lost

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from utils import flags, weight_files
from utils.data.evaluation import Progress
from utils.data.loaders import loader_options
from utils.data.scan import LeftOut, scan
from utils.data.sharing import agree, evaluation_batch_size, local_main_first
from utils.images import classifier_plots, pretrained, scores
from utils.images.arrays import in_memory, load_arrays
from utils.images.augment import normalize
from utils.images.decoding import Files, Images
from utils.images.local import EXTENSIONS
from utils.images.sources import described, find_images, find_splits
from utils.images.transforms import EvalTransform, ImageBatches
from utils.language.rows import checksum
from utils.language.text import Text, read_splits
from utils.report.model_card import AT_THE_TOP
from utils.run import devices, entry, launch
from utils.run.arguments import Parser
from utils.run.collectives import run_on_all, run_on_main
from utils.run.failures import UserError
from utils.run.files import read_json, write_json, write_text
from utils.run.output import one_line, plural

SHOWN = 10  # images whose most likely classes are printed


def main():
    args = parse_args()
    loading = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=launch.set_up(), dataloader_config=loading)
    if any((Path(args.run) / name).is_dir() for name in AT_THE_TOP):
        evaluate_lm(accelerator, args, Path(args.run))
    else:
        evaluate_weights(accelerator, args)
    accelerator.end_training()


def evaluate_weights(accelerator, args):
    """Evaluates a model of which this project wrote `model.safetensors` or a checkpoint."""
    saved = run_on_main(accelerator, lambda: weight_files.read(args.run))
    settings = (saved.config or {}) | saved.arguments
    if "preprocessing" in (saved.config or {}):
        evaluate_images(accelerator, args, saved)
    elif args.images:
        raise UserError(
            f"{saved.file} is not from train_images.py: --images needs its record of the "
            "preprocessing"
        )
    elif "n_embd" in settings:
        evaluate_gpt(accelerator, args, saved)
    elif "lora_rank" in settings:
        raise UserError(
            f"{saved.file} is a checkpoint of train_lm.py: give the folder of a finished run"
        )
    else:
        evaluate_cifar(accelerator, args, saved)


def beside(name):
    """The module of the script that trained a model; only that script needs to be there."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(
            f"evaluate.py needs {name}.py in its folder, to evaluate what that script trains"
        ) from None


# ---------------------------------------------------------------------------------- train_cifar.py


def evaluate_cifar(accelerator, args, saved):
    """Evaluates a model of train_cifar.py on the test split, or else the validation split."""
    train_cifar = beside("train_cifar")

    settings = (saved.config or {}) | saved.arguments
    name = settings.get("model", "another one")
    if name not in train_cifar.RECIPES:
        raise UserError(
            f"{saved.file} is not a model of train_cifar.py, train_images.py, train_gpt.py or "
            f"train_lm.py, but '{name}'"
        )
    config = saved.config or {}
    data = load_data(accelerator, args, saved, load_arrays)
    shown = next(name for name in ("all", "test", "val") if name in data.splits)
    split = data.splits[shown]
    model = train_cifar.build_model(name, len(data.class_names))
    load_state(model, saved, f"{name} with {len(data.class_names)} classes")
    colors = [torch.tensor(config[key]) for key in ("mean", "std") if key in config]
    colors = colors or data.splits["train"].mean_and_std()
    views = predict_views if args.tta else None
    outputs = predict(accelerator, model, split, colors, views=views)
    if accelerator.is_main_process:
        write_evaluation(args, saved, split, outputs, data.class_names, shown)


def predict_views(model, images):
    """The weighted sum of the outputs for an image, its mirror image, and shifted ones."""
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    views = ((0.25, images), (0.125, padded[:, :, :-2, :-2]), (0.125, padded[:, :, 2:, 2:]))
    outputs = 0
    for weight, view in views:
        for image in (view, view.flip(-1)):
            outputs = outputs + weight * model(image).float()
    return outputs


# --------------------------------------------------------------------------------- train_images.py


def evaluate_images(accelerator, args, saved):
    """Evaluates a model of train_images.py on labeled images, or classifies `--images`."""
    if args.tta:
        raise UserError("--tta is for models of train_cifar.py")
    class_names, preprocessing = (saved.config[key] for key in ("class_names", "preprocessing"))
    shown = None
    if args.images:
        images, details = run_on_all(accelerator, lambda: unlabeled(args.images))
        if accelerator.is_main_process:
            print("\n  ".join([f"{plural(len(images), 'image')} in {args.images}", *details]))
    else:
        data = load_data(accelerator, args, saved, find_images)
        shown = "val" if "train" in data.splits else next(iter(data.splits))
        images = data.splits[shown]
    model = pretrained.build(saved.config).to(memory_format=torch.channels_last)
    load_state(model, saved, saved.config["model"])
    dataset = ImageBatches(images, EvalTransform(preprocessing), "skip")
    colors = pretrained.colors(saved.config, accelerator.device)
    outputs = predict(accelerator, model, dataset, colors, workers=args.num_workers)
    if accelerator.is_main_process and args.images:
        write_predictions(args, saved, dataset, outputs, class_names)
    elif accelerator.is_main_process:
        write_evaluation(args, saved, dataset, outputs, class_names, shown)


def unlabeled(path):
    """Finds the images in a folder and below it, or takes a single file; all labels are 0.

    Returns:
        tuple[Images, list[str]]: images, sorted by name; lines about what else is in the folder.
        Raises UserError if there are none.
    """
    root, left_out = Path(path).expanduser(), LeftOut()
    if root.is_file():
        files, root = [root.name], root.parent
    elif root.is_dir():
        files, _, left_out = scan(root, EXTENSIONS)
    else:
        raise UserError(f"--images {path}: there is no such folder or file")
    if not files:
        seen = "; ".join(left_out.lines())
        raise UserError(f"--images {path}: it has no images{f' ({seen})' if seen else ''}")
    labels = np.zeros(len(files), dtype=np.int64)
    images = Images(Files(root, sorted(files)), np.arange(len(files)), labels)
    return images, left_out.lines()


# ------------------------------------------------------------------------------ both of classifiers


@torch.no_grad()
def predict(accelerator, model, dataset, colors, *, workers=0, views=None):
    """Classifies each image of a data set once, on any number of processes.

    Args:
        dataset (ImageBatches | Split): the images.
        colors (tuple): the mean and the standard deviation of pixels from 0 to 255, float32 [3].
        workers (int): processes that load images.
        views: computes the outputs for several views of each image; None: for the image alone.

    Returns:
        list: what `of_each_image` returns, for all images, in the order of the data.
    """
    batch_size = evaluation_batch_size(accelerator, len(dataset), 64)
    loader = DataLoader(dataset, batch_size, **loader_options(accelerator, workers))
    model, loader = accelerator.prepare(model, loader)
    mean, std = (values.to(accelerator.device) for values in colors)
    model.eval()
    parts = []
    for batch in Progress(accelerator)(loader):
        images = normalize(batch["images"], mean, std)
        logits = views(model, images) if views else model(images).float()
        values = (batch["ids"], *of_each_image(logits, batch["labels"]))
        parts.append([value.cpu() for value in accelerator.gather_for_metrics(values)])
    ids, *outputs = (torch.cat(values) for values in zip(*parts, strict=True))
    if not torch.equal(ids, torch.arange(len(dataset))):
        raise RuntimeError(f"classified {len(ids)} of {len(dataset)} images, or not in order")
    return outputs


def of_each_image(logits, labels):
    """What is kept of the outputs for a batch: as much for a thousand classes as for five.

    Args: logits: float32 [images, classes]. labels: int64 [images]; -1: the image is unreadable.

    Returns:
        tuple: the labels; losses, float32 [images]; up to five classes of each image, the likeliest
        first, and their probabilities, int64 and float32 [images, up to 5].
    """
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=-1)
    top = logits.topk(min(5, logits.shape[1])).indices  # as the accuracy is computed
    return labels, losses, top, logits.softmax(1).gather(1, top)


def write_evaluation(args, saved, dataset, outputs, class_names, shown="val"):
    """Writes results.json, predictions.csv and the plots; prints the accuracy of each class.

    Args:
        dataset, outputs: what `predict` was given and returned.
        shown (str): the name of the split.
    """
    labels, losses, top, shares = outputs
    metrics, predictions = scores.summarize(labels, losses, top), top[:, 0]
    samples = dict(labels=labels, predictions=predictions, losses=losses)
    results = {f"{shown}_{key}": value for key, value in metrics.items()}
    results |= {"tta": args.tta, "weights": str(saved.file)}
    results |= scores.per_class(labels, predictions, class_names)
    rows = list_predictions(dataset, labels, top, shares, class_names)
    for row, label in zip(rows, labels.tolist(), strict=True):
        row["true_class"] = class_names[label] if label >= 0 else ""
    with writing_to(args.output_dir or saved.run / "evaluation") as folder:
        write_json(folder / "results.json", results)
        write_text(folder / "predictions.csv", as_csv(rows))
        classifier_plots.of_images(folder, dataset, samples, class_names)
    width = max(len(one_line(name)) for name in class_names)
    for name, share in results["per_class"].items():
        print(f"  {one_line(name):{width}}  {100 * share:6.2f} %")
    unreadable = [one_line(row["file"]) for row in rows if not row["classes"]]
    for name in unreadable:
        print(f"unreadable, and left out: {name}")
    if unreadable:
        print(f"{len(unreadable):,} of {len(rows):,} images could not be read")
    summary = f"{metrics['accuracy']:.2%} of {metrics['images']:,} "
    summary += f"{'images' if shown == 'all' else f'{shown} images'} correct"
    print(f"{saved.file}: {summary}, loss {metrics['loss']:.4f}; results and plots in {folder}")


def list_predictions(dataset, labels, top, shares, class_names):
    """The most likely classes of each image of a data set (ImageBatches | Split).

    Args: labels, top, shares: what `of_each_image` returns.

    Returns:
        list[dict]: `file`; `classes`, up to five lists of a name and its probability.
    """
    rows = []
    for index, readable in enumerate((labels >= 0).tolist()):
        likely = []
        if readable:
            likely = zip(top[index].tolist(), shares[index].tolist(), strict=True)
        classes = [[class_names[label], round(share, 6)] for label, share in likely]
        rows.append({"file": dataset.name(index), "classes": classes})
    return rows


def as_csv(rows):
    """What `list_predictions` returns as a table, with `true_class` if the rows have it."""
    table, ranks = io.StringIO(), max(len(row["classes"]) for row in rows)
    columns = ["file", *(["true_class"] if "true_class" in rows[0] else [])]
    writer = csv.writer(table, lineterminator="\n")
    names = [f"{name}_{rank}" for rank in range(1, ranks + 1) for name in ("class", "probability")]
    writer.writerow([*columns, *names])
    for row in rows:
        values = [value for pair in row["classes"] for value in pair]
        writer.writerow(
            [*(row[name] for name in columns), *values, *[""] * (len(names) - len(values))]
        )
    return table.getvalue()


def write_predictions(args, saved, dataset, outputs, class_names):
    """Writes the most likely classes of every image to a CSV file, and prints those of a few."""
    labels, _, top, shares = outputs
    rows = list_predictions(dataset, labels, top, shares, class_names)
    with writing_to(args.output_dir or saved.run / "predictions") as folder:
        write_text(folder / "predictions.csv", as_csv(rows))
    for row in rows if len(rows) <= SHOWN else ():
        likely = ", ".join(f"{one_line(name)} {share:.1%}" for name, share in row["classes"][:3])
        print(f"  {one_line(row['file'])}: {likely or 'unreadable'}")
    unreadable = sum(not row["classes"] for row in rows)
    note = f", {unreadable} of them unreadable" if unreadable else ""
    count = plural(len(rows), "image")
    print(f"{count}{note}: see predictions.csv in {folder}")


# ------------------------------------------------------------------------------------ train_gpt.py


def evaluate_gpt(accelerator, args, saved):
    """Evaluates a model of train_gpt.py on the held-out text of its run, or on another text."""
    train_gpt = beside("train_gpt")

    refuse_options_of_classifiers(args)
    model = train_gpt.load_model(saved)
    windows, shown = load_text(accelerator, args, saved)
    loader = train_gpt.build_eval_loader(accelerator, windows, windows.block_size)
    model = accelerator.prepare(model)
    results = train_gpt.evaluate(accelerator, model, loader, Progress(accelerator))
    message = f"{loss_of(results)} nats per byte, {results['bits_per_byte']:.4f} bits per byte"
    message += f", on {results['bytes']:,} bytes"
    write_figures(accelerator, args, saved.run, saved.file, shown, results, message)


def load_text(accelerator, args, saved):
    """Loads the text to evaluate a model of train_gpt.py on.

    Returns:
        tuple: `Windows`; `val`, what the run held out. Of another data set its split `test`, or
        else `val`, or else `all` of it.
    """
    train_gpt = beside("train_gpt")

    recorded = saved.arguments.get("dataset")
    name = args.dataset or recorded
    if name is None:
        raise UserError(f"{saved.file} does not name its data set: give --dataset")
    trained = SimpleNamespace(**saved.arguments | {"dataset": name})

    def was_moved():  # the data of the run to another place
        try:
            description = train_gpt.read_text(accelerator, trained).description
        except UserError:  # it may be too short to train on
            return False
        return description == saved.data.get("data")

    if is_same(name, recorded) or (recorded and was_moved()):
        _, held_out, description = train_gpt.load_data(accelerator, trained)
        warn_if_changed(accelerator, name, saved.data.get("data"), description)
        return held_out, "val"
    column = saved.arguments.get("text_column", "text")
    shown, data = local_main_first(accelerator, lambda: load_whole_text(name, column))
    agree(accelerator, name, data)
    return train_gpt.Windows(data.held_out, saved.config["block_size"]), shown


def load_whole_text(name, column):
    """Loads the split `test` of a text, or else `val`, or else `all` of it.

    Returns:
        tuple[str, Text]: the name of the split; its text is held out.
    """
    texts, details = read_splits(name, column, use=(("test", "val", "train"),))
    [(split, text)] = texts.items()
    if len(text) < 2:
        raise UserError(f"--dataset {name} has {len(text)} bytes: too few")
    description = f"{len(text):,} bytes (fingerprint {checksum(text.numpy())})"
    return "all" if split == "train" else split, Text(text[:0], text, description, details)


# ------------------------------------------------------------------------------------- train_lm.py


def evaluate_lm(accelerator, args, run):
    """Evaluates a run of train_lm.py on its held-out data, or on another data set."""
    train_lm = beside("train_lm")

    train_lm.check_packages()
    refuse_options_of_classifiers(args)
    record = read_json(run / "args.json")
    if not record:
        raise UserError(f"{run} has no args.json, as a run of train_lm.py does")
    trained = SimpleNamespace(**record["arguments"])
    model, tokenizer = run_on_all(accelerator, lambda: train_lm.load_trained(run, trained))
    packed = train_lm.causal_lm.can_pack(model.config)
    described = record["data"]["data"]
    blocks, shown = load_blocks(accelerator, args, tokenizer, packed, trained, described)
    loader = train_lm.build_eval_loader(accelerator, blocks, trained)
    model = accelerator.prepare(model)
    train_lm.lm_loss.check(accelerator, model, packed)
    results = train_lm.evaluate(accelerator, model, loader, Progress(accelerator))
    message = f"{loss_of(results)} nats per token, perplexity {results['perplexity']:.4g}"
    if "bits_per_byte" in results:
        message += f", {results['bits_per_byte']:.4f} bits per byte"
    message += f", on {results['tokens']:,} tokens"
    file = next(run / name for name in AT_THE_TOP if (run / name).is_dir())
    write_figures(accelerator, args, run, file, shown, results, message)


def load_blocks(accelerator, args, tokenizer, packed, trained, recorded):
    """Loads the blocks of tokens to evaluate a model of train_lm.py on.

    Args:
        packed (bool): whether several documents share a block.
        trained: the arguments of the run.
        recorded (str): the description of its data.

    Returns:
        tuple: `Blocks`; `val` or `test`, what the run evaluated. Of another data set its split
        `test`, or else `val`, or else `all` of it.
    """
    train_lm = beside("train_lm")

    name = args.dataset or trained.dataset
    if is_same(name, trained.dataset):
        data = train_lm.load_data(accelerator, tokenizer, packed, trained)
        warn_if_changed(accelerator, name, recorded, data.description)
        return data.splits[data.held_out], data.held_out
    trained.dataset = name
    try:
        data = train_lm.load_source(accelerator, tokenizer, packed, trained)
    except UserError:  # it may have too few documents to hold some out
        data = None
    if data is None or data.description != recorded:  # else it was moved
        trained.subset, trained.streaming, trained.val_fraction = None, False, 0
        data = train_lm.load_source(accelerator, tokenizer, packed, trained)
    agree(accelerator, name, data)
    shown = next(split for split in ("test", "val", "train") if split in data.splits)
    if data.description == recorded and "val" in data.splits:
        shown = "val"
    return data.splits[shown], "all" if shown == "train" else shown


# ------------------------------------------------------------------------------------ both of text


def refuse_options_of_classifiers(args):
    """Raises UserError if an option is given that has no meaning for a language model."""
    for name in ("images", "tta"):
        if getattr(args, name):
            raise UserError(f"{args.run} is a language model: --{name} is for classifiers")


def loss_of(results):
    """The loss with its standard error, as text."""
    error = results.get("loss_standard_error")
    return f"loss {results['loss']:.4f}" + ("" if error is None else f" ± {error:.4f}")


def write_figures(accelerator, args, run, file, shown, results, message):
    """Writes results.json, and prints `message` and where it is; main process only."""
    if accelerator.is_main_process:
        figures = {f"{shown}_{name}": value for name, value in results.items()}
        with writing_to(args.output_dir or run / "evaluation") as folder:
            write_json(folder / "results.json", figures | {"weights": str(file)})
        split = "all of the data" if shown == "all" else f"split {shown}"
        print(f"{file}: {message} ({split}); results in {folder}")


# --------------------------------------------------------------------------------------------- all


def load_data(accelerator, args, saved, load):
    """Loads the data set that the model was trained on, with its splits, or another one as a whole.

    `--dataset` may name the same one in another place. Its classes are those of the model.

    Args:
        load: `find_images` or `load_arrays`.

    Returns:
        ImageSplits: of another data set there is one split: `test` or `val`, if it has that split
        itself, or else `all`.
    """
    settings = (saved.config or {}) | saved.arguments
    options = {key: settings[key] for key in ("seed", "val_fraction") if key in settings}
    # The flag takes two, or is left out.
    columns = {"columns": shlex.split(settings.get("columns") or "") or None}
    recorded = settings.get("dataset", "uoft-cs/cifar10" if load is load_arrays else None)
    name = args.dataset or recorded
    if name is None:
        raise UserError(f"{saved.file} does not name its data set: give --dataset")
    same = name == "synthetic" or is_same(name, recorded)
    class_names = (saved.config or {}).get("class_names")

    def load_it():
        try:
            data = load(name, **options, **columns)
        except UserError:
            if same:
                raise
        else:
            if same or data.description == saved.data.get("data"):
                return data
        if class_names is None:
            raise UserError(f"{saved.file} does not name its classes: no other data set fits")
        splits = find_to_evaluate(name, class_names, **columns)
        return in_memory(splits, skip=True) if load is load_arrays else splits

    data = local_main_first(accelerator, load_it)
    agree(accelerator, name, data)
    if same:
        warn_if_changed(accelerator, name, saved.data.get("data"), data.description)
    if class_names not in (None, data.class_names):
        difference = f"{len(data.class_names)} instead of {len(class_names)}"
        for one, other in zip(data.class_names, class_names, strict=False):
            if one != other:
                difference = f"{one} instead of {other}"
                break
        raise UserError(f"--dataset {name} has other classes than {saved.file}: {difference}")
    return data


@contextlib.contextmanager
def writing_to(folder):
    """Makes the folder of the output, and yields its path; an OSError in the block is one line."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write to {folder}: {reason}; give another --output_dir") from None


def find_to_evaluate(name, class_names, columns=None):
    """Finds labeled images that a model with these classes has not seen; some may have no image.

    Returns:
        ImageSplits: with one split, `test` or else `val`, if the data set has it; else `all`.
        Raises UserError if there is no such data set, or it has other classes.
    """
    splits, _, left_out = find_splits(name, columns=columns, class_names=class_names)
    split = next(split for split in ("test", "val", "train") if split in splits)
    used = {"all" if split == "train" else split: splits.pop(split)}
    for other, images in splits.items():
        left_out.add(f"images of the {other} split", images.name(0), len(images))
    return described(used, class_names, left_out)


def is_same(name, recorded):
    """Whether `name` is the data set that a run was trained on, by its Hub id or path."""
    return name == recorded or (recorded and Path(name).resolve() == Path(recorded).resolve())


def warn_if_changed(accelerator, name, trained_on, description):
    """Prints a warning if the descriptions of a data set in training and now differ."""
    if trained_on not in (None, description) and accelerator.is_main_process:
        print(f"warning: trained on other data than that in {name} now: {trained_on}")


def load_state(model, saved, description):
    """Loads weights into a model. Raises UserError if they belong to a different model."""
    try:
        model.load_state_dict(weight_files.fitted(saved.state, model))
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise UserError(f"{saved.file} does not hold a {description}: {reason}") from None


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run's folder (its final weights), a checkpoint's folder, a .safetensors or a .pth",
    )
    parser.add_argument(
        "--images", metavar="FOLDER", help="classify the images in this folder, or this file"
    )
    parser.add_argument("--dataset", help="default: the one that the model was trained on")
    parser.add_argument(
        "--output_dir",
        help="default: `evaluation` (with --images: `predictions`) in the run's folder",
    )
    parser.add_argument(
        "--tta", action="store_true", help="use test-time augmentation (train_cifar.py)"
    )
    flags.add(parser, "num_workers")
    parser.set_defaults(num_workers=min(8, devices.cores_per_process()))
    return parser.parse_args()


if __name__ == "__main__":
    entry.run(main)
