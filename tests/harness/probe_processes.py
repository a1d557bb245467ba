"""Launched by a test: describes each process of a launch in `<out>/<rank>.json`.

That is its rank and device, a sum over all processes, and how a model is sharded.
"""

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import psutil
import torch
from accelerate import Accelerator

from utils.run import launch
from utils.run.collectives import wait_for_all
from utils.scale import fsdp

on_cpu = launch.set_up(shards=True)
fsdp.set_up(on_cpu)
accelerator = Accelerator(cpu=on_cpu)
fsdp.configure(accelerator)
own = torch.tensor(accelerator.process_index + 1.0, device=accelerator.device)
total = accelerator.reduce(own, "sum").item()
mesh = accelerator.torch_device_mesh
wait_for_all(accelerator)
kept_alive = []
for connection in psutil.Process().net_connections("tcp"):
    address = (connection.fd, connection.family, connection.type)
    # An error: the connection was closed since it was listed, or its socket listens.
    with contextlib.suppress(OSError), socket.fromfd(*address) as shared:
        shared.getpeername()
        kept_alive.append(shared.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1)
report = {
    "rank": accelerator.process_index,
    "processes": accelerator.num_processes,
    "device": accelerator.device.type,
    "sum": total,
    "kept_alive": all(kept_alive),
    "sharded": accelerator.is_fsdp2,
    "machine": int(os.environ.get("GROUP_RANK", 0)),
    "mesh": mesh and {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names},
}
(Path(sys.argv[1]) / f"{accelerator.process_index}.json").write_text(json.dumps(report))
accelerator.end_training()
