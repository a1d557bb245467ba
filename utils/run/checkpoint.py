"""Writes checkpoints atomically: the files of `save_state` are hashed and synced to disk before the
folder gets its final name.

    checkpoints/step_00000120/     model, optimizer, scheduler (files of Accelerate) and
    manifest.json checkpoints/.writing/          an incomplete checkpoint; if a crash leaves it, the
    next save deletes it

The progress of the run (step, best score) is stored as JSON in the manifest, not as a pickle:
loading it executes no code.
"""

import hashlib
import json
import os
import pickle
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import CheckpointException

from utils.run import shards
from utils.run.collectives import gather, run_on_all, run_on_main
from utils.run.failures import UserError
from utils.run.files import sync

MANIFEST = "manifest.json"
# Processes compare what they see this often, half a second apart: network file systems show new
# files late.
SHARED_CHECKS = 20


def start(accelerator, folder):
    """Creates an empty folder `checkpoints/.writing` in `folder`; call it on every process before
    `accelerator.save_state`.

    Returns:
        tuple[Path, Exception | None]: the folder to write to; on the main process, the error if it
        could not be created.
    """
    writing = Path(folder) / "checkpoints" / ".writing"

    def create():
        try:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
        except OSError as error:
            return error

    error = run_on_main(accelerator, create)
    return writing, error if accelerator.is_main_process else None


def finish(accelerator, writing, error, manifest, keep):
    """Turns what `save_state` wrote into `checkpoints/step_N`; call it on every process.

    If writing fails (a full disk, for example), this prints a warning, and training continues
    without this checkpoint.

    Args:
        error (Exception | None): what went wrong on this process while writing.
        manifest (dict): values to save with the checkpoint, as JSON; `manifest["progress"]["step"]`
            is its step, and `manifest["progress"]["score"]` (higher is better, or None) decides
            which checkpoint is kept as the best.
        keep (int): newest checkpoints to keep, besides the best one.

    Returns:
        bool: whether the checkpoint was written; the same on every process.
    """
    step = manifest["progress"]["step"]
    problem = _first_problem(accelerator, error)
    if problem is None:
        try:
            files = hash_and_sync(accelerator, writing)
            if accelerator.is_main_process:
                target = writing.with_name(f"step_{step:08d}")
                _complete(writing, target, {**manifest, "files": files})
                _prune(writing.parent, keep, target)
        except OSError as write_error:
            error = write_error
        # No process continues, or exits, before the checkpoint has its final name.
        problem = _first_problem(accelerator, error)
    if problem is not None and accelerator.is_main_process:
        message = f"warning: checkpoint of step {step} not written, training continues: {problem}"
        print(message, file=sys.stderr, flush=True)
        shutil.rmtree(writing, ignore_errors=True)
    return problem is None


def hash_and_sync(accelerator, folder):
    """Hashes the files in `folder`, spread over all processes, and syncs them to disk; call it on
    every process.

    Returns:
        dict: name -> `size` in bytes and `sha256`.

    Raises:
        UserError: the processes do not see the same files, because their machines do not share the
            folder.
        OSError: a process could not read or sync a file; raised on every process.
    """
    for _ in range(SHARED_CHECKS):
        try:
            view = _sizes(folder)
        except OSError as error:  # a file disappeared, or the file system answers later
            view = {str(error): 0}
        views = gather(accelerator, view)
        if all(view == views[0] for view in views):
            break
        time.sleep(0.5)
    else:
        rank, view = next((rank, view) for rank, view in enumerate(views) if view != views[0])
        name = min(dict(view.items() ^ views[0].items()))
        raise UserError(
            f"{folder} is not shared by all machines: rank 0 and rank {rank} do not see the same "
            f"{name}. Use an --output_dir on a file system that all of them share"
        )
    own, shares = [], [0] * accelerator.num_processes  # each process hashes about as many bytes
    for name, size in sorted(views[0].items(), key=lambda item: -item[1]):
        rank = shares.index(min(shares))
        shares[rank] += size
        own += [name] if rank == accelerator.process_index else []
    try:
        # Data can only be synced on the machine that wrote it.
        if accelerator.is_local_main_process:
            for path in [*folder.rglob("*"), folder]:
                sync(path)
        result = {name: {"size": views[0][name], "sha256": _sha256(folder / name)} for name in own}
    except OSError as error:
        result = error
    results = gather(accelerator, result)
    if error := next((result for result in results if isinstance(result, OSError)), None):
        raise error
    return {name: described for result in results for name, described in result.items()}


