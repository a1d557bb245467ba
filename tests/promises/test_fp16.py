"""fp16: a step whose gradients overflow is skipped as a whole, and a run resumes exactly."""

import pytest
import torch
from harness.launches import final_weights, metrics, run

from utils.muon import MuonAdamW, MuonSGD
from utils.run import gpu

MUON = dict(muon=True, momentum=0.9, beta2=0.95)


@pytest.mark.parametrize(
    "build",
    [
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
        lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
        lambda weights: MuonSGD([dict(params=weights, weight_decay=0.1, **MUON)], lr=0.1),
        lambda weights: MuonAdamW([dict(params=weights, **MUON)], lr=0.1),
    ],
)
def test_a_step_whose_gradients_overflow_changes_nothing(build, monkeypatch):
    """A fused optimizer by itself would be called, without the host knowing what it did."""
    monkeypatch.setattr(torch.amp.GradScaler, "step", torch.amp.GradScaler.step)
    gpu.skip_whole_steps()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    torch.manual_seed(0)
    scaled, plain = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    with_scaler, without = build([scaled]), build([plain])
    taken = set()
    with_scaler.register_step_post_hook(lambda *_: taken.add(step))
    for step in range(4):
        gradient = torch.randn(3, 2)
        scaler.scale(torch.zeros(()))  # as `backward` does; makes the scale a tensor
        scaled.grad = gradient * scaler.get_scale()
        if step == 2:
            scaled.grad[1, 1] = float("inf")
        else:
            plain.grad = gradient.clone()
            without.step()
        assert scaler.step(with_scaler, lambda: 7) == (7 if step != 2 else None)
        scaler.update()
        with_scaler.zero_grad()
        assert torch.equal(scaled, plain)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(with_scaler, closure=lambda: 7)
    assert taken == {0, 1, 3} and scaler.get_scale() == 2.0
    states = (optimizer.state_dict()["state"][0] for optimizer in (with_scaler, without))
    ours, theirs = states
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(torch.as_tensor(ours[k]), torch.as_tensor(theirs[k])) for k in ours)


IMAGES = (
    "--dataset synthetic --model squeezenet1_1 --image_size 32 --batch_size 8 --lr 1e-3 "
    "--num_workers 0 --ema_decay 0.9 --max_grad_norm 1 --max_train_steps 6 --log_every 1 "
    "--checkpoint_every 2 --eval_every 6"
)


def scaled(script, arguments, folder, overflows, dies="", check=True):
    """Runs a script with a gradient scaler."""
    words = [f"fp16@{overflows}:{dies}", script, *arguments.split()]
    return run("cpu", "tests/harness/wrapped.py", words, output_dir=folder, check=check)


def state(folder, step, name):
    path = folder / "checkpoints" / f"step_{step:08}" / name
    return torch.load(path, weights_only=True)


@pytest.mark.slow
def test_a_run_in_fp16_resumes_exactly(tmp_path):
    """With its scale; and in a skipped step, neither averages nor schedule move."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    scaled("scripts/train_images.py", IMAGES, whole, overflows=3)
    # The third step halves the scale, and three steps after it double the scale again.
    scaler = state(whole, 6, "scaler.pt")
    assert scaler["scale"] == 1024 and scaler["_growth_tracker"] == 0
    assert state(whole, 6, "custom_checkpoint_0.pkl")["n_averaged"] == 5
    assert state(whole, 6, "scheduler.bin")["last_epoch"] == 5
    norms = [line.get("grad_norm") for line in metrics(whole, "train")]
    assert norms[2] is None  # it is infinite: JSON has no such number
    first = IMAGES.replace("train_steps 6", "train_steps 1")
    run("cpu", "scripts/train_images.py", first, output_dir=tmp_path / "first")
    assert norms[0] == metrics(tmp_path / "first", "train")[0]["grad_norm"]  # not a thousandfold
    done = scaled("scripts/train_images.py", IMAGES, killed, overflows=3, dies="5", check=False)
    assert done.returncode != 0 and state(killed, 4, "scaler.pt")["scale"] == 512
    scaled("scripts/train_images.py", IMAGES, killed, overflows=100)
    assert final_weights(killed) == final_weights(whole)
    assert state(killed, 6, "scaler.pt") == scaler
    assert metrics(killed, "train") == metrics(whole, "train")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("train_cifar", "--dataset synthetic --batch_size 20"),
        (
            "train_gpt",
            "--dataset synthetic --n_layer 1 --n_head 2 --n_embd 16 --block_size 16 "
            "--batch_size 8 --sample_length 2",
        ),
    ],
)
def test_a_skipped_step_moves_neither_schedule_nor_muon(script, arguments, tmp_path):
    arguments += " --max_train_steps 3 --checkpoint_every 3 --eval_every 3"
    scaled(f"scripts/{script}.py", arguments, tmp_path, overflows=2)
    assert state(tmp_path, 3, "scheduler.bin")["last_epoch"] == 2
    steps = [
        entry["step"].item()
        for entry in state(tmp_path, 3, "optimizer.bin")["state"].values()
        if "step" in entry
    ]
    assert steps and set(steps) == {2}


def test_a_run_goes_on_in_fp16(tmp_path):
    """On older GPUs: the checkpoint has no scale, so it begins anew."""
    arguments = "--max_train_steps {} --checkpoint_every 2 --eval_every 2"
    run("cpu", "scripts/train_minimal.py", arguments.format(2), output_dir=tmp_path)
    scaled("scripts/train_minimal.py", arguments.format(4), tmp_path, overflows=100)
    assert state(tmp_path, 4, "scaler.pt")["_growth_tracker"] == 2


@pytest.mark.parametrize(("config", "name"), [("1gpu", "1gpu.yaml"), (None, "this launch")])
def test_bf16_on_an_older_gpu_is_one_line(config, name, tmp_path):
    words = ["gpus@1:7.5", "scripts/train_minimal.py"]
    variables = {} if config else {"ACCELERATE_MIXED_PRECISION": "bf16"}
    options = dict(output_dir=tmp_path / "run", check=False, env=variables)
    done = run(config, "tests/harness/wrapped.py", words, **options)
    says = f"{name} asks for bf16, which Tesla T4 only emulates"
    # The launcher of a single process ends with 1 whatever the error.
    assert done.returncode == (1 if config else 2) and not (tmp_path / "run").exists()
    assert done.stderr.count("error: ") == 1 and says in done.stderr, done.stderr
