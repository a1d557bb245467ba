"""Saves checkpoints atomically, finds the one to continue from, and loads it.

The files of `save_state` are hashed and synced to disk before their folder gets its final name.
"""

import os
import pickle
import random
import shutil
import sys
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import SCALER_NAME
from accelerate.utils.other import load as load_plain
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import CheckpointException

from utils.run import manifest
from utils.run.collectives import gather, run_on_all, run_on_main
from utils.run.failures import UserError
from utils.scale import shards

# What `torch.load` knows besides Python's own types.
PLAIN_TYPES = (torch.dtype, torch.device, torch.Size)


def start(accelerator, folder):
    """Creates an empty folder `checkpoints/.writing` in `folder`.

    Call it on every process before `accelerator.save_state`.

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


def finish(accelerator, writing, error, record, keep, group=None):
    """Turns what `save_state` wrote into `checkpoints/step_N`; call it on every process.

    If writing fails (a full disk, for example), this prints a warning, and training continues
    without this checkpoint.

    Args:
        error (Exception | None): what went wrong on this process while writing.
        record (dict): values to save with it, as JSON. `record["progress"]` has its `step`, and its
            `score` (higher is better, or None), which decides what is kept.
        keep (int): newest checkpoints to keep, besides the highest-scoring one.
        group: as for `collectives.gather`.

    Returns:
        bool: whether the checkpoint was written; the same on every process.
    """
    step = record["progress"]["step"]
    problem = _first_problem(accelerator, error, group)
    if problem is None:
        try:
            files = manifest.hash_and_sync(accelerator, writing, group)
            if accelerator.is_main_process:
                target = writing.with_name(f"step_{step:08d}")
                manifest.complete(writing, target, {**record, "files": files})
        except OSError as write_error:
            error = write_error
        # On no process is it written before the checkpoint has its final name.
        problem = _first_problem(accelerator, error, group)
    if problem is None and accelerator.is_main_process:
        _prune(writing.parent, keep, target)
    if problem is not None and accelerator.is_main_process:
        message = f"warning: checkpoint of step {step} not written, training continues: {problem}"
        print(message, file=sys.stderr, flush=True)
        shutil.rmtree(writing, ignore_errors=True)
    return problem is None


def is_write_error(error):
    """Whether an exception of `save_state` means that a file could not be written."""
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
    candidates = manifest.all_in(folder)[::-1]
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


def _verify_and_check(path):
    found = manifest.verify(path)
    for file in sorted(Path(path).glob("model*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                if not weights.get_tensor(name).isfinite().all():
                    raise UserError(
                        f"checkpoint {path} cannot continue: {name} in {file.name} is not finite"
                    )
    return found


def is_own(path, folder):
    """Whether a checkpoint is in the folder of this run, and not in that of another one."""
    return Path(path).resolve().is_relative_to(Path(folder).resolve())


def load(accelerator, path):
    """Loads a verified checkpoint into everything that was prepared and registered.

    Call it on every process. No file of it can execute code, in this run's own folder either: the
    folder may have come from elsewhere. So the state of a registered object must consist of
    tensors, numbers, strings and containers of these.

    Raises:
        UserError: a file would execute code (it is not executed), does not match this run, or is
            missing on a machine; raised on every process.
    """
    run_on_all(accelerator, lambda: _load(accelerator, Path(path)))
    # Accelerate's counter of micro-batches. A checkpoint is saved between optimizer steps, so the
    # count restarts at 0: after a change of --gradient_accumulation_steps the old one is wrong.
    accelerator.step = 0


def check_objects(accelerator, scheduler=None):
    """Checks, before anything is saved, that what is registered for checkpointing can be loaded.

    Args:
        scheduler: what `RunFolder.start` was given.

    Raises:
        UserError: a state has values that could only be loaded by executing code, or the scheduler
            is no prepared `LambdaLR`.
    """
    for registered in accelerator._custom_objects:
        unknown = _unknown_type(registered.state_dict())
        if unknown:
            raise UserError(
                f"the state of the registered {type(registered).__name__} has a {unknown}, and no "
                "checkpoint with it could be loaded: use tensors, numbers, strings, and lists or "
                "dicts of these"
            )
    inner = getattr(scheduler, "scheduler", scheduler)
    if scheduler is not None and not (hasattr(inner, "lr_lambdas") and inner is not scheduler):
        raise UserError(
            f"run.start takes a prepared LambdaLR, and was given a {type(inner).__name__}: leave "
            "it out, since every prepared scheduler is saved and restored"
        )


def _unknown_type(value):
    """The name of the type of what `torch.load` would refuse in `value`; None: nothing."""
    if isinstance(value, torch.Tensor):
        return None
    if type(value) in (dict, OrderedDict, Counter, list, tuple, set):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return next(filter(None, map(_unknown_type, parts)), None)
    known = value is None or type(value) in (bool, int, float, complex, str, bytes)
    return None if known or isinstance(value, PLAIN_TYPES) else type(value).__name__


def apply_schedule(accelerator, scheduler, step):
    """Replaces the learning rates of a checkpoint, which were computed for the earlier run length.

    Args:
        scheduler: a prepared `LambdaLR`, which computes them for its current step; None: there is
            none.

    Returns:
        str: how the learning rate at `step` changes.
    """
    if scheduler is None and accelerator._schedulers:
        return "the scheduler continues as it was saved (RunFolder.start recomputes a LambdaLR)"
    if scheduler is None:
        return "the learning rate does not depend on it"
    before = scheduler.get_last_lr()[0]
    schedule = scheduler.scheduler  # the LambdaLR inside Accelerate's wrapper
    rates = [
        base * multiplier(schedule.last_epoch)
        for base, multiplier in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
    after = rates[0]
    if before == after:
        return f"the learning rate at step {step} stays {after:.3g}"
    return f"the learning rate at step {step} changes from {before:.3g} to {after:.3g}"


def _load(accelerator, path):
    scaler = accelerator.scaler
    if not (path / SCALER_NAME).exists():
        accelerator.scaler = None  # the run has not been in fp16 so far: its scale begins anew
    try:
        with shards.safe_loading():
            # Load to host memory first. Each tensor is then copied into the one that it replaces,
            # so that the GPU never holds both copies.
            accelerator.load_state(str(path), map_location="cpu")
            _check_random_states(path / f"random_states_{accelerator.process_index}.pkl")
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"checkpoint {path} is refused: loading it could execute code ({reason})"
        ) from None
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        # Of a list of tensors that do not fit, the first.
        reason = " ".join(str(error).split("\n\t")[:2]).strip()
        raise UserError(
            f"checkpoint {path} does not fit this run: {reason}. If the script has changed, use "
            "another --output_dir"
        ) from None
    finally:
        accelerator.scaler = scaler


def _check_random_states(path):
    """Raises ValueError if the random states were not restored: Accelerate only logs that.

    A process that the run did not have before has none. GPUs may be others than before, and each
    step seeds them anyway.
    """
    if not path.exists():
        return
    states = load_plain(path)
    name, keys, *rest = np.random.get_state()
    saved_name, saved_keys, *saved_rest = states["numpy_random_seed"]
    if not (
        torch.equal(torch.get_rng_state(), states["torch_manual_seed"])
        and random.getstate() == tuple(states["random_state"])
        and (name, *rest) == (saved_name, *saved_rest)
        and np.array_equal(keys, saved_keys)
    ):
        raise ValueError(f"its random states, {path.name}, could not be restored")


def _prune(folder, keep, newest):
    paths = sorted(folder.glob("step_*"))
    end = paths.index(newest) + 1
    # Later ones are damaged: the run continued from an earlier checkpoint.
    paths, later = paths[:end], paths[end:]
    kept = manifest.best(paths)
    for path in later + paths[:-keep]:
        if path != kept:
            _delete(path)
    for trash in folder.glob(".deleting*"):  # also what could not be deleted earlier
        shutil.rmtree(trash, ignore_errors=True)


def _delete(path):
    """Deletes an old checkpoint; if that fails, a later save tries again.

    On NFS a deleted file that another process has open lives on as `.nfsXXXX`, and so does its
    folder. Renaming comes first, so that nothing incomplete looks like a checkpoint.
    """
    trash = path.with_name(f".deleting_{path.name}")
    try:
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(path, trash)
        shutil.rmtree(trash)
    except OSError as error:
        reason = error.strerror or error
        line = f"warning: the old checkpoint {path.name} was not deleted ({reason})"
        print(f"{line}; the next save tries again", file=sys.stderr, flush=True)


def _first_problem(accelerator, error, group):
    """One line about the error of the lowest rank that has one; None: no process has one."""
    error = shards.first_cause(error)
    line = None if error is None else (str(error).splitlines() or [type(error).__name__])[0]
    return next((line for line in gather(accelerator, line, group) if line is not None), None)