def is_write_error(error):
    """Whether an exception of `save_state` means that a file could not be written, for example
    because the disk is full.
    """
    if isinstance(error, (TimeoutError, ConnectionError)):
        return False
    if isinstance(error, CheckpointException):  # a sharded checkpoint: one failure per process
        return all(is_write_error(failure[0]) for failure in error.failures.values())
    # torch.save reports a failed write as a RuntimeError whose text names the file of its zip
    # writer.
    return isinstance(error, (OSError, SafetensorError)) or "inline_container" in str(error)


def find(folder, resume):
    """Finds the checkpoint to continue from and verifies it; main process only.

    Args:
        folder: the run's folder.
        resume (str): `auto` for the newest undamaged one in it, `never`, or the path of another
            run's checkpoint, which is used until this run has checkpoints of its own.

    Returns:
        tuple[Path, dict] | None: the checkpoint and its manifest; None for a new run.

    Raises:
        UserError: the checkpoint `resume` is damaged or belongs to this run, or all checkpoints of
            this run are damaged.
    """
    if resume == "never":
        return None
    candidates = all_in(folder)[::-1]
    if resume != "auto":
        if Path(resume).resolve() in [path.resolve() for path in candidates]:
            raise UserError(
                f"--resume {resume} belongs to this run, which continues from its newest "
                "checkpoint: to continue from an earlier one use another --output_dir"
            )
        if not candidates:
            return Path(resume), _verify_and_check(resume)
    for path in candidates:
        try:
            return path, _verify_and_check(path)
        except UserError as damage:
            print(f"warning: {damage}; trying the one before it", file=sys.stderr, flush=True)
    if candidates:
        raise UserError(
            f"all checkpoints in {folder}/checkpoints are damaged: restore one, or start over in "
            "another --output_dir"
        )
    return None


def all_in(folder):
    """The checkpoints in a run's folder, oldest first."""
    return sorted(Path(folder).glob("checkpoints/step_*"))


