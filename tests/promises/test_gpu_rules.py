"""What GPUs would refuse, on a machine without any: see `gpu_rules.py`."""

import json
import os
import re

import pytest
import torch
import torch.distributed as dist
import torchvision
from harness.data import kinds_of_classifiers
from harness.gpu_rules import DEVICE, FORBIDDEN, NOT_DETERMINISTIC, Rules
from harness.launches import run, some_slow

from utils import pretrained
from utils.ema import MovingAverage
from utils.run import gpu

STEPS = "--max_train_steps 2 --eval_every 2 --checkpoint_every 2 --log_every 1"
SCRIPTS = {
    "train_minimal": STEPS,
    "train_cifar": f"--dataset synthetic --batch_size 20 --max_grad_norm 1 {STEPS}",
    "train_images": "--dataset synthetic --model mnasnet0_5 --image_size 32 --batch_size 8 "
    f"--lr 1e-3 --mixup 0.2 --cutmix 1 --ema_decay 0.9 --num_workers 0 {STEPS}",
    "train_gpt": "--dataset synthetic --n_layer 1 --n_head 2 --n_embd 16 --block_size 16 "
    f"--batch_size 8 --sample_length 2 --max_grad_norm 1 {STEPS}",
}


def test_the_rules_refuse_what_nccl_refuses():
    """So a test that runs under them can fail."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        gloo = dist.new_group(backend="gloo")
        with Rules() as rules:
            rules.created_for(gloo, "gloo")
            host, device = torch.ones(4), torch.ones(4, device=DEVICE)
            dist.all_reduce(device)
            dist.all_reduce(device.view(2, 2)[0])  # a part of its memory
            dist.all_reduce(2 * device)  # computed from it
            dist.all_reduce(host, group=gloo)
            with pytest.raises(RuntimeError, match="No backend type associated with device type"):
                dist.all_reduce(host)
            with pytest.raises(RuntimeError, match="No backend type associated with device type"):
                dist.broadcast(torch.zeros(()), 0)
            with pytest.raises(ValueError, match="must be contiguous"):
                dist.all_reduce(torch.ones(4, 2, device=DEVICE).T)
            with pytest.raises(TypeError, match="not supported for NCCL"):
                dist.all_reduce(torch.ones(4, device=DEVICE, dtype=torch.int16))
        assert rules.collectives == 7
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "script", some_slow(SCRIPTS, "train_cifar", "train_images", "train_minimal")
)
def test_two_processes_send_only_what_nccl_takes(script, tmp_path):
    """From tensors on the CPU it could not: averages, statistics, ids, losses, all of a step."""
    words = [f"gpu_rules@0:{tmp_path}/seen.json", f"scripts/{script}.py", *SCRIPTS[script].split()]
    run("2cpu", "tests/harness/wrapped.py", words, output_dir=tmp_path / "run")
    collectives, operations, strict = json.loads((tmp_path / "seen.json").read_text())
    # So the rules were in force: gradients, log lines, evaluations.
    assert collectives >= 5
    assert {"c10d::allreduce_", "c10d::allgather_", "aten::_log_softmax_backward_data"} <= set(
        operations
    )
    # And no step does what GPUs cannot do twice in the same way.
    assert not set(operations) & FORBIDDEN
    assert strict == any("attention" in name for name in operations)
    assert strict == (script == "train_gpt")


def test_shards_of_muon_are_exchanged_as_on_gpus(tmp_path):
    """Two exchanges for each kind of matrix, there and back, with the result of whole ones."""
    words = ("--num_processes", "3")
    run("2cpu", "tests/harness/probe_muon.py", [str(tmp_path)], launcher=words)
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["exchanges"] == 10 and found["difference"] < 1e-5


# ---------------------------------------------------------------------------------- determinism


def test_the_documented_list_of_pytorch_is_the_known_one():
    """A release that adds an operation has to be looked at."""
    page = torch.use_deterministic_algorithms.__doc__
    listed = page.partition(":class:`RuntimeError` when ``mode=True``:")[2].partition("In addition")
    names = re.findall(r"^ +\* :(?:class|func):`torch\.([\w.]+)`", listed[0], re.MULTILINE)
    assert set(names) == NOT_DETERMINISTIC.keys()
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    assert known >= FORBIDDEN


QUICK = ("alexnet", "vgg11", "squeezenet1_0")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in kinds_of_classifiers()
    ],
)
def test_a_step_of_every_classifier_is_deterministic_on_gpus(name):
    model = pretrained.with_deterministic_pools(pretrained.without_weights(name))
    side = 224 if "vit" in name else 288
    with Rules() as rules, torch.random.fork_rng():
        images = torch.empty(2, 3, side, side, device="meta")
        rules.place(images)
        model(images).sum().backward()
    assert len(rules.operations) > 10 and not rules.operations & FORBIDDEN


@pytest.mark.parametrize("length", [1, 5, 6, 7, 9, 14, 20])
def test_an_average_pool_is_that_of_pytorch(length):
    torch.manual_seed(0)
    x = torch.randn(2, 3, length, 11, dtype=torch.float64, requires_grad=True)
    ours = pretrained.AveragePool((7, 6))(x)
    theirs = torch.nn.functional.adaptive_avg_pool2d(x, (7, 6))
    assert torch.allclose(ours, theirs)
    gradient = torch.randn_like(theirs)
    (own,), (other,) = (torch.autograd.grad(y, x, gradient) for y in (ours, theirs))
    assert torch.allclose(own, other)


def test_another_pool_changes_no_name_of_a_weight():
    with torch.device("meta"):
        model = pretrained.build(dict(model="vgg11", options={}, class_names=["a", "b"]))
        theirs = torchvision.models.vgg11()
    assert isinstance(model.avgpool, pretrained.AveragePool)
    assert list(model.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("deterministic", [True, False])
def test_attention_is_deterministic_unless_nobody_asked_for_it(deterministic, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *how: calls.append(how))
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "")  # so that it is restored
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC")
    gpu.deterministic_attention()
    assert calls == [(True,)] * deterministic
    assert os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == ("1" if deterministic else None)
    for name, has_attention in (("vit_b_16", True), ("resnet18", False)):
        calls.clear()
        with torch.device("meta"):
            pretrained.build(dict(model=name, options={}, class_names=["a", "b"]))
        assert calls == [(True,)] * (deterministic and has_attention)


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
