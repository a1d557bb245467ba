"""The format of a checkpoint: its folder, its files and its manifest.

    checkpoints/step_00000120/    files of Accelerate (model, optimizer, ...) and manifest.json
    checkpoints/.writing/         an incomplete checkpoint; the next save deletes it

The progress of the run (step, score) is JSON in the manifest, not a pickle: loading it executes no
code.
"""

import hashlib
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from utils.run.collectives import gather
from utils.run.failures import UserError
from utils.run.files import sync

MANIFEST = "manifest.json"
# How many times processes compare the files that they see, half a second apart: on network file
# systems new files become visible late.
SHARED_CHECKS = 20


def all_in(folder):
    """The checkpoints in a run's folder, oldest first."""
    return sorted(Path(folder).glob("checkpoints/step_*"))


def read(path):
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


def best(paths):
    """The first of the highest-scoring checkpoints in `paths`, or None if none has a score."""
    manifests = {path: read(path) for path in paths}
    scores = {path: found["progress"].get("score") for path, found in manifests.items() if found}
    scored = {path: score for path, score in scores.items() if score is not None}
    return max(scored, key=scored.get) if scored else None


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
    manifest = read(path)
    if manifest is None or not isinstance(manifest.get("files"), dict):
        raise UserError(f"{path} is not a checkpoint: its {MANIFEST} is missing or unreadable")
    files = manifest["files"]
    if manifest.pop("sha256", None) != _checksum(manifest):
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


def hash_and_sync(accelerator, folder):
    """Hashes the files in `folder` and syncs them to disk, spread over all processes.

    Call it on every process.

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


def complete(writing, target, manifest):
    """Writes the manifest into the folder `writing`, which then gets its final name, `target`."""
    manifest["sha256"] = _checksum(manifest)
    with (writing / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=2)
    sync(writing / MANIFEST)
    sync(writing)
    if target.exists():  # damaged, so that the run continued from an older one
        shutil.rmtree(target)
    os.rename(writing, target)
    sync(target.parent)


def _sizes(folder):
    """The files below `folder`: path relative to it -> size in bytes."""
    files = (file for file in Path(folder).rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def _checksum(manifest):
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
