"""Scores an image classifier that a training script produced, and draws what it does.

    python scripts/evaluate.py --checkpoint runs/train_cifar
    accelerate launch --config_file accelerate_configs/4gpu.yaml scripts/evaluate.py --checkpoint runs/train_cifar --tta

Takes a run's folder, one of its checkpoints or a `model.safetensors`, written by any topology. Prints the accuracy per
class and writes `results.json`, `predictions.png` and `confusion_matrix.png`. Copy it together with `train_cifar.py`,
which holds the models and the measure.
"""

import sys
from pathlib import Path

# `utils` lies beside this script (a copy) or one folder up (the repository).
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
from utils.image_data import BatchedImages, as_is, load_images
from utils.run_folder import read_json, write_json


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=topology.check_launch(), dataloader_config=DataLoaderConfiguration(split_batches=True))
    state, config, file = topology.run_on_main(accelerator, lambda: weights.read(args.checkpoint))
    trained = topology.run_on_main(accelerator, lambda: trained_with(file)) or {}
    name = args.model or (config or {}).get("model") or trained.get("model")
    if name is None:
        raise UserError(f"{file} does not say which model it is of: give --model")
    dataset, seed = args.dataset or trained.get("dataset", "uoft-cs/cifar10"), trained.get("seed", 0)
    data = topology.local_main_first(accelerator, lambda: load_images(dataset, seed))

    model = build_model(name, len(data.class_names))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(
            f"{file} is not of a {name} with {len(data.class_names)} classes: {str(error).splitlines()[1].strip()}"
        ) from None
    # Each process scores its share of every batch.
    loader = DataLoader(BatchedImages(data.test), 250 * accelerator.num_processes, collate_fn=as_is)
    model, loader = accelerator.prepare(model, loader)
    mean, std = (x.to(accelerator.device) for x in data.train.mean_and_std())
    tested = evaluate(accelerator, model, loader, mean, std, tta=args.tta)

    if accelerator.is_main_process:
        results = {"test_accuracy": tested["accuracy"], "test_loss": tested["loss"], "tta": args.tta, "weights": str(file)}
        beside = file.parent
        if (beside / "manifest.json").exists():  # a checkpoint, in which nothing may lie that was not saved with it
            beside = beside.parents[1] if beside.parent.name == "checkpoints" else beside.parent
        folder = Path(args.output_dir or beside / "evaluation")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            plots.classification(folder, data, tested)
            write_json(folder / "results.json", results)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; give --output_dir") from None
        print(plots.class_table(tested["confusion"], data.class_names))
        count = int(tested["confusion"].sum())
        print(
            f"{file}: {tested['accuracy']:.2%} of {count:,} test images right, loss {tested['loss']:.4f}; pictures in {folder}"
        )
    accelerator.end_training()


def trained_with(file):
    """The arguments of the run that wrote `file`, from its records; None if there are none."""
    for record in (file.parent / "manifest.json", file.parent / "args.json"):
        found = read_json(record)
        if found:
            return found["arguments"]
    return None


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", required=True, help="a run's folder, a checkpoint's folder or a .safetensors file")
    parser.add_argument("--dataset", help="not given: the one it was trained on")
    parser.add_argument("--model", help="not given: as the run's records say")
    parser.add_argument("--output_dir", help="not given: `evaluation` in the run's folder")
    parser.add_argument("--tta", action="store_true", help="test-time augmentation")
    return parser.parse_args()


if __name__ == "__main__":
    exits.run(main)
