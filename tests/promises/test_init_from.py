"""--init_from: loads the weights of another run, and nothing else."""

import json

import pytest
import torch
from harness.data import make_folder
from harness.launches import CIFAR, results, run
from safetensors.torch import load_file

NET = "--dataset synthetic --model net --batch_size 96"
STILL = f"{NET} --lr 0 --max_train_steps 1"  # one step, which changes no weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("init_from") / "trained"
    run("cpu", CIFAR, f"{NET} --max_train_steps 3 --seed 5", output_dir=folder)
    return folder


@pytest.mark.parametrize("place", ["", "checkpoints/step_00000003"])
def test_a_run_starts_with_the_weights_and_nothing_else(place, trained, tmp_path):
    run(
        "2cpu" if place else "cpu",
        CIFAR,
        f"{STILL} --init_from {trained / place}",
        output_dir=tmp_path / "run",
    )
    loaded, expected = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "run", trained)
    )
    # With a learning rate of 0, SGD does not change them; so every process had the same weights.
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert (
        results(tmp_path / "run")["resumed_from"] == 0
        and results(tmp_path / "run")["global_step"] == 1
    )
    recorded = json.loads((tmp_path / "run" / "args.json").read_text())["arguments"]["init_from"]
    assert recorded == str((trained / place).resolve())


def test_another_number_of_classes(reference, tmp_path):
    """Fine-tuning with the real script: the last layer is replaced."""
    (tmp_path / "two").mkdir()
    two = make_folder(tmp_path / "two", 40, 10, classes=2)
    arguments = f"--dataset {two} --model net --batch_size 20 --max_train_steps 2 --init_from {reference('cpu').folder}"
    done = run("cpu", CIFAR, arguments, output_dir=tmp_path / "run")
    assert "keeps its initial weights: fc3.weight, fc3.bias" in done.stdout
    assert len(load_file(tmp_path / "run" / "model.safetensors")["fc3.bias"]) == 2
