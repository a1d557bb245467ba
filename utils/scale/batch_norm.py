"""Batch norm over several processes."""

from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from utils.run.failures import UserError
from utils.run.output import notice


def check(accelerator, model, micro_batch_size):
    """Says if the `micro_batch_size` samples of which each process has statistics are few.

    Raises UserError if that is a single sample, which has none.
    """
    norms = [norm for norm in _batch_norms(model) if not isinstance(norm, SyncBatchNorm)]
    if not any(norm.training for norm in norms):
        return
    if micro_batch_size == 1:
        raise UserError(
            "batch norm needs more than the one sample that each process computes at a time: use a "
            "larger --batch_size, fewer --gradient_accumulation_steps or processes, or a model "
            "without batch norm"
        )
    # Fewer on all processes together are small by intention.
    few = micro_batch_size < 32 <= micro_batch_size * accelerator.num_processes
    if few and accelerator.is_main_process:
        notice(
            f"batch norm uses the statistics of the {micro_batch_size} samples that a process "
            "computes at a time: accuracy suffers from fewer than 32; use a larger --batch_size, a "
            "model without batch norm, or on GPUs torch.nn.SyncBatchNorm.convert_sync_batchnorm"
        )


def broadcast_less(model):
    """Makes DDP broadcast statistics of batch norm only where they are read: in evaluation mode.

    By default it broadcasts the buffers of rank 0 before every forward pass. It goes on with that
    if the model has buffers of other layers.

    Args: model: as `prepare` returned it.
    """
    norms = _batch_norms(model)
    only_norms = set(model.buffers()) == {buffer for norm in norms for buffer in norm.buffers()}
    if isinstance(model, DistributedDataParallel) and only_norms:

        def broadcast_for_evaluation(ddp, _):
            ddp.broadcast_buffers = not all(norm.training for norm in norms)

        model.register_forward_pre_hook(broadcast_for_evaluation)


def _batch_norms(model):
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
