"""What an exact resume needs of each process: the same buckets of gradients, the same seeds."""

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from utils.run import process
from utils.run.failures import UserError
from utils.run.output import notice


def warm_up(models, compute_loss):
    """Makes DDP sum gradients in the same order after a restart, and broadcast fewer buffers.

    DDP first assigns gradients to buckets in reverse parameter order, and after the first backward
    pass in the order in which they became ready. With three or more processes, different buckets
    mean a different order of summation, and the last bits differ. Two backward passes make every
    run, new or resumed, use the final buckets from its first real step on. Buffers are restored,
    and weights do not change. This also runs on a single process, so that mistakes show up there:
    a notice names a parameter without a gradient (UserError, if DDP would refuse it), and a buffer
    that a checkpoint would not have.

    Args:
        models: as `prepare` returned it; or a list of all models that take part, as of a GAN.
        compute_loss (Callable): returns a loss of all of them, of a small batch.
    """
    models = models if isinstance(models, list | tuple) else [models]
    buffers = [{name: b.clone() for name, b in model.named_buffers()} for model in models]
    for first in (True, False):
        # Eager: otherwise kernels would also be compiled for the shape of this batch.
        with torch.compiler.set_stance("force_eager"):
            compute_loss().backward()
        for model in models:
            if first:
                _check_gradients(model)
            model.zero_grad()
    for model, before in zip(models, buffers, strict=True):
        saved = model.state_dict().keys()
        for name, value in model.named_buffers():
            if name not in before or value.shape != before[name].shape:  # made in the forward pass
                continue
            if name not in saved and process.is_main() and not torch.equal(value, before[name]):
                notice(
                    f"the buffer {name} changes in the forward pass, and a restart begins with its "
                    "first value: register it with persistent=True"
                )
            value.copy_(before[name])


def _check_gradients(model):
    """Raises UserError if DDP would refuse the model; without DDP, a notice says so."""
    unused = [n for n, w in model.named_parameters() if w.requires_grad and w.grad is None]
    if not unused or isinstance(model, FSDPModule):
        return
    line = f"no gradient reaches {unused[0]} ({len(unused)} without): "
    in_ddp = isinstance(model, DistributedDataParallel)
    if in_ddp and not (model.find_unused_parameters or model.static_graph):
        raise UserError(
            f"{line}remove or freeze what the loss does not use, or add DistributedDataParallel"
            "Kwargs(find_unused_parameters=True) to the kwargs_handlers of the Accelerator"
        )
    if process.is_main() and not in_ddp:
        notice(f"{line}several processes with DDP would refuse this model")


def seed_step(accelerator, seed, step, micro_batch=0):
    """Seeds PyTorch's generators for a forward pass: after a restart, dropout draws the same masks.

    The seed differs for each process, step and micro-batch. Unlike `set_seed`, this does not seed
    the generators of Python and NumPy, and takes a microsecond instead of half a millisecond.
    """
    rank = accelerator.process_index
    seed = (seed + 1_000_003 * step + 7_919 * rank + 104_729 * micro_batch) % 2**32
    torch.default_generator.manual_seed(seed)
    if accelerator.device.type == "cuda":
        torch.cuda.manual_seed(seed)
