"""Launched by a test: writes its rank, device, an all-reduced sum and how a model is sharded to `<out>/<rank>.json`."""

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
from accelerate import Accelerator

from utils import topology

accelerator = Accelerator(cpu=topology.check_launch(shards=True))
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0, device=accelerator.device), "sum").item()
mesh = accelerator.torch_device_mesh
topology.gather(accelerator, None)
kept_alive = []
for connection in psutil.Process().net_connections("tcp"):
    address = (connection.fd, connection.family, connection.type)
    with contextlib.suppress(OSError), socket.fromfd(*address) as shared:  # an error: closed since it was listed
        shared.getpeername()  # an error for a socket that listens
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
