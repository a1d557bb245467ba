"""What the machine can do, and which share of it a step reaches."""

import hashlib

import torch
import train_cifar
from cifar import DEFAULTS, cifar_flops
from gpt import gpt_arguments, gpt_flops
from measuring import logged_steps, measure_loop, measure_script, short_run, steady

from utils.run import devices

MATRIX, COPIED = 2048, 2**28  # rows and columns; bytes, far more than any cache holds


def machine_limit(args, rounds):
    """What the machine can do, and the share of it that steps of our scripts reach.

    Operations per second of a matrix product, bytes per second that a copy reads and writes, and
    that one core hashes with SHA-256, as checkpoints are; in bf16 where the CPU has it.
    """
    bf16, batch = devices.has_bf16(), train_cifar.RECIPES["fastnet"]["batch_size"]
    steps, image_sizes = 12 if args.quick else 60, (24, 28, 32)
    run = short_run(steps, log_every=1)
    products = ["float32", "bf16"] if bf16 else ["float32"]
    limits = {name: [] for name in (*products, "copy", "sha256")}
    shares = {name: [] for name in (*(f"cifar_{size}px" for size in image_sizes), "gpt")}
    for _ in rounds.each():
        for name in products:
            options = dict(steps=2 * steps, bf16=name == "bf16")
            seconds = measure_loop(rounds, "machine.matrix_product", **options)["seconds"]
            limits[name].append(2e-12 * MATRIX**3 / steady(seconds))
        seconds = measure_loop(rounds, "machine.copy", steps=steps)["seconds"]
        limits["copy"].append(2e-12 * COPIED / steady(seconds))
        seconds = measure_loop(rounds, "machine.sha256", steps=steps)["seconds"]
        limits["sha256"].append(1e-12 * COPIED / steady(seconds))

        lines, _ = measure_script(rounds, f"train_cifar.py {run}", bf16=bf16)
        limit = limits[products[-1]][-1]
        by_size = {size: [] for size in image_sizes}
        for line in lines:
            if line["split"] == "train":
                size = train_cifar.image_size_at(line["step"] / steps, DEFAULTS)
                by_size[size].append(line["step_seconds"])
        for size, seconds in by_size.items():
            reached = 1e-12 * cifar_flops(batch, size) / steady(seconds)
            shares[f"cifar_{size}px"].append(reached / limit)

        lines, _ = measure_script(rounds, f"train_gpt.py {run} {gpt_arguments()} --sample_length 1")
        reached = 1e-12 * gpt_flops() / steady(logged_steps(lines, steps // 2))
        shares["gpt"].append(reached / limits["float32"][-1])
    absolute = "10^12 operations (copy, sha256: bytes) per second"
    ratio = "operations per second over a matrix product (more is better), ratio"
    measured = {f"machine_limit/{name}": (values, absolute) for name, values in limits.items()}
    return measured | {f"machine_limit/{name}": (values, ratio) for name, values in shares.items()}


def matrix_product(steps, bf16):
    """Multiplies two square matrices; yields after each product."""
    left, right = torch.randn(2, MATRIX, MATRIX, dtype=torch.bfloat16 if bf16 else torch.float32)
    for _ in range(steps):
        torch.mm(left, right)
        yield


def copy(steps):
    """Copies `COPIED` bytes in memory; yields after each copy."""
    source = torch.zeros(COPIED, dtype=torch.uint8)
    target = torch.zeros_like(source)
    for _ in range(steps):
        target.copy_(source)
        yield


def sha256(steps):
    """Hashes `COPIED` bytes, as of a checkpoint, on one core; yields after each time."""
    source = bytes(COPIED)
    for _ in range(steps):
        hashlib.sha256(source).digest()
        yield
