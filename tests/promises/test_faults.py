"""Kill it anywhere, lose nothing: each test injects a real fault, then launches the same command
again.
"""

import contextlib
import json
import pickle
import re
import shutil
import subprocess
from hashlib import sha256

import psutil
import pytest
from harness.data import SMALL_DATA
from harness.fakes import Bomb
from harness.launches import (
    CIFAR,
    ENDLESS,
    SMALL,
    Started,
    all_end,
    final_weights,
    metrics,
    results,
    run,
    run_as_if_killed,
    status,
)


def faulty(fault, arguments, output_dir, config="2cpu", script=CIFAR, **kwargs):
    """Runs a script with a fault; the run must fail."""
    options = dict(output_dir=output_dir, faults=fault, check=False, **kwargs)
    done = run(config, script, arguments, **options)
    assert done.returncode != 0, done.stdout
    return done


def relaunch_and_compare(reference, folder, arguments=SMALL, config="2cpu", **kwargs):
    """Runs the same command again: it must end with the weights and metrics of the uninterrupted
    run.
    """
    again = run(config, CIFAR, arguments, output_dir=folder, **kwargs)
    assert final_weights(folder) == final_weights(reference)
    for split in ("train", "test"):
        assert metrics(folder, split) == metrics(reference, split)
    assert not list((folder / "checkpoints").glob("[!s]*"))
    assert status(folder)["state"] == "finished"
    return again


def checkpoints(folder):
    return [int(path.name[5:]) for path in sorted((folder / "checkpoints").glob("step_*"))]


@contextlib.contextmanager
def small_disk(folder, size):
    """Mounts a file system of `size` in `folder`; yields its path."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# ------------------------------------------------------------------------------------------ killed


@pytest.mark.slow
def test_killed_at_every_moment(reference, tmp_path):
    """All kills in one run: each continues from the files that the previous one left.

    SMALL saves after steps 3, 6, 7, 9, 12 and 14, and evaluates after step 7. (Of one process
    test_crash.py has all moments, and test_every_script.py has kills between two checkpoints.)
    """
    for fault, newest in (
        ("die_after_rename@1:0", 3),
        ("die_while_copied@1:1", 3),
        ("die_while_written@1:1", 3),
        ("die_in_evaluation@1:0", 7),  # its step is saved, its test line is not logged
        ("sigterm_while_written@1:1", 9),
    ):
        faulty(fault, SMALL, tmp_path / "run")
        found = checkpoints(tmp_path / "run")[-1]
        assert found == newest or ("sigterm" in fault and found > newest), fault
    relaunch_and_compare(reference("2cpu", 2).folder, tmp_path / "run")


@pytest.mark.slow
def test_batch_norm_and_muon_on_three_processes_resume_exactly(tmp_path):
    """With 3, the order of summation matters."""
    words = f"--dataset {SMALL_DATA} --model fastnet --batch_size 24 --max_train_steps 8 "
    words += "--checkpoint_every 4 --eval_every 8 --log_every 1"
    run_as_if_killed("2cpu", CIFAR, words, tmp_path, launcher=("--num_processes", "3"))


def test_processes_that_lost_contact_report_it_once(tmp_path):
    """The launcher's report names the process that was killed, and no other."""
    four, script = ("--num_processes", "4"), "scripts/train_minimal.py"
    words = dict(output_dir=tmp_path / "run", launcher=four)
    started = Started("2cpu", script, "--epochs 100000", **words)
    started.wait_for(" 10/3000000")
    psutil.Process(started.workers()[3]).kill()
    code, output = started.finish()
    assert code != 0 and "Signal 9 (SIGKILL)" in output.splitlines()[-2], output
    assert "NO_OTHER_FAILURES" in output
    for words in ("lost contact with another process", "run the same command again"):
        assert output.count(words) == 1, output


def test_a_killed_launcher_leaves_no_orphans(tmp_path):
    started = Started("2cpu", CIFAR, ENDLESS, output_dir=tmp_path / "run")
    started.wait_for("step      5/")
    workers = [psutil.Process(pid) for pid in started.workers().values()]
    started.process.kill()
    started.process.wait()
    assert len(workers) == 2 and all_end(workers)


# ------------------------------------------------------------------------- checkpoints that are bad


