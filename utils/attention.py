"""Attention that gives the same bytes after a restart."""

import os

import torch


def make_deterministic():
    """Makes the backward pass of attention deterministic on GPUs, if `launch.set_up` asked for it.

    Under `warn_only`, attention is the only operation that has a deterministic algorithm but does
    not use it. This is somewhat slower. An operation that has none is an error from now on.
    """
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)
        # For the package flash-attn, as transformers calls it.
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
