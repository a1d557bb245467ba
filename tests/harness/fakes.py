"""What stands in for an `Accelerator` where a test needs only its facts; a pickle that runs code."""

import os
from types import SimpleNamespace

import torch


def accelerator(
    processes=1, rank=0, device="cpu", registered=(), optimizers=(), schedulers=(), **more
):
    """The facts of an `Accelerator` that `utils` reads; `more` replaces or adds some.

    The objects and optimizers that Accelerate keeps for checkpoints have no public names there.
    """
    facts = {
        "num_processes": processes,
        "process_index": rank,
        "is_main_process": rank == 0,
        "is_local_main_process": rank == 0,
        "device": torch.device(device),
        "mixed_precision": "no",
        "is_fsdp2": False,
        "scaler": None,
        "optimizer_step_was_skipped": False,
        "_optimizers": list(optimizers),
        "_schedulers": list(schedulers),
        "_custom_objects": list(registered),
    }
    return SimpleNamespace(**facts | more)


def change(made, optimizers=(), **facts):
    """Changes facts of an `accelerator`."""
    vars(made).update(facts, _optimizers=list(optimizers))


class Bomb:
    """Its pickle makes this folder when it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)
