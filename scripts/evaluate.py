"""Evaluates an image classifier trained by train_cifar.py: metrics and pictures.

    python scripts/evaluate.py --checkpoint runs/train_cifar
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/evaluate.py --checkpoint runs/train_cifar --tta

Reads a run's folder, one of its checkpoints or a `model.safetensors`, written by any topology. Prints the accuracy per class
and writes `results.json`, `predictions.png` and `confusion_matrix.png`. Copy it together with `train_cifar.py`, which holds
the models and the evaluation.
"""

import sys
from pathlib import Path

# Finds `utils` next to this script (a copy) or one folder up (the repository).
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils import exits

if __name__ == "__main__":
    exits.install()  # before torch: a signal during the slow imports below must not be lost

from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from train_cifar import build_model, evaluate

from utils import plots, topology, weights
from utils.arguments import Parser
from utils.exits import UserError
from utils.files import read_json, write_json
from utils.image_data import BatchedImages, as_is, load_images


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=topology.check_launch(), dataloader_config=DataLoaderConfiguration(split_batches=True))
    state, config, file = topology.run_on_main(accelerator, lambda: weights.read(args.checkpoint))
    trained = topology.run_on_main(accelerator, lambda: run_arguments(file)) or {}
    name = args.model or (config or {}).get("model") or trained.get("model")
    if name is None:
        raise UserError(f"{file} does not name its model: give --model")
    dataset, seed = args.dataset or trained.get("dataset", "uoft-cs/cifar10"), trained.get("seed", 0)
    data = topology.local_main_first(accelerator, lambda: load_images(dataset, seed))

    model = build_model(name, len(data.class_names))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(
            f"{file} does not hold a {name} with {len(data.class_names)} classes: {str(error).splitlines()[1].strip()}"
        ) from None
    # Each process evaluates its share of every batch.
    loader = DataLoader(BatchedImages(data.test), 250 * accelerator.num_processes, collate_fn=as_is)
    model, loader = accelerator.prepare(model, loader)
    mean, std = (x.to(accelerator.device) for x in data.train.mean_and_std())
    metrics = evaluate(accelerator, model, loader, mean, std, tta=args.tta)

    if accelerator.is_main_process:
        results = {"test_accuracy": metrics["accuracy"], "test_loss": metrics["loss"], "tta": args.tta, "weights": str(file)}
        parent = file.parent
        if (parent / "manifest.json").exists():  # a checkpoint: adding files to it would make it invalid
            parent = parent.parents[1] if parent.parent.name == "checkpoints" else parent.parent
        folder = Path(args.output_dir or parent / "evaluation")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            plots.classification(folder, data, metrics["predictions"])
            write_json(folder / "results.json", results)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; give --output_dir") from None
        print(plots.class_table(data, metrics["predictions"]))
        count = len(metrics["predictions"])
        summary = f"{metrics['accuracy']:.2%} of {count:,} test images correct, loss {metrics['loss']:.4f}"
        print(f"{file}: {summary}; pictures in {folder}")
    accelerator.end_training()


def run_arguments(file):
    """The arguments of the run that wrote `file`; None if it has no record of them."""
    for record in (file.parent / "manifest.json", file.parent / "args.json"):
        run = read_json(record)
        if run:
            return run["arguments"]
    return None


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", required=True, help="a run's folder, a checkpoint's folder or a .safetensors file")
    parser.add_argument("--dataset", help="default: the one that the model was trained on")
    parser.add_argument("--model", help="default: the one in the records of the run")
    parser.add_argument("--output_dir", help="default: `evaluation` in the run's folder")
    parser.add_argument("--tta", action="store_true", help="use test-time augmentation")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
