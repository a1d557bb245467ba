"""Functions of train_model_parallel.py: stages, their schedule, and who has which GPU."""

import os

import pytest
import torch
import torch.nn.functional as F
from harness.launches import load_script

from utils.run.failures import UserError


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    return load_script("train_model_parallel")


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("micro_batches", [1, 4, 6])
def test_split_network_equals_the_unsplit_one(script, stages, micro_batches):
    torch.manual_seed(0)
    unsplit = script.build_blocks(10, 8).double()
    split = script.Pipeline(
        script.build_blocks(10, 8).double(), [torch.device("cpu")] * stages, micro_batches
    )
    split.blocks.load_state_dict(unsplit.state_dict())
    assert len(split.spans) == stages and all(end > first for first, end in split.spans)
    # 10 samples in 4 or 6 micro-batches: their sizes differ.
    images, labels = torch.randn(10, 3, 32, 32, dtype=torch.float64), torch.arange(10)
    losses = [F.cross_entropy(model(images), labels) for model in (unsplit, split)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    for (name, expected), weight in zip(
        unsplit.named_parameters(), split.parameters(), strict=True
    ):
        torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-9, atol=1e-13, msg=name)


def test_schedule_keeps_every_stage_busy(script):
    """Three stages, three micro-batches: five ticks of the GPipe schedule.

    In each tick the last active stage is first.
    """
    pipeline = script.Pipeline(script.build_blocks(10, 8), [torch.device("cpu")] * 3, 3)
    order = []
    for stage, (first, _) in enumerate(pipeline.spans):
        pipeline.blocks[first].register_forward_pre_hook(
            lambda _module, _inputs, stage=stage: order.append(stage)
        )
    pipeline(torch.randn(6, 3, 32, 32))
    assert order == [0] + [1, 0] + [2, 1, 0] + [2, 1] + [2]


@pytest.mark.parametrize(
    "gpus,processes,per_process", [(4, 2, 2), (8, 4, 2), (8, 2, 3), (4, 1, 2), (4, 4, 1)]
)
def test_each_process_claims_its_own_gpus(script, monkeypatch, gpus, processes, per_process):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    names = [f"GPU-{letter}" for letter in "abcdefgh"[:gpus]]
    for rank in range(processes):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
        claimed = script.claim_devices(False, per_process)
        assert claimed[0].index == rank  # where Accelerate puts this rank
        numbered = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        assert sorted(numbered) == names
        # Adjacent GPUs: for two processes with two GPUs each, (0, 1) and (2, 3).
        own = names[rank * per_process : (rank + 1) * per_process]
        assert [numbered[device.index] for device in claimed] == own


def test_too_few_gpus_name_two_ranks_and_the_gpu(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name, value in (("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("RANK", "5")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="ranks 4 and 6 would share GPU 0 on ") as refused:
        script.claim_devices(False, 2)
    assert "\n" not in str(refused.value)