@pytest.fixture(scope="session")
def interrupted(made_once):
    """A run on one process, preempted after step 8 with two valid checkpoints; tests use copies of
    it.
    """

    def make(folder):
        faulty("sigterm_in_step@8", SMALL, folder, config="cpu")
        assert checkpoints(folder) == [7, 8]
        return folder

    return made_once("interrupted", make)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def update_manifest(folder):
    """Updates the manifest to match the changed files, as an attacker would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    for path in folder.iterdir():
        if path.name != "manifest.json":
            data = path.read_bytes()
            manifest["files"][path.name] = {"size": len(data), "sha256": sha256(data).hexdigest()}
    manifest["sha256"] = sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "says", "resumed_from"),
    [
        (None, "", 8),
        (flip, "warning: checkpoint .*model.safetensors does not match its checksum", 7),
    ],
)
def test_the_newest_good_checkpoint_is_used(
    damage, says, resumed_from, interrupted, reference, tmp_path
):
    """Also after evaluate.py has looked at an unfinished run."""
    folder = tmp_path / "run"
    shutil.copytree(interrupted, folder)
    if damage:
        damage(folder / "checkpoints" / "step_00000008" / "model.safetensors")
    else:
        run(None, "scripts/evaluate.py", str(folder))
        assert (folder / "evaluation" / "predictions.png").exists()
    again = relaunch_and_compare(reference("cpu").folder, folder, config="cpu")
    assert re.search(says, again.stderr) and results(folder)["resumed_from"] == resumed_from


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl"])
def test_a_poisoned_checkpoint_executes_nothing(name, interrupted, tmp_path):
    newest = tmp_path / "theirs" / "checkpoints" / "step_00000008"
    shutil.copytree(interrupted, tmp_path / "theirs")
    (newest / name).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    update_manifest(newest)
    done = run(None, CIFAR, f"{SMALL} --resume {newest}", output_dir=tmp_path / "own", check=False)
    assert not (tmp_path / "executed").exists()
    assert done.returncode == 2 and done.stderr.count("error: ") == 1, done.stderr


# ------------------------------------------------------------------------------- disks and folders


def test_a_full_disk_costs_a_checkpoint_not_the_run(reference, tmp_path):
    arguments = SMALL.replace("--eval_every 7", "--eval_every 14")
    with small_disk(tmp_path, "2200k") as disk:
        # The disk is full during the third checkpoint, and has room again before the fourth.
        done = run("cpu", CIFAR, arguments, output_dir=disk / "run", faults=f"fill_disk@3:{disk}")
        assert done.stderr.count("warning: checkpoint of step 9 not written") == 1, done.stderr
        written = {line["step"]: line["written"] for line in metrics(disk / "run", "checkpoint")}
        assert written == {3: True, 6: True, 9: False, 12: True, 14: True}
        assert final_weights(disk / "run") == final_weights(reference("cpu").folder)


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_a_one_line_error(reference, tmp_path):
    with small_disk(tmp_path, "2200k") as disk:
        arguments = f"{SMALL} --checkpoint_every 7"
        done = faulty(f"full_disk@5:{disk}", arguments, disk / "run", config="cpu")
        (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert "the disk is full" in error and "Traceback" not in done.stderr.split(error)[0]
        (disk / "ballast").unlink()
        relaunch_and_compare(reference("cpu").folder, disk / "run", config="cpu")


def test_a_folder_that_is_not_shared_is_an_error_at_the_start(tmp_path):
    done = faulty(f"elsewhere@0:{tmp_path}", SMALL, "run")
    assert done.stderr.count("error: --output_dir run is a different folder on") == 1, done.stderr
    assert not (tmp_path / "0" / "run" / "args.json").exists()
    assert not (tmp_path / "1" / "run").exists()


# ---------------------------------------------------------------------- what diverges, and memory


def test_an_infinite_gradient_is_not_saved_and_the_run_goes_on_from_before_it(reference, tmp_path):
    """In a step whose loss is finite, and which has a checkpoint to save."""
    done = faulty("infinite_gradient@6", SMALL, tmp_path / "run", config="cpu")
    assert done.stderr.count("error: non-finite weights after step 6;") == 1
    assert checkpoints(tmp_path / "run") == [3]
    relaunch_and_compare(reference("cpu").folder, tmp_path / "run", config="cpu")


def test_a_loss_that_diverged_is_not_saved_and_names_the_samples(reference, tmp_path):
    """Also where the step has a checkpoint, as the ninth: the loss of a step is normally checked
    one step later.
    """
    folder = tmp_path / "run"
    done = faulty("nan@9:1", SMALL, folder)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: non-finite")]
    assert error.startswith("error: non-finite loss at step 9") and error.count(", ") < 30
    assert error.endswith("] and 40 more, listed in status.json")
    written = status(folder)
    assert written["state"] == "failed" and f"error: {written['reason']}".startswith(error)
    shown, others = (json.loads(ids) for ids in re.findall(r"\[.*?\]", written["reason"]))
    assert len(shown) == 20 and len({*shown, *others}) == 60  # the samples of all processes
    assert 9 not in checkpoints(folder)
    relaunch_and_compare(reference("2cpu", 2).folder, folder)


def test_out_of_memory_says_what_to_do(tmp_path):
    done = faulty("out_of_memory@3:1", SMALL, tmp_path / "run")
    assert "error: rank 1 ran out of memory. To use less, cheapest first: " in done.stderr
    assert "--gradient_accumulation_steps" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.split("error: ")[1][:500]
    assert "run the same command again" not in done.stderr  # the error would come again
    # The reason of the first process to fail, not of those that lost contact with it.
    written = status(tmp_path / "run")
    assert "rank 1 ran out of memory" in written["reason"] and written["next"] is None
