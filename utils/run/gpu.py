"""What GPUs need in each precision."""

import os
from functools import wraps

import torch

from utils.run.failures import UserError
from utils.scale import fsdp


def check_bf16(config, processes):
    """Refuses bf16 on GPUs that lack it: `torch.cuda.is_bf16_supported` also counts emulation.

    Args:
        config (str): name of the launcher's configuration, for the message.
        processes (int): that many GPUs of this machine are used.

    Raises:
        UserError: on every process of this machine.
    """
    for device in range(processes):
        if torch.cuda.get_device_capability(device) < (8, 0):
            # A model that is sharded cannot be trained in fp16, see `fsdp.check`.
            other = '"no"' if fsdp.requested() else "fp16"
            name = torch.cuda.get_device_name(device)
            raise UserError(
                f"{config} asks for bf16, which {name} only emulates, slowly (it is older than "
                f"Ampere, 2020): set mixed_precision: {other}",
                rank_variable="LOCAL_RANK",
            )


def deterministic_attention():
    """Makes the backward pass of attention deterministic on GPUs, where `launch.check` asks for it.

    With `warn_only`, attention is the one operation that has a deterministic algorithm and does not
    take it. This is somewhat slower. An operation that has none is an error from now on.
    """
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)
        # For the package flash-attn, as transformers calls it.
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")


def skip_whole_steps():
    """Makes the gradient scaler of fp16 skip all of a step whose gradients overflow.

    By default it lets a fused optimizer decide on the device, so the host does not learn that the
    weights stayed as they were: the schedule and averaged weights would move on. Reading it makes
    the host wait once per step.
    """
    scaled_step = torch.amp.GradScaler.step

    @wraps(scaled_step)
    def step(self, optimizer, *args, **kwargs):
        optimizer._step_supports_amp_scaling = False
        return scaled_step(self, optimizer, *args, **kwargs)

    torch.amp.GradScaler.step = step
