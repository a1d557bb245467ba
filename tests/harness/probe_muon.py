"""Launched by a test: orthogonalizes sharded matrices, and exchanges the shards as GPUs do.

On a CPU, DTensor goes from shards of rows to whole matrices by an all-gather, on GPUs by an
all-to-all. Gloo has that, too: here it is PyTorch's operation for GPUs, with its arithmetic for
sizes that do not divide evenly. What remains unproven without GPUs is the transport, NCCL's
all-to-all, and its order on CUDA streams.

Writes the largest difference from unsharded matrices to `<out>/<rank>.json`.
"""

import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, placement_types

from utils.muon import orthogonalize_all

exchanges = 0


def all_to_all(shard, gather_dim, shard_dim, mesh, mesh_dim):
    """What `shard_dim_alltoall` does on any other device than a CPU."""
    global exchanges
    exchanges += 1
    group = mesh.get_group(mesh_dim).group_name
    return torch.ops._dtensor.shard_dim_alltoall(shard, gather_dim, shard_dim, group)


placement_types.shard_dim_alltoall = all_to_all
state = PartialState(cpu=True)
mesh = init_device_mesh("cpu", (state.num_processes,))
torch.manual_seed(0)
difference = 0.0
# Fewer and more matrices than processes, rows that they do not divide evenly, or too few of them.
for count, rows, columns in ((1, 6, 4), (2, 8, 8), (3, 9, 5), (7, 8, 20), (2, 2, 6)):
    whole = [torch.randn(rows, columns) for _ in range(count)]
    sharded = orthogonalize_all([distribute_tensor(x, mesh, [Shard(0)]) for x in whole], 3)
    for result, expected in zip(sharded, orthogonalize_all(whole, 3), strict=True):
        assert result.placements == (Shard(0),) and result.shape == expected.shape
        difference = max(difference, (result.full_tensor() - expected).abs().max().item())
report = {"difference": difference, "exchanges": exchanges}
(Path(sys.argv[1]) / f"{state.process_index}.json").write_text(json.dumps(report))
dist.destroy_process_group()
