"""What `utils.run.gpu` makes of the precisions of GPUs. (Launches show what it does to a run.)"""

from types import SimpleNamespace

import pytest
import torch

from utils.run import gpu
from utils.run.failures import UserError


@pytest.mark.parametrize(
    ("capabilities", "processes", "sharded", "lacks", "says"),
    [
        ([(7, 5)], 1, False, 0, "set mixed_precision: fp16"),
        ([(8, 0), (7, 0)], 2, False, 1, "set mixed_precision: fp16"),
        ([(7, 5)], 1, True, 0, 'set mixed_precision: "no"'),
        ([(8, 0)], 1, False, None, None),
        ([(12, 0), (7, 5)], 1, False, None, None),  # the second is not used
    ],
)
def test_bf16_needs_gpus_that_compute_in_it(
    capabilities, processes, sharded, lacks, says, monkeypatch
):
    """PyTorch also calls a GPU that emulates it able to compute in it."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(sharded))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    if says is None:
        gpu.check_bf16("a.yaml", processes)
        return
    with pytest.raises(UserError, match=f"^a.yaml .*GPU {lacks} only emulates.*{says}$") as error:
        gpu.check_bf16("a.yaml", processes)
    assert error.value.rank_variable == "LOCAL_RANK"


def test_a_scaled_step_is_not_left_to_a_fused_optimizer(monkeypatch):
    calls = []
    monkeypatch.setattr(
        torch.amp.GradScaler, "step", lambda *args, **more: calls.append((args, more)) or "done"
    )
    gpu.skip_whole_steps()
    optimizer = SimpleNamespace(_step_supports_amp_scaling=True)
    assert torch.amp.GradScaler.step("scaler", optimizer, 1, closure=2) == "done"
    assert calls == [(("scaler", optimizer, 1), {"closure": 2})]
    assert optimizer._step_supports_amp_scaling is False
