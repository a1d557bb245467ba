"""A run is continued from whatever a crash leaves on the disk, at every file operation."""

import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import crash
from harness.launches import ROOT, final_weights, metrics, results, run, status

MINIMAL, RUN = "scripts/train_minimal.py", "runs/a"
ARGUMENTS = "--max_train_steps 4 --checkpoint_every 2 --log_every 2 --eval_every 2"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A disk with an uninterrupted run that has kept all its checkpoints."""
    disk = tmp_path_factory.mktemp("whole")
    run(None, MINIMAL, f"{ARGUMENTS} --keep_checkpoints 9", output_dir=disk / RUN)
    return disk


def crashes(operations):
    """Every state of the disk that a crash can leave, each once: the newest step that it must not
    lose, a name, and the files.
    """
    found = {}
    for done, variant, files in crash.states(operations):
        least, key = promised(done, variant), tuple(sorted(files.items(), key=str))
        if key not in found or found[key][0] < least:
            last = " ".join(map(str, done[-1][:2]))
            found[key] = least, f"{variant} after operation {len(done)}, {last}", files
    return list(found.values())


def promised(operations, variant):
    """The step of the newest checkpoint that has its final name; if the machine may lose power, of
    the newest one that the log says is written.
    """
    named, logged = 0, 0
    for operation, path, *more in operations:
        new = more[0] if operation == "rename" else ""
        if step := re.match(f"{RUN}/checkpoints/step_([0-9]+)$", new):
            named = int(step[1])
        elif operation == "write" and path.endswith(".jsonl") and b'"checkpoint"' in more[1]:
            logged = json.loads(more[1])["step"]
    return named if variant == "process killed" else logged


def lost(state, whole, disk):
    """Starts the same command on what a crash has left; returns what is wrong then, or None."""
    least, name, files = state
    crash.write(files, disk)
    done = run(None, MINIMAL, ARGUMENTS, output_dir=disk / RUN, check=False)
    if done.returncode:
        return f"{name}: exit code {done.returncode}\n{done.stderr[-2000:]}"
    folder, expected = disk / RUN, whole / RUN
    from_step = results(folder)["resumed_from"] or 0
    outcomes = {
        "the newest checkpoint": from_step >= least or "nothing to do" in done.stdout,
        "the same weights": final_weights(folder) == final_weights(expected),
        "the same log lines": metrics(folder, "train") == metrics(expected, "train"),
        "the same scores": metrics(folder, "val") == metrics(expected, "val"),
        "a finished run": status(folder)["state"] == "finished",
    }
    missing = [what for what, is_there in outcomes.items() if not is_there]
    return f"{name}: not {missing}; it started at step {from_step}" if missing else None


def check(states, whole, tmp_path):
    """Continues after each of these crashes, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        disks = [tmp_path / str(number) for number in range(len(states))]
        answers = list(pool.map(lost, states, [whole] * len(states), disks))
    assert not any(answers), "\n".join(filter(None, answers))


def test_a_run_continues_after_a_crash_near_the_names_of_checkpoints(whole, tmp_path):
    """Some of the moments at which a checkpoint is named, synced, or removed, as recorded."""
    states = crashes(crash.load_record(crash.read(whole)))
    near = [state for state in states if re.search("(rename|remove|fsync) .*checkpoints", state[1])]
    assert len(near) > 20
    check(near[:: len(near) // 6], whole, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace: above, a record is replayed")
def test_a_run_continues_after_a_crash_at_any_file_operation(whole, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, ROOT / MINIMAL, *ARGUMENTS.split(), "--keep_checkpoints", "1"]
    operations = crash.record([*command, "--output_dir", disk / RUN], disk)
    if not crash.RECORDED.exists():
        crash.save_record(operations)
    states = crashes(operations)
    assert len(states) > 80
    check(states, whole, tmp_path)
