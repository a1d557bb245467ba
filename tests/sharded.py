"""Launched by tests in place of a script: `sharded.py SCRIPT [ARGUMENTS ...]`, with an FSDP YAML.

Makes Accelerate shard the model over gloo, on the CPU, where it would otherwise fall back to DDP. Everything else is the FSDP2
code of Accelerate and PyTorch: `fully_shard`, sharded checkpoints.
"""

import os
import runpy
import sys

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
original = AcceleratorState.__init__


def init(self, *args, fsdp_plugin=None, **kwargs):
    original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)


AcceleratorState.__init__ = init
torch.cpu._is_avx512_bf16_supported = lambda: True  # otherwise the scripts turn off bf16 on CPUs that only emulate it
runpy.run_path(sys.argv[0], run_name="__main__")
