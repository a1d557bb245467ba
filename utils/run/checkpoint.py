"""Saves checkpoints atomically, finds the one to continue from, and loads it."""

import contextlib
import io
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import SCALER_NAME
from accelerate.utils.other import load as load_plain
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
from torch.utils._pytree import tree_map_only

from utils.run import manifest
from utils.run.collectives import gather, run_on_all, run_on_main
from utils.run.failures import UserError
from utils.run.output import warn

RATES = ("lr", "initial_lr", "weight_decay")  # of the groups of an optimizer
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # of torch.load, whatever its caller asks for


def start(accelerator, folder):
    """Creates an empty folder to write to; call it on every process before `save_state`.

    Returns it (Path), and the OSError if it could not be created, or None.
    """
    writing = Path(folder) / "checkpoints" / ".writing"

    def create():
        try:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
        except OSError as error:
            return error

    return writing, run_on_main(accelerator, create)


def finish(accelerator, writing, error, record, group=None):
    """Turns what `save_state` wrote into `checkpoints/step_N`; call it on every process.

    If writing fails on any of them, this prints a warning, and training continues without it.

    Args:
        error (Exception | None): what went wrong on this process while writing.
        record (dict): values to save with it, as JSON. `record["progress"]` has its `step`.
        group: as for `collectives.gather`.

    Returns:
        bool: whether the checkpoint was written.
    """
    step = record["progress"]["step"]
    problem = _first_problem(accelerator, error, group)
    if problem is None:
        try:
            files = manifest.hash_and_sync(accelerator, writing, group)
            if accelerator.is_main_process:
                target = writing.with_name(manifest.NAME.format(step=step))
                manifest.complete(writing, target, {**record, "files": files})
        except OSError as write_error:
            error = write_error
        # On no process is it written before the checkpoint has its final name.
        problem = _first_problem(accelerator, error, group)
    if problem is not None and accelerator.is_main_process:
        warn(f"checkpoint of step {step} not written, training continues: {problem}")
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


def find(accelerator, folder, resume):
    """Finds the checkpoint to continue from and verifies it; call it on every process.

    Args:
        folder: the run's folder.
        resume (str): the value of `--resume`; another run's checkpoint is used until this run has
            checkpoints of its own.

    Returns:
        tuple[Path, dict] | None: the checkpoint and its manifest; None for a new run.

    Raises:
        UserError: the checkpoint `resume` is damaged or belongs to this run, or all checkpoints of
            this run are damaged.
    """
    if resume == "never":
        return None
    candidates = run_on_main(accelerator, lambda: manifest.all_in(folder)[::-1])
    if resume != "auto" and not candidates:
        return Path(resume), manifest.verify(accelerator, resume)
    if resume != "auto" and Path(resume).resolve() in [path.resolve() for path in candidates]:
        raise UserError(
            f"--resume {resume} belongs to this run, which continues from its newest checkpoint: "
            "to continue from an earlier one use another --output_dir"
        )
    for path in candidates:
        try:
            return path, manifest.verify(accelerator, path)
        except UserError as damage:
            if accelerator.is_main_process:
                warn(f"{damage}; trying the one before it")
    if candidates:
        raise UserError(
            f"all checkpoints in {folder}/checkpoints are damaged: restore one, or start over in "
            "another --output_dir"
        )
    return None


def load(accelerator, path, keep_rates=False):
    """Loads a verified checkpoint into everything that was prepared; call it on every process.

    Args:
        keep_rates (bool): keep the learning rates and the weight decay that the optimizers have.

    Raises:
        UserError: a file would execute code (it is not executed), does not match this run, or is
            missing on a machine.
    """
    groups = [group for wrapper in accelerator._optimizers for group in wrapper.param_groups]
    rates = [{name: group[name] for name in RATES if name in group} for group in groups]
    run_on_all(accelerator, lambda: _load(accelerator, Path(path)))
    if keep_rates:
        groups = [group for wrapper in accelerator._optimizers for group in wrapper.param_groups]
        for group, before in zip(groups, rates, strict=True):
            group.update(before)
        for wrapper in accelerator._schedulers:
            ours = wrapper.scheduler.optimizer.param_groups
            wrapper.scheduler.base_lrs = [group["initial_lr"] for group in ours]
    # Accelerate's counter of micro-batches. A checkpoint is saved between optimizer steps, so the
    # count restarts at 0: after a change of --gradient_accumulation_steps the old one is wrong.
    accelerator.step = 0


