"""Launched by a test: writes its rank, device, an all-reduced sum and how a model is sharded to `<out>/<rank>.json`."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate import Accelerator

from utils import topology

accelerator = Accelerator(cpu=topology.check_launch(shards=True))
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0, device=accelerator.device), "sum").item()
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
