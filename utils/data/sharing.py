"""How processes share a data set: who reads it first, whether all see the same, even batches."""

import math

from utils.run.collectives import gather, run_on_all
from utils.run.failures import UserError


def local_main_first(accelerator, function):
    """Runs `function()` on one process per node first, then on the others, which use its cache.

    An error on any process is raised on every one.
    """
    first = accelerator.is_local_main_process
    result = run_on_all(accelerator, function if first else lambda: None)
    after = run_on_all(accelerator, lambda: None if first else function())
    return result if first else after


def agree(accelerator, name, data):
    """Prints what a data set is, on the main process; call it on every process.

    Args:
        name (str): the value of `--dataset`.
        data: has `description`, one line with a checksum, and `details`, more lines.

    Returns:
        str: the description: a run that records it continues with the same data only.

    Raises:
        UserError: the data set differs between machines.
    """
    everywhere = sorted(set(gather(accelerator, data.description)))
    if len(everywhere) > 1:
        differing = " against ".join(everywhere)
        raise UserError(f"--dataset {name} differs between machines: {differing}")
    if accelerator.is_main_process:
        print("\n  ".join([f"data: {data.description}", *data.details]))
    return data.description


def evaluation_batch_size(accelerator, samples, most):
    """Computes the global batch size for an evaluation of so many samples.

    At most `most` (int) per process and batch. All batches get about the same size: Accelerate
    fills up the last one with repeated samples, which take time.
    """
    processes = accelerator.num_processes
    batches = math.ceil(samples / (most * processes))
    return math.ceil(samples / (batches * processes)) * processes
