"""Assigns several GPUs to each process, and checks that no two processes share one."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from utils.exits import UserError


def arrange_gpus(gpus, local_processes, per_process):
    """Reorders the GPUs of a machine so that the first GPU of process r becomes cuda:r; the other GPUs follow.

    This is necessary because Accelerate uses cuda:r for process r. With two processes and two GPUs each, the order is 0 2 1 3:
    process 1 then has cuda:1 and cuda:3, which are GPUs 2 and 3.

    Returns:
        list[int]: all GPUs in the new order.
    """
    firsts = [rank * per_process for rank in range(local_processes)]
    others = [gpu for gpu in range(local_processes * per_process) if gpu not in firsts]
    return firsts + others + list(range(local_processes * per_process, gpus))


def refuse_shared(places):
    """Raises UserError if two ranks would use one device.

    Args:
        places: (rank, host, device) of every stage of every rank; `device` is unique on its host.
    """
    owners = {}
    for rank, host, device in places:
        owner = owners.setdefault((host, device), rank)
        if owner != rank:
            raise UserError(
                f"ranks {owner} and {rank} would share {device} on {host}: every rank needs its own --devices_per_process "
                "GPUs. Start fewer processes (accelerate launch --num_processes ...)"
            )


def claim_gpus(per_process):
    """Assigns GPUs to this process; call it before CUDA is used.

    Returns:
        list[torch.device]: one for each stage.

    Raises:
        UserError: there are too few GPUs; the message names two ranks that would share one.
    """
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    rank, first = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("RANK", 0)) - int(os.environ.get("LOCAL_RANK", 0))
    stages = [(r, stage) for r in range(processes) for stage in range(per_process)]
    refuse_shared((first + r, socket.gethostname(), f"GPU {(r * per_process + stage) % gpus}") for r, stage in stages)
    if per_process > gpus:
        raise UserError(f"--devices_per_process {per_process}: this machine has {gpus}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] for i in arrange_gpus(gpus, processes, per_process))
    others = processes + rank * (per_process - 1)  # index of the second GPU of this process
    return [torch.device("cuda", index) for index in (rank, *range(others, others + per_process - 1))]


def check_gpus(accelerator, devices, timeout):
    """Checks that no two processes share a GPU. Compares GPU ids over gloo, because NCCL's own error message is unclear."""
    if accelerator.num_processes == 1:
        return
    own = [(accelerator.process_index, socket.gethostname(), str(torch.cuda.get_device_properties(d).uuid)) for d in devices]
    places = [None] * accelerator.num_processes
    dist.all_gather_object(places, own, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))
    refuse_shared(place for of_rank in places for place in of_rank)
