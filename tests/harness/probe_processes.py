"""Launched by a test: describes each process of a launch in `<out>/<rank>.json`.

That is its rank and device, a sum over all processes, and how a model is sharded.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import torch
from accelerate import Accelerator

from utils.run import launch
from utils.scale import fsdp

on_cpu = launch.set_up(shards=True)
fsdp.set_up(on_cpu)
accelerator = Accelerator(cpu=on_cpu)
fsdp.configure(accelerator)
own = torch.tensor(accelerator.process_index + 1.0, device=accelerator.device)
total = accelerator.reduce(own, "sum").item()
mesh = accelerator.torch_device_mesh
report = {
    "rank": accelerator.process_index,
    "processes": accelerator.num_processes,
    "device": accelerator.device.type,
    "sum": total,
    "sharded": accelerator.is_fsdp2,
    "machine": int(os.environ.get("GROUP_RANK", 0)),
    "mesh": mesh and {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names},
}
(Path(sys.argv[1]) / f"{accelerator.process_index}.json").write_text(json.dumps(report))
accelerator.end_training()
