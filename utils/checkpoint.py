"""Writes checkpoints atomically: the files of `save_state` are hashed and synced to disk before the folder gets its final name.

    checkpoints/step_00000120/     model, optimizer, scheduler (files of Accelerate) and manifest.json
    checkpoints/.writing/          an incomplete checkpoint; if a crash leaves it, the next save deletes it

The progress of the run (step, best score) is stored as JSON in the manifest, not as a pickle: loading it executes no code.
"""

import hashlib
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import CheckpointException

from utils import shards, topology
from utils.exits import UserError

MANIFEST = "manifest.json"


def start(accelerator, folder):
    """Creates an empty folder `checkpoints/.writing` in `folder`; call it on every process before `accelerator.save_state`.

    Returns:
        tuple[Path, Exception | None]: the folder to write to; on the main process, the error if it could not be created.
    """
    writing = Path(folder) / "checkpoints" / ".writing"
    error = None
    if accelerator.is_main_process:
        try:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
        except OSError as write_error:
            error = write_error
    accelerator.wait_for_everyone()
    return writing, error


def finish(accelerator, writing, error, manifest, keep):
    """Turns what `save_state` wrote into `checkpoints/step_N`; call it on every process.

    If writing fails (a full disk, for example), this prints a warning, and training continues without this checkpoint.

    Args:
        error (Exception | None): what went wrong on this process while writing.
        manifest (dict): values to save with the checkpoint, as JSON; `manifest["progress"]["step"]` is its step, and
            `manifest["progress"]["score"]` (higher is better, or None) decides which checkpoint is kept as the best.
        keep (int): newest checkpoints to keep, besides the best one.

    Returns:
        bool: whether the checkpoint was written; the same on every process.
    """
    step = manifest["progress"]["step"]
    if _all_succeeded(accelerator, error) and accelerator.is_main_process:
        try:
            target = writing.with_name(f"step_{step:08d}")
            _complete(writing, target, manifest)
            _prune(writing.parent, keep, target)
        except OSError as write_error:
            error = write_error
    # No process continues, or exits, before the checkpoint has its final name.
    written = _all_succeeded(accelerator, error)
    if error is not None:
        print(
            f"warning: checkpoint of step {step} not written, training continues: {str(error).splitlines()[0]}",
            file=sys.stderr,
            flush=True,
        )
    if not written and accelerator.is_main_process:
        shutil.rmtree(writing, ignore_errors=True)
    return written


def is_write_error(error):
    """Whether an exception of `save_state` means that a file could not be written, for example because the disk is full."""
    if isinstance(error, (TimeoutError, ConnectionError)):
        return False
    if isinstance(error, CheckpointException):  # a sharded checkpoint: one failure per process
        return all(is_write_error(failure[0]) for failure in error.failures.values())
    # torch.save reports a failed write as a RuntimeError whose text names the file of its zip writer.
    return isinstance(error, (OSError, SafetensorError)) or "inline_container" in str(error)


def find(folder, resume):
    """Finds the checkpoint to continue from and verifies it; main process only.

    Args:
        folder: the run's folder.
        resume (str): `auto` for the newest undamaged one in it, `never`, or the path of another run's checkpoint, which is
            used until this run has checkpoints of its own.

    Returns:
        tuple[Path, dict] | None: the checkpoint and its manifest; None for a new run.

    Raises:
        UserError: the checkpoint `resume` is damaged or belongs to this run, or all checkpoints of this run are damaged.
    """
    if resume == "never":
        return None
    candidates = sorted(Path(folder).glob("checkpoints/step_*"), reverse=True)
    if resume != "auto":
        if Path(resume).resolve() in [path.resolve() for path in candidates]:
            raise UserError(
                f"--resume {resume} belongs to this run, which continues from its newest checkpoint: to continue from an "
                "earlier one use another --output_dir"
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
            f"all checkpoints in {folder}/checkpoints are damaged: restore one, or start over in another --output_dir"
        )
    return None


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
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        checksum = manifest.pop("sha256")
        files = manifest["files"]
    except (OSError, ValueError, KeyError, AttributeError):
        raise UserError(f"{path} is not a checkpoint: its {MANIFEST} is missing or unreadable") from None
    if checksum != _manifest_checksum(manifest):
        raise UserError(f"checkpoint {path} is damaged: {MANIFEST} was changed")
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise UserError(f"checkpoint {path} is damaged: {name} is missing")
        if file.stat().st_size != expected["size"] or _sha256(file) != expected["sha256"]:
            raise UserError(f"checkpoint {path} is damaged: {name} does not match its checksum")
    unknown = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - files.keys() - {MANIFEST}
    if unknown:
        raise UserError(f"checkpoint {path} is refused: {sorted(unknown)[0]} is not in its manifest")
    return manifest


