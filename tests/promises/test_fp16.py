"""fp16: a step whose gradients overflow is skipped as a whole, and a run resumes exactly."""

import pytest
import torch
from harness.launches import final_weights, metrics, run

IMAGES = (
    "--dataset synthetic --model squeezenet1_1 --image_size 32 --batch_size 8 --lr 1e-3 "
    "--num_workers 0 --max_grad_norm 1 --max_train_steps 6 --log_every 1 "
    "--checkpoint_every 2 --eval_every 6"
)


def scaled(folder, overflows, dies="", check=True):
    """Runs the script with a gradient scaler."""
    options = dict(output_dir=folder, faults=f"fp16@{overflows}:{dies}", check=check)
    return run("cpu", "scripts/train_images.py", IMAGES, **options)


def state(folder, step, name):
    path = folder / "checkpoints" / f"step_{step:08}" / name
    return torch.load(path, weights_only=True)


@pytest.mark.slow
def test_a_run_in_fp16_resumes_exactly(tmp_path):
    """With its scale; and in a skipped step, the schedule does not move."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    scaled(whole, overflows=3)
    # The third step halves the scale, and three steps after it double the scale again.
    scaler = state(whole, 6, "scaler.pt")
    assert scaler["scale"] == 1024 and scaler["_growth_tracker"] == 0
    assert state(whole, 6, "scheduler.bin")["last_epoch"] == 5
    norms = [line.get("grad_norm") for line in metrics(whole, "train")]
    assert norms[2] is None  # it is infinite: JSON has no such number
    first = IMAGES.replace("train_steps 6", "train_steps 1")
    run("cpu", "scripts/train_images.py", first, output_dir=tmp_path / "first")
    assert norms[0] == metrics(tmp_path / "first", "train")[0]["grad_norm"]  # not a thousandfold
    done = scaled(killed, overflows=3, dies="5", check=False)
    assert done.returncode != 0 and state(killed, 4, "scaler.pt")["scale"] == 512
    scaled(killed, overflows=100)
    assert final_weights(killed) == final_weights(whole)
    assert state(killed, 6, "scaler.pt") == scaler
    assert metrics(killed, "train") == metrics(whole, "train")
