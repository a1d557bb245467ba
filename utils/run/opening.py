"""Looks into the folder of a run before it starts: what is there, and may this run continue it?"""

import math
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from utils.run import checkpoint, manifest, record
from utils.run.arguments import CONTINUE_RULE, MAY_CHANGE_IN_FORK
from utils.run.collectives import run_on_main
from utils.run.failures import UserError
from utils.run.files import read_json
from utils.run.metrics import summary
from utils.run.output import plural


class Identity(NamedTuple):
    """What a run is, by which another start continues it."""

    arguments: dict  # as `record.comparable` returns them
    data: dict  # name -> text, of what the arguments lead to, such as a checksum of the data
    may_change: set  # names of arguments
    resume: str  # the value of `--resume`


class Start(NamedTuple):
    """From where a run starts."""

    results: dict | None = None  # those of a run that has already finished
    checkpoint: Path | None = None  # the one to continue from
    manifest: dict | None = None  # its manifest
    run_id: str | None = None  # of the run in the folder
    changes: list = ()  # what differs from the run of which this one continues a checkpoint


def find(accelerator, path, identity, plan):
    """Finds out from where a run starts in its folder, which is claimed; call it on every process.

    Empties a folder that was left by --dry_run or --overfit_batch, if this run has that flag.

    Raises:
        UserError: the folder holds another run; all checkpoints are damaged, or the one to continue
            from belongs to another run or has taken more steps than `plan` allows.
    """
    start = run_on_main(accelerator, lambda: _read(path, identity, plan))
    choice = None if start.results else checkpoint.find(accelerator, path, identity.resume)
    if choice is None:
        return start
    changes = run_on_main(accelerator, lambda: _check_checkpoint(*choice, identity, plan))
    return start._replace(checkpoint=choice[0], manifest=choice[1], changes=changes)


def _read(path, identity, plan):
    """What the folder says of itself, as `Start` without a checkpoint."""
    earlier = _check(path, identity)
    if earlier is None:
        return Start()
    script = record.script_hash()
    if earlier.get("script", script) != script:
        print(
            f"warning: {sys.argv[0]} has changed since this run started: use another "
            "--output_dir for a new run"
        )
    finished = record.read_status(path).get("state") == "finished"
    results = read_json(path / "results.json") if finished else None
    if results and _has_ended(results, identity, plan):
        return Start(results)
    if results and not manifest.all_in(path):
        raise UserError(
            f"the run in {path} has finished, and its checkpoints are gone: train its weights "
            "further in another --output_dir"
        )
    return Start(run_id=earlier.get("run_id"))


def _check(path, identity):
    """Returns args.json of the run in a folder, which this run may continue; None for a new one."""
    earlier = read_json(path / "args.json")
    if earlier is None:
        return None
    for name in ("dry_run", "overfit_batch"):
        if identity.arguments.get(name) and earlier["arguments"].get(name):
            _empty(path)
            return None
    if identity.resume == "never":
        raise UserError(
            f"{path} already contains a run: with --resume never, use another --output_dir"
        )
    theirs, ours = (Path(words[0]).name for words in (earlier["command"], sys.argv))
    if theirs != ours and earlier["arguments"].keys() != identity.arguments.keys():
        raise UserError(f"{path} holds a run of {theirs}, not {ours}: use another --output_dir")
    check_same(earlier, identity, path)
    return earlier


def _empty(path):
    # args.json last: if this is killed, the folder still says whose it is.
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == "args.json"):
        if entry.name != ".lock":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _check_checkpoint(place, contents, identity, plan):
    """The arguments that may differ and do; raises UserError for a checkpoint that does not fit."""
    changes = []
    if place == Path(identity.resume):
        changes = _differences(contents, identity)
        # Without a checksum of the data, nothing says that another seed has held out the same.
        fork = MAY_CHANGE_IN_FORK if identity.data else MAY_CHANGE_IN_FORK - {"seed"}
        identity = identity._replace(may_change=identity.may_change | fork)
    check_same(contents, identity, place)
    steps_taken = contents["progress"]["step"]
    if plan.total_steps < steps_taken:
        raise UserError(
            f"--epochs or --max_train_steps ask for {plan.total_steps} steps, but the run has "
            f"taken {steps_taken} already ({place}): give at least as many, or use another "
            "--output_dir"
        )
    return changes


def _has_ended(results, identity, plan):
    """Whether a finished run is one for these arguments, too, or goes on."""
    early = results.get("stopped_early")
    if early:
        patience = identity.arguments.get("patience") or math.inf
        return early["total_steps"] == plan.total_steps and early["patience"] >= patience
    return results["global_step"] == plan.total_steps


def announce_finished(path, results):
    """Prints the results of a run that has already finished, and how to train longer."""
    print(summary(results, path, "this run has already finished, nothing to do"))
    patience = ", or a larger --patience" if "stopped_early" in results else ""
    print(
        "to train longer, run the same command with a larger --epochs or --max_train_steps"
        f"{patience}"
    )


def announce(accelerator, path, plan, start):
    """Prints the length of a run, where it starts, and what has changed since its checkpoint."""
    steps = f"{plural(plan.total_steps, 'step')}, {plan.steps_per_epoch} per epoch"
    if plan.left_out:
        steps += f", each of which leaves out {plural(plan.left_out, 'sample')}, less than a batch"
    print(f"{steps}; output in {path}")
    if start.checkpoint is None:
        print("starting at step 0")
        return
    print(f"continuing from {start.checkpoint}")
    if start.changes:
        print(f"with other arguments than there: {', '.join(start.changes)}")
    if any(line.startswith(("--batch_size ", "--seed ")) for line in start.changes):
        print(
            "the rest of this epoch has other samples than it would have had there; epochs and "
            "samples are counted as if it had always been so"
        )
    before = start.manifest["total_steps"]
    if before != plan.total_steps:
        print(f"length changed from {before} to {plan.total_steps} steps")
    changes = record.changes(accelerator, start.manifest)
    if changes:
        print(
            f"warning: changed since that checkpoint: {', '.join(changes)}. The final weights "
            "will not be exactly those of an uninterrupted run"
        )


def check_same(earlier, identity, place):
    """Raises UserError, which lists each difference, if `earlier` is the record of another run.

    Args: earlier (dict): has `arguments`, `data`. place: its folder, of a run or a checkpoint.
    """
    arguments, differences = identity.arguments, _differences(earlier, identity)
    if not differences:
        return
    weights, theirs = "", earlier["arguments"]
    if earlier["data"] != identity.data and theirs.get("seed") != arguments.get("seed"):
        differences.append("--seed, which may choose what is held out")
    if theirs.get("model") == arguments.get("model") and "init_from" in arguments:
        weights = f" (from these weights: --init_from {place})"
    raise UserError(
        f"{place} belongs to a run with other arguments: {', '.join(differences)}. Use another "
        f"--output_dir{weights}, or the earlier values. {CONTINUE_RULE}"
    )


def _differences(earlier, identity):
    may_change = identity.may_change
    if identity.data:  # it says more than the path of the data set
        may_change = may_change | {"dataset"}
    changed = record.differences(earlier["arguments"], identity.arguments, may_change)
    return [f"--{line}" for line in changed] + record.differences(earlier["data"], identity.data)