def _verify_and_check(path):
    manifest = verify(path)
    for file in sorted(Path(path).glob("model*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                if not weights.get_tensor(name).isfinite().all():
                    raise UserError(f"checkpoint {path} cannot continue: {name} in {file.name} is not finite")
    return manifest


def load(accelerator, path):
    """Loads a verified checkpoint into everything that was prepared and registered; call it on every process.

    Raises:
        UserError: a file would execute code (it is not executed), does not match this run, or is missing on a machine; raised
            on every process.
    """
    topology.run_on_all(accelerator, lambda: _load(accelerator, path))
    # Accelerate's counter of micro-batches. A checkpoint is saved between optimizer steps, so the count restarts at 0; another
    # --gradient_accumulation_steps would make the old count wrong.
    accelerator.step = 0


def apply_schedule(scheduler):
    """Replaces the learning rates of a checkpoint with those that a prepared `LambdaLR` computes for its current step."""
    schedule = scheduler.scheduler  # the LambdaLR inside Accelerate's wrapper
    rates = [
        base * multiplier(schedule.last_epoch) for base, multiplier in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def _load(accelerator, path):
    try:
        shards.refuse_code(path)
        for registered in Path(path).glob("custom_checkpoint_*.pkl"):  # Accelerate unpickles them without a check
            torch.load(registered, weights_only=True, map_location="cpu")
        # Load to host memory first: each tensor is then copied to the device of the one that it replaces, and does not need GPU
        # memory twice.
        accelerator.load_state(str(path), map_location="cpu")
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"checkpoint {path} is refused: it would execute code when loaded ({reason})") from None
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise UserError(f"checkpoint {path} does not fit this run: {str(error).splitlines()[0]}") from None


def _complete(writing, target, manifest):
    files = {}
    for file in sorted(f for f in writing.rglob("*") if f.is_file()):
        files[str(file.relative_to(writing))] = {"size": file.stat().st_size, "sha256": _sha256(file)}
        _flush(file)
    manifest = {**manifest, "files": files}
    manifest["sha256"] = _manifest_checksum(manifest)
    with (writing / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=2)
    _flush(writing / MANIFEST)
    _flush(writing)
    if target.exists():  # damaged, so that the run continued from an older one
        shutil.rmtree(target)
    os.rename(writing, target)
    _flush(target.parent)


def _prune(folder, keep, newest):
    paths = sorted(folder.glob("step_*"))
    end = paths.index(newest) + 1
    paths, later = paths[:end], paths[end:]  # later ones are damaged: the run continued from an earlier checkpoint
    scores = {path: _score(path) for path in paths}
    scored = [path for path in paths if scores[path] is not None]
    best = max(scored, key=scores.get) if scored else None
    for path in later + paths[:-keep]:
        if path != best:
            # Rename first, so that a crash during the deletion leaves nothing that looks like a checkpoint.
            trash = folder / ".deleting"
            shutil.rmtree(trash, ignore_errors=True)
            os.rename(path, trash)
            shutil.rmtree(trash)


def _score(path):
    try:
        return json.loads((path / MANIFEST).read_text())["progress"].get("score")
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _all_succeeded(accelerator, error):
    return not any(gather_object([error is not None])) if accelerator.num_processes > 1 else error is None


def _manifest_checksum(manifest):
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
