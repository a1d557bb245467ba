"""Launches in which machines may leave and come back: `torchrun --nnodes MIN:MAX`."""

import math
import os

from utils.run import launch, launcher


def machines():
    """The fewest and the most machines of this launch (int); None: their number is fixed."""
    nodes = launcher.option("--nnodes") or os.environ.get("PET_NNODES", "")
    fewest, _, most = nodes.partition(":")
    return (int(fewest), int(most)) if most else None


def possible_processes(accelerator):
    """The numbers of processes that this launch can have, in ascending order.

    Usually only the present one. With `torchrun --nnodes MIN:MAX` machines may leave and come back,
    and the run continues with those that are there. Machines with different numbers of processes
    are not supported.
    """
    present, possible = int(os.environ.get("GROUP_WORLD_SIZE", 1)), machines()
    if not possible or accelerator.num_processes % present:
        return [accelerator.num_processes]
    each = accelerator.num_processes // present
    return [each * count for count in range(possible[0], possible[1] + 1)]


def divide_batch(accelerator, batch_size, gradient_accumulation_steps):
    """As `launch.divide_batch`, for each number of processes that this launch can have.

    Raises:
        UserError: one does not divide the batch; the message suggests the nearest sizes that all
            divide.
    """
    possible = possible_processes(accelerator)
    if len(possible) > 1:
        parts = math.lcm(*possible) * gradient_accumulation_steps
        accumulation = f"{gradient_accumulation_steps} accumulation step(s)"
        launch.check_division(batch_size, parts, f"{either(possible)} process(es) x {accumulation}")
    return launch.divide_batch(accelerator, batch_size, gradient_accumulation_steps)


def either(counts):
    """Formats numbers: [2] as "2", [2, 4, 6] as "2, 4 or 6"."""
    *others, last = map(str, counts)
    return f"{', '.join(others)} or {last}" if others else last
