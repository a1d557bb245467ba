"""The format of a checkpoint: its folder, its files and its manifest.

    checkpoints/step_00000120/    files of Accelerate (model, optimizer, ...) and manifest.json
    checkpoints/.writing/         an incomplete checkpoint; the next save deletes it

The progress of the run (step, score) is JSON in the manifest, not a pickle: loading it executes no
code.
"""

import hashlib
import json
import math
import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from utils.run.collectives import gather, run_on_all, run_on_main
from utils.run.failures import UserError
from utils.run.files import regular_file, set_usual_mode, sync, write_json

MANIFEST = "manifest.json"
NAME = "step_{step:08d}"  # of the folder of a checkpoint
# How many times processes compare the files that they see, half a second apart: on network file
# systems new files become visible late.
SHARED_CHECKS = 20
# How the names of files start that nothing loads: those that macOS, Windows and NFS add to folders,
# and what `amend` leaves if its process is killed.
JUNK = (".DS_Store", "._", ".nfs", "Thumbs.db", "desktop.ini", f".{MANIFEST}.")


def all_in(folder):
    """The checkpoints in a run's folder, oldest first."""
    return sorted(Path(folder).glob("checkpoints/step_*"))


def read(path):
    """Reads the manifest of a checkpoint.

    Returns:
        dict | None: `arguments`, `progress` (`step`, `score`, and what the script saved with it),
        `topology`, `versions`, `files`; None if it is missing, changed or not one of ours.
    """
    try:
        file = regular_file(Path(path) / MANIFEST)
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(manifest, dict) and manifest.pop("sha256", None) == _checksum(manifest):
            return manifest
    except (OSError, ValueError, RecursionError, UserError):
        pass
    return None


def best(paths):
    """The best of the checkpoints in `paths`, oldest first, or None if none has a score."""
    ranks = {}
    for path in reversed(paths):  # `max` returns the first of equal ones
        manifest = read(path)
        if manifest and manifest["progress"].get("score") is not None:
            ranks[path] = rank(manifest["progress"]["score"], manifest["progress"].get("loss"))
    return max(ranks, key=ranks.get) if ranks else None


def rank(score, loss=None):
    """What to compare evaluations by: the higher score, or of equal ones the lower loss.

    Of two that are equal in both, the later one is better. What is missing or NaN is the worst.
    """
    values = (score, None if loss is None else -loss)
    return [-math.inf if value is None or math.isnan(value) else value for value in values]


def verify(accelerator, path):
    """Checks every file of a checkpoint against its manifest, which it returns.

    Call it on every process, before anything is loaded: each hashes its share of the files.
    Raises UserError if one is missing, damaged or unknown.
    """
    path = Path(path)
    manifest = run_on_main(accelerator, lambda: _read_checked(path))
    files = manifest["files"]
    names = _share(accelerator, files)

    def compare():
        with ThreadPoolExecutor(8) as pool:  # hashing releases Python's lock
            digests = pool.map(lambda name: _sha256(path / name), names)
            for name, sha in zip(names, digests, strict=True):
                if sha != files[name]["sha256"]:
                    raise UserError(
                        f"checkpoint {path} is damaged: {name} does not match its checksum"
                    )

    run_on_all(accelerator, compare)
    return manifest


def _share(accelerator, names):
    """This process's share of the names."""
    return sorted(names)[accelerator.process_index :: accelerator.num_processes]


def _read_checked(path):
    """The manifest of a checkpoint that has the files listed in it, and no others."""
    if not os.path.isdir(path):
        raise UserError(f"checkpoint {path} does not exist")
    manifest = read(path)
    if manifest is None:
        inside = all_in(path)  # of the folder of a run
        hint = f" (the newest one in it is {inside[-1]})" if inside else ""
        raise UserError(
            f"{path} is not a checkpoint: its {MANIFEST} is missing, unreadable or changed{hint}"
        )
    files, sizes = manifest["files"], _sizes(path)
    for name in files:
        if name not in sizes:
            raise UserError(f"checkpoint {path} is damaged: {name} is missing")
    if unknown := sizes.keys() - files.keys() - {MANIFEST}:
        raise UserError(
            f"checkpoint {path} is refused: {sorted(unknown)[0]} is not in its manifest. If it is "
            "yours, move it elsewhere"
        )
    return manifest


def hash_and_sync(accelerator, folder, group=None):
    """Hashes the files in `folder` and syncs them to disk; call it on every process.

    Args: group: as for `collectives.gather`.

    Returns:
        dict: name -> `size` in bytes and `sha256`.

    Raises:
        UserError: the processes do not see the same files: their machines do not share the folder.
        OSError: a process could not read or sync a file; raised on every process.
    """
    for _ in range(SHARED_CHECKS):
        try:
            view = _sizes(folder)
        except OSError as error:  # a file disappeared, or the file system answers later
            view = {str(error): 0}
        views = gather(accelerator, view, group)
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
    names = _share(accelerator, views[0])
    try:
        # Data can only be synced on the machine that wrote it.
        if accelerator.is_local_main_process:
            for path in [*folder.rglob("*"), folder]:
                if path.is_file():
                    set_usual_mode(path)
                sync(path)
        result = {
            name: {"size": views[0][name], "sha256": _sha256(folder / name)} for name in names
        }
    except OSError as error:
        result = error
    results = gather(accelerator, result, group)
    if error := next((result for result in results if isinstance(result, OSError)), None):
        raise error
    return {name: described for result in results for name, described in result.items()}


def complete(writing, target, manifest):
    """Writes the manifest into the folder `writing`, which then gets its final name, `target`."""
    with (writing / MANIFEST).open("w") as file:
        json.dump({**manifest, "sha256": _checksum(manifest)}, file, indent=2)
    sync(writing / MANIFEST)
    sync(writing)
    if target.exists():  # damaged, so that the run continued from an older one
        shutil.rmtree(target)
    sync(target.parent.parent)  # which the first checkpoint gave the folder of checkpoints
    os.rename(writing, target)
    sync(target.parent)


def amend(path, changed):
    """Changes values of the progress (dict) in a checkpoint's manifest, atomically."""
    manifest = read(path)
    manifest["progress"] |= changed
    write_json(Path(path) / MANIFEST, {**manifest, "sha256": _checksum(manifest)})


def _sizes(folder):
    """The files below `folder`, without `JUNK`: path relative to it -> size in bytes.

    Raises:
        UserError: there is a link, a device, a pipe or a socket.
    """
    sizes = {}
    for place, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(place, name)
            status, relative = path.lstat(), str(path.relative_to(folder))
            if stat.S_ISREG(status.st_mode):
                if not name.startswith(JUNK):
                    sizes[relative] = status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                raise UserError(
                    f"{folder} is refused: {relative} is neither a file nor a folder, but a link, "
                    "a device, a pipe or a socket"
                )
    return sizes


def _checksum(manifest):
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
