"""--init_from: loads the weights of another run, and nothing else."""

import json

import numpy as np
import pytest
import torch
from harness.data import SMALL_DATA
from harness.launches import CIFAR, results, run
from safetensors.torch import load_file

NET = "--model net --batch_size 20 --lr 0 --max_train_steps 1"  # a step that changes no weights


@pytest.mark.parametrize("place", ["", "checkpoints/step_00000014"])
def test_a_run_starts_with_the_weights_and_nothing_else(place, reference, tmp_path):
    trained, folder = reference("cpu").folder, tmp_path / "run"
    words = f"{NET} --dataset {SMALL_DATA} --init_from {trained / place}"
    run("2cpu" if place else None, CIFAR, words, output_dir=folder)
    # So every process had the same weights.
    loaded, expected = (load_file(made / "model.safetensors") for made in (folder, trained))
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert results(folder)["resumed_from"] == 0 and results(folder)["global_step"] == 1
    recorded = json.loads((folder / "args.json").read_text())["arguments"]["init_from"]
    assert recorded == str((trained / place).resolve())


def test_another_number_of_classes(reference, tmp_path):
    """Fine-tuning with the real script: the last layer is replaced."""
    arrays, two = np.load(SMALL_DATA), {}
    for split in ("train", "test"):
        chosen = arrays[f"{split}_labels"] < 2
        two |= {
            f"{split}_{name}": arrays[f"{split}_{name}"][chosen] for name in ("images", "labels")
        }
    np.savez(tmp_path / "two.npz", **two)
    words = f"{NET} --dataset {tmp_path}/two.npz --init_from {reference('cpu').folder}"
    done = run(None, CIFAR, words, output_dir=tmp_path / "run")
    assert "keeps its initial weights: fc3.weight, fc3.bias" in done.stdout
    assert len(load_file(tmp_path / "run" / "model.safetensors")["fc3.bias"]) == 2