def check_objects(accelerator):
    """Raises UserError if loading the state of a registered object would execute code."""
    for registered in accelerator._custom_objects:
        buffer = io.BytesIO()
        # Tensors are safe, and may be large.
        plain = tree_map_only(torch.Tensor, lambda _: torch.empty(0), registered.state_dict())
        try:
            torch.save(plain, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"no checkpoint with the state of the registered {type(registered).__name__} could "
                "be loaded: use tensors, numbers, strings, and lists or dicts of these "
                f"({_reason(error)})"
            ) from None


def _reason(error):
    """The part of an error of `torch.load` that says what it refuses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), lines[0])


@contextlib.contextmanager
def only_weights():
    """While it is active, `torch.load` builds nothing but tensors and plain values.

    Accelerate asks for more: `weights_only=False` for registered objects. So there is no check
    before loading that a file could evade: what is loaded is what is checked.
    """
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        yield
    finally:
        os.environ.pop(FORCE)
        if before is not None:
            os.environ[FORCE] = before


def first_cause(error):
    """The first error of a process, in place of the `CheckpointException` about those of all."""
    if isinstance(error, CheckpointException):
        return first_cause(next(iter(error.failures.values()))[0])
    return error


def _load(accelerator, path):
    scaler = accelerator.scaler
    if not (path / SCALER_NAME).exists():
        accelerator.scaler = None  # the run has not been in fp16 so far: its scale begins anew
    try:
        with only_weights():
            # Load to host memory first. Each tensor is then copied into the one that it replaces,
            # so that the GPU never holds both copies.
            accelerator.load_state(str(path), map_location="cpu")
            _check_random_states(path / f"random_states_{accelerator.process_index}.pkl")
    except (Exception, CheckpointException) as error:
        cause = first_cause(error)
        if isinstance(cause, pickle.UnpicklingError):
            raise UserError(
                f"checkpoint {path} is refused: loading it could execute code ({_reason(cause)})"
            ) from None
        if not isinstance(cause, OSError | RuntimeError | KeyError | ValueError):
            raise
        # Of a list of tensors that do not fit, the first.
        reason = " ".join(str(cause).split("\n\t")[:2]).strip()
        raise UserError(
            f"checkpoint {path} does not fit this run: {reason}. If the script has changed, use "
            "another --output_dir"
        ) from None
    finally:
        accelerator.scaler = scaler


def _check_random_states(path):
    """Raises ValueError if the random states were not restored: Accelerate only logs that.

    A process that the run did not have before has none. Each step seeds GPUs anyway.
    """
    if not path.exists():
        return
    states = load_plain(path)
    if not (
        torch.equal(torch.get_rng_state(), states["torch_manual_seed"])
        and random.getstate() == tuple(states["random_state"])
        and all(map(np.array_equal, np.random.get_state(), states["numpy_random_seed"]))
    ):
        raise ValueError(f"its random states, {path.name}, could not be restored")


def prune(newest, keep):
    """Deletes old checkpoints: all but the highest-scoring one and the `keep` newest ones.

    Those later than `newest` (Path), which was just written, are damaged.
    """
    folder = newest.parent
    paths = sorted(folder.glob("step_*"))
    end = paths.index(newest) + 1
    paths, later = paths[:end], paths[end:]
    best = manifest.best(paths)
    left_over = sorted(folder.glob(".deleting*"))  # one that stays keeps no other from going
    for path in [*left_over, *later, *paths[:-keep]]:
        trash = path if path in left_over else path.with_name(f".deleting_{path.name}")
        try:
            if path != best:
                os.rename(path, trash)  # first, so that nothing incomplete looks like a checkpoint
                shutil.rmtree(trash)
        except OSError as error:
            reason = error.strerror or error
            warn(f"old checkpoints were not deleted ({reason}); the next save tries again")


def _first_problem(accelerator, error, group):
    """One line about the error of the lowest rank that has one; None: no process has one."""
    error = first_cause(error)
    line = None if error is None else (str(error).splitlines() or [type(error).__name__])[0]
    return next((line for line in gather(accelerator, line, group) if line is not None), None)
