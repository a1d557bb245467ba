"""Several GPUs for each process: which ones, and a check that no two processes share one."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from utils.exits import UserError


def arrange_gpus(gpus, local_processes, per_process):
    """The order in which to number a machine's GPUs, so that process r finds its own at r and behind the others' first.

    Accelerate puts process r on cuda:r, and synchronises there. In the new order that is the first of *its* GPUs:
    with two processes and two each, GPUs 0 1 2 3 are numbered 0 2 1 3, and process 1 owns cuda:1 and cuda:3.

    Returns:
        list[int]: all GPUs in the new order.
    """
    firsts = [rank * per_process for rank in range(local_processes)]
    others = [gpu for gpu in range(local_processes * per_process) if gpu not in firsts]
    return firsts + others + list(range(local_processes * per_process, gpus))


def refuse_shared(places):
    """Raises UserError if two ranks would use one device.

    Args:
        places: (rank, host, device) of every stage of every rank; `device` identifies it on its host.
    """
    owners = {}
    for rank, host, device in places:
        owner = owners.setdefault((host, device), rank)
        if owner != rank:
            raise UserError(
                f"ranks {owner} and {rank} would share {device} on {host}: every rank needs as many GPUs of its own as "
                "--devices_per_process says. Start fewer processes (accelerate launch --num_processes ...)"
            )


def claim_gpus(per_process):
    """Gives this process its GPUs; call it before CUDA is used.

    Returns:
        list[torch.device]: one for each stage.

    Raises:
        UserError: there are too few; names two ranks that would share one.
    """
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    rank, first = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("RANK", 0)) - int(os.environ.get("LOCAL_RANK", 0))
    stages = [(r, stage) for r in range(processes) for stage in range(per_process)]
    refuse_shared((first + r, socket.gethostname(), f"GPU {(r * per_process + stage) % gpus}") for r, stage in stages)
    if per_process > gpus:
        raise UserError(f"--devices_per_process {per_process}: this machine has {gpus}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] for i in arrange_gpus(gpus, processes, per_process))
    behind = processes + rank * (per_process - 1)
    return [torch.device("cuda", index) for index in (rank, *range(behind, behind + per_process - 1))]


def check_gpus(accelerator, devices, timeout):
    """Compares the GPUs that all processes really got, by their serial ids, over gloo: NCCL would fail obscurely."""
    if accelerator.num_processes == 1:
        return
    own = [(accelerator.process_index, socket.gethostname(), str(torch.cuda.get_device_properties(d).uuid)) for d in devices]
    places = [None] * accelerator.num_processes
    dist.all_gather_object(places, own, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))
    refuse_shared(place for of_rank in places for place in of_rank)
