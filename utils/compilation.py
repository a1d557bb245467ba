"""Which kernels compute a model: compiled ones where that is worth the wait, deterministic ones."""

import importlib.util
import os
import shutil

import torch

from utils.run.output import notice

# They choose among kernels that compute the same, up to rounding.
MODES = ("default", "reduce-overhead", "max-autotune", "never")


def compile_model(accelerator, parts, mode, on_gpus=False, **options):
    """Calls `part.compile(mode=...)` of each of a model's `parts`, and announces the wait.

    The optimizer is not compiled: each process computes its own update of the same weights. Kernels
    that are chosen by their speed may round differently on two GPUs, and the weights would differ.

    Args:
        parts (list): the model, or its blocks, between which the hooks of FSDP run.
        mode (str | None): `--compile`: a mode of `torch.compile`, or "never"; None: not given.
        on_gpus (bool): whether to compile on GPUs if the flag was not given. That needs Triton and
            a C compiler; if one is missing, a notice says so.
        options: of `torch.compile`, such as `dynamic`.
    """
    if mode is None and on_gpus and accelerator.device.type == "cuda" and _can_compile(accelerator):
        mode = "default"
    if mode in (None, "never"):
        return
    # In place: torch.compile(model) would add its prefix to every name.
    for part in parts:
        part.compile(mode=mode, **options)
    accelerator.print("compiling: the first step takes up to a minute")


def _can_compile(accelerator):
    missing = []
    if importlib.util.find_spec("triton") is None:
        missing.append("the package triton")
    if not any(map(shutil.which, [os.environ.get("CC", "cc"), "gcc", "clang"])):
        missing.append("a C compiler")
    if missing and accelerator.is_main_process:
        notice(f"not compiled, which is slower: {' and '.join(missing)} not found")
    return not missing


def make_attention_deterministic():
    """Makes the backward pass of attention deterministic on GPUs, if `launch.set_up` asked for it.

    Under `warn_only`, attention is the only operation that has a deterministic algorithm but does
    not use it. This is somewhat slower. An operation that has none is an error from now on.
    """
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)
