"""What to say when memory runs out: how much was in use, what lowers it, and who ended a process.

Imports only the standard library, as `failures` does.
"""

import contextlib
import os
import sys
from pathlib import Path

_ways, _micro_batch_size, _folder = [], None, None


def remember(args, shards):
    """Stores what lowers the memory of this run, cheapest first.

    Args:
        args (Namespace): of a training run.
        shards (bool): whether the script can shard its model.
    """
    global _ways
    ways = [
        (
            hasattr(args, "gradient_accumulation_steps"),
            "a larger --gradient_accumulation_steps splits the same batch into smaller parts",
        ),
        (
            os.environ.get("ACCELERATE_MIXED_PRECISION", "no") in ("no", ""),
            "mixed_precision: bf16 (activations take half as much)",
        ),
        (
            getattr(args, "activation_checkpointing", None) is False,
            "--activation_checkpointing (a third more computation)",
        ),
        (getattr(args, "lora_rank", None) == 0, "--lora_rank 16 (trains an adapter)"),
        (shards, "an FSDP configuration (several GPUs share the model)"),
        (True, "a smaller --batch_size or model (another result)"),
    ]
    _ways = [way for possible, way in ways if possible]


def remember_micro_batch_size(samples):
    """Stores the number of samples per micro-batch and process."""
    global _micro_batch_size
    _micro_batch_size = samples


def remember_folder(folder):
    """Stores the folder of the run, for a snapshot of the memory of a GPU."""
    global _folder
    _folder = Path(folder)


def message(rank, reason):
    """One line for a process that ran out of memory, and a snapshot of a GPU's memory."""
    ways = "; ".join(_ways)
    line = f"out of memory on rank {rank}, which computes {_micro_batch_size} samples at a time"
    return f"{line}{_of_gpu(rank)}. What lowers it, cheapest first: {ways} ({reason})"


def _of_gpu(rank):
    """The memory of the GPU that this process uses, and where its snapshot is; "" without one."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return ""
    used, reserved, total = (
        size / 2**30
        for size in (
            cuda.memory_allocated(),
            cuda.memory_reserved(),
            cuda.get_device_properties(cuda.current_device()).total_memory,
        )
    )
    text = f" ({used:.1f} GiB in tensors, {reserved:.1f} reserved, of {total:.1f}"
    with contextlib.suppress(OSError, TypeError):  # no folder yet, or its disk is full
        path = _folder / f"memory_rank_{rank}.pickle"
        cuda.memory._dump_snapshot(str(path))
        text += f"; {path} for pytorch.org/memory_viz"
    return f"{text})"


def kills(groups="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """How many processes of its control group the kernel ended because memory ran out.

    Source: `oom_kill` of `memory.events` in the kernel's Documentation/admin-guide/cgroup-v2.rst.

    Returns:
        int: 0 if that cannot be read.
    """
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(own).read_text().splitlines()
        path = next(line for line in lines if line.startswith("0::"))[3:]
        folder = Path(f"{groups}{path}")
        # In a container the path may be that on its host: then its root shows the events.
        for group in (folder, *folder.parents):
            if group.is_relative_to(groups) and (group / "memory.events").exists():
                events = dict(map(str.split, (group / "memory.events").read_text().splitlines()))
                return int(events.get("oom_kill", 0))
    return 0


KILLS_BEFORE = kills()  # those of other programs in the same container
