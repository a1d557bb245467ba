"""Records the arguments, versions, topology and script of a run, and compares two such records."""

import hashlib
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from utils.run.files import read_json, write_json

STARTS = 1000  # which args.json lists, besides the first one
# Arguments that may be paths: compared as absolute paths.
PATHS = ("dataset", "init_from", "weights")
FLAGS = {"image_column": "columns", "label_column": "columns"}  # if it is not --name
# Dense bf16 (before Ampere: fp16) TFLOPS of the tensor cores, summed in float32, of SXM modules and
# cards. From NVIDIA's data sheets, which often show twice as much, for sparse matrices (that of the
# RTX 6000 Ada four times as much: 1457, for sparse fp8). Of GeForce cards, which sum in float32 at
# half the speed, from "Peak BF16 Tensor TFLOPS with FP32 Accumulate" of the white papers of their
# architectures, as other projects quote them: Ada (4090), RTX Blackwell (5090). That of the 3090 is
# in tables of other projects only.
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100": 989,
    "H800": 989,  # an H100 with fewer NVLinks
    "H20": 148,
    "A100": 312,
    "A40": 149.7,
    "A10": 125,
    "L40S": 362,
    "L4": 121,
    "RTX 6000 Ada": 364,
    "RTX 5090": 209.5,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
}
# What the names of variants have, and of partitions, whose peak is another one.
VARIANTS = r"MIG|NVL|Laptop|Max-Q|[345]090 (D|Ti)\b|[HV][18]00.PCIe|-\d+[ABCQ]\b"


def comparable(arguments):
    """The arguments that JSON can store. Paths to existing data become absolute."""
    plain = (str, int, float, bool, type(None))
    values = {name: value for name, value in arguments.items() if isinstance(value, plain)}
    for name in PATHS:
        path = values.get(name)
        # A dataset may also be a Hub id, and weights a name.
        if path is not None and (name == "init_from" or Path(path).exists()):
            values[name] = str(Path(path).resolve())
    return values


def differences(earlier, now, may_change):
    """Lists the arguments in which two runs differ, except those that may change.

    Returns:
        list[str]: `--name value (was earlier value)`.
    """
    found = []
    for name in sorted((earlier.keys() | now.keys()) - set(may_change)):
        was, value = earlier.get(name), now.get(name)
        if was != value and not (name in PATHS and moved(was, value)):
            was, value = (repr(text) if "\n" in str(text) else text for text in (was, value))
            found.append(f"--{FLAGS.get(name, name)} {value} (was {was})")
    return found


def moved(before, now):
    """Whether data was moved: `before` no longer exists, and `now` has the same name.

    Allows a whole project to be moved.
    """
    before, now = Path(str(before)), Path(str(now))
    gone = before.is_absolute() and not before.exists()
    return gone and now.is_absolute() and before.name == now.name


def topology(accelerator):
    """The processes and devices of this launch, for args.json and checkpoints."""
    on_gpu = accelerator.device.type == "cuda"
    return {
        "processes": accelerator.num_processes,
        "machines": int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "threads_per_process": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
    }


def versions():
    """Versions of Python and of the packages that can change results."""
    installed = {"python": platform.python_version()}
    optional = [package for package in ("transformers", "peft") if package in sys.modules]
    for package in ("torch", "torchvision", "accelerate", "datasets", *optional):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return installed


def changes(accelerator, earlier):
    """Lists how topology and versions differ from those of the record `earlier` (dict)."""
    now = topology(accelerator) | versions()
    before = earlier["topology"] | earlier["versions"]
    return [
        f"{name.replace('_', ' ')} {before.get(name)} -> {now[name]}"
        for name in now
        if before.get(name) != now[name]
    ]


def write(folder, accelerator, own, step):
    """Writes args.json, which lists the starts of the run: the first one and the last `STARTS`.

    Args:
        folder (Path): that of the run.
        own (dict): what only the run knows, such as its `arguments`.
        step (int): optimizer steps done before this start.

    Returns:
        dict: the record of the run, which also becomes a part of every checkpoint.
    """
    own = {
        **own,
        "topology": topology(accelerator),
        "versions": versions(),
        "git_commit": git_commit(),
        "script": script_hash(),
        "command": sys.argv,
    }
    starts = (read_json(folder / "args.json") or {}).get("starts", [])
    starts.append({"step": step, "time": timestamp(), **own["topology"]})
    kept = starts[:1] + starts[1:][-STARTS:]
    write_json(folder / "args.json", {**own, "starts": kept})
    return own


def script_hash():
    """SHA-256 of the script's file; None in a notebook."""
    file = Path(sys.argv[0])
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def git_commit():
    """The git commit of the running script, or None outside a repository.

    It ends in `-dirty` if files were changed since.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    folder = Path(sys.argv[0]).resolve().parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def timestamp():
    """The time now, UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def peak_flops(accelerator, tflops=None):
    """Peak floating-point operations per second of all GPUs together, for MFU.

    Args:
        tflops (float | None): TFLOPS of one GPU; overrides the table.

    Returns:
        float | None: None on a CPU, in float32, or for an unknown GPU.
    """
    precise = accelerator.mixed_precision in ("bf16", "fp16")
    if tflops is None and accelerator.device.type == "cuda" and precise:
        tflops = known_tflops(torch.cuda.get_device_name())
    return tflops and tflops * 1e12 * accelerator.num_processes


def known_tflops(device_name):
    """Looks up a GPU by its CUDA name.

    Returns:
        float | None: None if the table lacks it, or for another variant or a partition of one: by
        MIG, or a virtual GPU.
    """
    if re.search(VARIANTS, device_name, re.IGNORECASE):
        return None
    peaks = PEAK_TFLOPS.items()
    return next((peak for name, peak in peaks if re.search(rf"\b{name}\b", device_name)), None)
