"""What DistributedDataParallel needs for an exact resume, and batch norm over several processes."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from utils.run.failures import UserError
from utils.run.launch import notice
from utils.run.pace import pace


def warm_up(model, compute_loss):
    """Makes DDP sum gradients in the same order after a restart, and broadcast fewer buffers.

    DDP first assigns gradients to buckets in reverse parameter order, and after the first backward
    pass in the order in which they became ready. With three or more processes, different buckets
    mean a different order of summation, and the last bits differ. Two backward passes make every
    run, new or resumed, use the final buckets from its first real step on. Buffers are restored,
    and weights do not change. This also runs on a single process, so that mistakes show up there.

    By default DDP broadcasts the buffers of rank 0 before every forward pass. Batch norm reads its
    running statistics only in evaluation mode, so they are broadcast only then, unless the model
    has other buffers.

    Args:
        model: as `prepare` returned it.
        compute_loss (Callable): a function without arguments that returns a loss of `model`, such
            as `lambda: compute_loss(model, batch)` with a small batch.
    """
    norms = _batch_norms(model)
    only_norms = set(model.buffers()) == {buffer for norm in norms for buffer in norm.buffers()}
    if isinstance(model, DistributedDataParallel) and only_norms:

        def broadcast_for_evaluation(ddp, _):
            ddp.broadcast_buffers = not all(norm.training for norm in norms)

        model.register_forward_pre_hook(broadcast_for_evaluation)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    for _ in range(2):
        # Eager: otherwise kernels would also be compiled for the shape of this batch.
        with torch.compiler.set_stance("force_eager"):
            compute_loss().backward()
        model.zero_grad()
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    pace.watch(model)


def sync_batch_norm(accelerator, model, micro_batch_size, wanted):
    """Makes batch norm compute its statistics over all processes, if `wanted`.

    Call it after the optimizer was built. `torch.nn.SyncBatchNorm` needs GPUs. Otherwise each
    process uses the statistics of its own `micro_batch_size` samples.

    Returns:
        nn.Module: the model, with the same parameters.

    Raises:
        UserError: that is a single sample, which has no statistics.
    """
    if not any(norm.training for norm in _batch_norms(model)):
        return model
    several = accelerator.num_processes > 1
    if wanted and several and accelerator.device.type == "cuda":
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if micro_batch_size == 1:
        raise UserError(
            "batch norm needs more than the one sample that each process computes at a time: use a "
            "larger --batch_size, fewer --gradient_accumulation_steps or processes, or a model "
            "without batch norm"
        )
    if accelerator.is_main_process and wanted and several:
        notice(
            f"--sync_batchnorm needs GPUs: here batch norm uses the {micro_batch_size} samples of "
            "each process"
        )
    elif accelerator.is_main_process and micro_batch_size < 32:
        notice(
            f"batch norm uses the statistics of the {micro_batch_size} samples that a process "
            "computes at a time: accuracy suffers from fewer than 32; use a larger --batch_size, "
            "--sync_batchnorm on several GPUs, or a model without batch norm"
        )
    return model


def _batch_norms(model):
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
