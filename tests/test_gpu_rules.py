"""What GPUs would refuse, on a machine without any: see `gpu_rules.py`."""

import json

import pytest
import torch
from conftest import run

from utils.ema import MovingAverage

STEPS = "--max_train_steps 2 --eval_every 2 --checkpoint_every 2 --log_every 1"
SCRIPTS = {
    "train_minimal": STEPS,
    "train_cifar": f"--dataset synthetic --batch_size 20 --max_grad_norm 1 {STEPS}",
    "train_images": "--dataset synthetic --model mnasnet0_5 --image_size 32 --batch_size 8 "
    f"--lr 1e-3 --mixup 0.2 --cutmix 1 --ema_decay 0.9 --num_workers 0 {STEPS}",
    "train_gpt": "--dataset synthetic --n_layer 1 --n_head 2 --n_embd 16 --block_size 16 "
    f"--batch_size 8 --sample_length 2 --max_grad_norm 1 {STEPS}",
}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=[pytest.mark.slow] * (script == "train_cifar"))
        for script in SCRIPTS
    ],
)
def test_two_processes_send_only_what_nccl_takes(script, tmp_path):
    """From tensors on the CPU it could not: averages, statistics, ids, losses, all of a step."""
    words = [f"gpu_rules@0:{tmp_path}/seen.json", f"scripts/{script}.py", *SCRIPTS[script].split()]
    run("2cpu", "tests/wrapped.py", words, output_dir=tmp_path / "run")
    collectives, operations = json.loads((tmp_path / "seen.json").read_text())
    # So the rules were in force: gradients, log lines, evaluations.
    assert collectives >= 5
    assert {"c10d::allreduce_", "c10d::allgather_", "aten::_log_softmax"} <= set(operations)


def test_shards_of_muon_are_exchanged_as_on_gpus(tmp_path):
    """Two exchanges for each kind of matrix, there and back, with the result of whole ones."""
    words = ("--num_processes", "3")
    run("2cpu", "tests/probe_muon.py", [str(tmp_path)], launcher=words)
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["exchanges"] == 10 and found["difference"] < 1e-5


# ------------------------------------------------------------------------------------- averages


def test_averages_are_those_of_pytorch():
    """Bit for bit, over the weights and statistics of a network."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    theirs = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    ours = MovingAverage(model, lambda updates: 0.9)
    for _ in range(5):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight))
            model(torch.randn(2, 3, 5, 5))
        theirs.update_parameters(model)
        ours.update(model)
    expected, state = theirs.state_dict(), ours.state_dict()
    assert list(state) == list(expected) and state["n_averaged"] == 5
    # It is the number of batches, of which PyTorch computes an average.
    assert state.pop("module.1.num_batches_tracked") == 5
    assert all(torch.equal(state[name], expected[name]) for name in state if "module" in name)
    # A checkpoint of an earlier version has its count in a tensor.
    again = MovingAverage(model, lambda updates: 0.9)
    again.load_state_dict(expected)
    assert again.updates == 5 and torch.equal(again.module[0].weight, ours.module[0].weight)
