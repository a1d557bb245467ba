"""Launched by tests in place of a script: `sharded.py SCRIPT [ARGUMENTS ...]`, with an FSDP YAML.

Makes Accelerate shard the model over gloo, on the CPU. By itself it goes by the kind of device and falls back to DDP.
Everything after that decision is Accelerate's and PyTorch's own code for FSDP2: `fully_shard`, sharded checkpoints.
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
torch.cpu._is_avx512_bf16_supported = lambda: True  # or the scripts would decline bf16, which many CPUs only emulate
runpy.run_path(sys.argv[0], run_name="__main__")
