"""Compiles a model where that is worth the wait, and can be done."""

import importlib.util
import os
import shutil

from utils.run.launch import notice


def compile_model(accelerator, model, flag):
    """Calls `model.compile()`, as `--compile` or `--no-compile` say, and announces the wait.

    Without a flag: on GPUs, where a step of many small operations is limited by memory and by the
    host. There `torch.compile` needs Triton and a C compiler; if one is missing, a notice says so.

    Args:
        flag (bool | None): None: neither flag was given.
    """
    if flag is None:
        flag = accelerator.device.type == "cuda" and _can_compile(accelerator)
    if flag:
        model.compile()  # in place: torch.compile(model) would add its prefix to every name
        accelerator.print("compiling: the first step takes up to a minute (--no-compile: no wait)")


def _can_compile(accelerator):
    missing = []
    if importlib.util.find_spec("triton") is None:
        missing.append("the package triton")
    if not any(map(shutil.which, [os.environ.get("CC", "cc"), "gcc", "clang"])):
        missing.append("a C compiler")
    if missing and accelerator.is_main_process:
        notice(f"not compiled, which is slower: {' and '.join(missing)} not found")
    return not missing