def read_manifest(path):
    """Reads the manifest of a checkpoint.

    Returns:
        dict | None: `arguments`, `progress` (`step`, `score`, and what the script saved with it),
        `topology`, `versions`, `files`, `sha256`; None if it is missing or not one of ours.
    """
    try:
        manifest = json.loads((Path(path) / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    ours = isinstance(manifest, dict) and isinstance(manifest.get("progress"), dict)
    return manifest if ours else None


def verify(path):
    """Checks every file of a checkpoint against its manifest, before anything is loaded.

    Returns:
        dict: the manifest.

    Raises:
        UserError: a file is missing, damaged or unknown; the message names the first one.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"checkpoint {path} does not exist")
    manifest = read_manifest(path)
    if manifest is None or not isinstance(manifest.get("files"), dict):
        raise UserError(f"{path} is not a checkpoint: its {MANIFEST} is missing or unreadable")
    files = manifest["files"]
    if manifest.pop("sha256", None) != _manifest_checksum(manifest):
        raise UserError(f"checkpoint {path} is damaged: {MANIFEST} was changed")
    sizes = _sizes(path)
    for name in files:
        if name not in sizes:
            raise UserError(f"checkpoint {path} is damaged: {name} is missing")
    with ThreadPoolExecutor(8) as pool:  # hashing releases Python's lock
        for name, digest in zip(
            files, pool.map(lambda name: _sha256(path / name), files), strict=True
        ):
            if (sizes[name], digest) != (files[name]["size"], files[name]["sha256"]):
                raise UserError(f"checkpoint {path} is damaged: {name} does not match its checksum")
    if unknown := sizes.keys() - files.keys() - {MANIFEST}:
        raise UserError(
            f"checkpoint {path} is refused: {sorted(unknown)[0]} is not in its manifest"
        )
    return manifest


def _verify_and_check(path):
    manifest = verify(path)
    for file in sorted(Path(path).glob("model*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                if not weights.get_tensor(name).isfinite().all():
                    raise UserError(
                        f"checkpoint {path} cannot continue: {name} in {file.name} is not finite"
                    )
    return manifest


def load(accelerator, path, own):
    """Loads a verified checkpoint into everything that was prepared and registered; call it on
    every process.

    Args:
        own (bool): whether it is one of this run's folder, which is trusted as the code is. Any
            other is inspected first, because loading its pickles could execute code.

    Raises:
        UserError: a file would execute code (it is not executed), does not match this run, or is
            missing on a machine; raised on every process.
    """
    run_on_all(accelerator, lambda: _load(accelerator, path, own))
    # Accelerate's counter of micro-batches. A checkpoint is saved between optimizer steps, so the
    # count restarts at 0; another
    # --gradient_accumulation_steps would make the old count wrong.
    accelerator.step = 0


def apply_schedule(scheduler):
    """Replaces the learning rates of a checkpoint with those that a prepared `LambdaLR` computes
    for its current step.
    """
    schedule = scheduler.scheduler  # the LambdaLR inside Accelerate's wrapper
    rates = [
        base * multiplier(schedule.last_epoch)
        for base, multiplier in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def _load(accelerator, path, own):
    try:
        if not own:
            shards.refuse_code(path)
            # Accelerate unpickles them without a check.
            for registered in Path(path).glob("custom_checkpoint_*.pkl"):
                torch.load(registered, weights_only=True, map_location="cpu")
        # Load to host memory first: each tensor is then copied to the device of the one that it
        # replaces, and does not need GPU memory twice.
        accelerator.load_state(str(path), map_location="cpu")
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"checkpoint {path} is refused: loading it could execute code ({reason}). If you "
            "trust it, continue in the folder of its run: --output_dir"
        ) from None
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        # Of a list of tensors that do not fit, the first.
        reason = " ".join(str(error).split("\n\t")[:2]).strip()
        raise UserError(
            f"checkpoint {path} does not fit this run: {reason}. If the script has changed, use "
            "another --output_dir"
        ) from None


def _complete(writing, target, manifest):
    manifest["sha256"] = _manifest_checksum(manifest)
    with (writing / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=2)
    sync(writing / MANIFEST)
    sync(writing)
    if target.exists():  # damaged, so that the run continued from an older one
        shutil.rmtree(target)
    os.rename(writing, target)
    sync(target.parent)


def best(paths):
    """The first of the highest-scoring checkpoints in `paths`, or None if none has a score."""
    manifests = {path: read_manifest(path) for path in paths}
    scores = {path: found["progress"].get("score") for path, found in manifests.items() if found}
    scored = {path: score for path, score in scores.items() if score is not None}
    return max(scored, key=scored.get) if scored else None


def _prune(folder, keep, newest):
    paths = sorted(folder.glob("step_*"))
    end = paths.index(newest) + 1
    # Later ones are damaged: the run continued from an earlier checkpoint.
    paths, later = paths[:end], paths[end:]
    kept = best(paths)
    for path in later + paths[:-keep]:
        if path != kept:
            # Rename first, so that a crash during the deletion leaves nothing that looks like a
            # checkpoint.
            trash = folder / ".deleting"
            shutil.rmtree(trash, ignore_errors=True)
            os.rename(path, trash)
            shutil.rmtree(trash)


def _first_problem(accelerator, error):
    """One line about the error of the lowest rank that has one, the same on every process; None: no
    process has one.
    """
    line = None if error is None else (str(error).splitlines() or [type(error).__name__])[0]
    return next((line for line in gather(accelerator, line) if line is not None), None)


def _sizes(folder):
    """The files below `folder`: path relative to it -> size in bytes."""
    files = (file for file in Path(folder).rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def _manifest_checksum(manifest):
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
