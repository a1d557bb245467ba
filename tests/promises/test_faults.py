"""Kill it anywhere, lose nothing: each test injects a real fault, then launches the same command
again.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils.other import load
from harness.launches import (
    CIFAR,
    ENDLESS,
    GPT,
    GPT_WITH_A_WORKER,
    LIMIT,
    ROOT,
    SMALL,
    Started,
    all_end,
    command,
    final_weights,
    metrics,
    results,
    run,
    run_once,
    some_slow,
    status,
)
from safetensors.torch import load_file, save_file

from utils.run import checkpoint, failures, guard, manifest, process, shards
from utils.run.failures import UserError

PREEMPTED = 75


def faulty(fault, arguments, output_dir, config="2cpu", script=CIFAR, **kwargs):
    """Runs a script with a fault; the run must fail."""
    done = run(
        config,
        "tests/harness/wrapped.py",
        [fault, script, *arguments.split()],
        output_dir=output_dir,
        check=False,
        **kwargs,
    )
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
    assert not [
        path for path in (folder / "checkpoints").iterdir() if not path.name.startswith("step_")
    ]
    assert status(folder)["state"] == "finished"
    return again


@pytest.mark.slow
def test_one_rank_killed_again_and_again(reference, tmp_path):
    """All kills in one run: each continues from the files that the previous one left."""
    for fault in (
        "die_in_step@5:1",  # between two checkpoints, a rank other than 0
        "die_in_evaluation@1:0",  # after a step, before its test line is logged
        "die_before_state@2:0",  # the folder of a checkpoint exists and is empty
        "die_before_rename@2:0",  # a checkpoint is complete, except for its final name
    ):
        faulty(fault, SMALL, tmp_path / "run")
    relaunch_and_compare(reference("2cpu", 2).folder, tmp_path / "run")
    assert results(tmp_path / "run")["resumed_from"] == 12


@pytest.mark.slow
def test_killed_at_each_moment_of_a_save_beside_the_training(reference, tmp_path):
    """All kills in one run; SMALL saves after steps 3, 6, 7, ..."""
    for fault, newest in (
        ("die_after_rename@1:0", 3),
        ("die_while_copied@1:1", 3),
        ("die_while_written@1:0", 3),
        ("die_before_rename@1:0", 3),
        ("die_after_rename@1:0", 6),
        ("die_while_written@1:1", 6),
    ):
        faulty(fault, SMALL, tmp_path / "run")
        steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
        assert steps[-1] == f"step_{newest:08d}", fault
    faulty("sigterm_while_written@1:1", SMALL, tmp_path / "run")
    relaunch_and_compare(reference("2cpu", 2).folder, tmp_path / "run")
    assert results(tmp_path / "run")["resumed_from"] > 6


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3, 4])
def test_any_number_of_processes(processes, odd_folder, tmp_path):
    """Batch norm, Muon and accumulation together.

    With 3 or more processes the order of summation matters.
    """
    arguments = (
        f"--dataset {odd_folder} --model fastnet --batch_size 24 --max_train_steps 5 "
        "--checkpoint_every 2 --eval_every 1000 --log_every 1 --gradient_accumulation_steps 2"
    )
    config, launcher = (
        ("cpu", ()) if processes == 1 else ("2cpu", ("--num_processes", str(processes)))
    )
    run(config, CIFAR, arguments, output_dir=tmp_path / "reference", launcher=launcher)
    # The 7th micro-batch is the first half of step 4.
    faulty(f"die_in_step@7:{processes - 1}", arguments, tmp_path / "run", config, launcher=launcher)
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").exists()
    relaunch_and_compare(
        tmp_path / "reference", tmp_path / "run", arguments, config, launcher=launcher
    )
    assert results(tmp_path / "run")["resumed_from"] == 2


def test_processes_that_lost_contact_report_it_once(tmp_path):
    """The launcher's report names the process that was killed, and no other."""
    started = Started(
        "2cpu",
        "scripts/train_minimal.py",
        "--epochs 100000",
        output_dir=tmp_path / "run",
        launcher=("--num_processes", "4"),
    )
    started.wait_for(" 10/3000000")
    psutil.Process(started.workers()[3]).kill()
    code, output = started.finish()
    assert (
        code != 0
        and "Signal 9 (SIGKILL)" in output.splitlines()[-2]
        and "NO_OTHER_FAILURES" in output
    ), output
    assert (
        output.count("lost contact with another process")
        == output.count("run the same command again")
        == 1
    ), output


@pytest.mark.parametrize("who", ["launcher", "all"])
def test_launcher_killed_leaves_no_orphans(who, reference, tmp_path):
    endless = SMALL.replace("--max_train_steps 14", "--max_train_steps 100000")
    started = Started("2cpu", CIFAR, endless, output_dir=tmp_path / "run")
    started.wait_for("step      5/")
    workers = [psutil.Process(pid) for pid in started.workers().values()]
    assert len(workers) == 2
    if who == "launcher":
        started.process.kill()
        started.process.wait()
    else:
        started.kill_all()
    assert all_end(workers)


@pytest.mark.slow
def test_restarted_by_its_launcher(reference, tmp_path):
    """--max_restarts over gloo needs a new rendezvous store for every attempt (pytorch#135712)."""
    launcher = ("--max_restarts", "2", "--rdzv_backend", "c10d", "--monitor_interval", "0.5")
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "FAULT_ONCE": "1"}
    arguments = ["die_in_step@9:1", CIFAR, *SMALL.split()]
    run(
        "2cpu",
        "tests/harness/wrapped.py",
        arguments,
        output_dir=tmp_path / "run",
        launcher=launcher,
        env=environment,
    )
    assert results(tmp_path / "run")["resumed_from"] == 6
    assert final_weights(tmp_path / "run") == final_weights(reference("2cpu", 2).folder)
    assert metrics(tmp_path / "run", "train") == metrics(reference("2cpu", 2).folder, "train")


@pytest.mark.slow
def test_signal_to_one_rank_stops_all_at_one_step(reference, tmp_path):
    # The signal comes in step 5, then in the 4th step after the restart; the processes agree to
    # stop one step later.
    for fault, step in (("sigterm_in_step@5:1", 6), ("sigusr1_in_step@4:0", 11)):
        done = faulty(fault, SMALL, tmp_path / "run")
        run_status = status(tmp_path / "run")
        assert run_status["state"] == "preempted" and run_status["step"] == step
        assert f"exitcode  : {PREEMPTED}" in done.stderr
        assert done.stdout.count("run the same command again") == 1
    relaunch_and_compare(reference("2cpu", 2).folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "number"),
    [("2cpu", "SIGTERM"), ("2cpu", "SIGUSR1"), ("cpu", "SIGTERM"), ("2cpu", "SIGINT")],
)
def test_signal_to_the_launcher(config, number, reference, tmp_path):
    """Preemption, or Ctrl-C (which a terminal sends to every process)."""
    # With loader workers, because a terminal sends the signal to them too: they must continue
    # loading until the run is saved.
    script, arguments = (GPT, GPT_WITH_A_WORKER) if number == "SIGINT" else (CIFAR, ENDLESS)
    started = Started(config, script, arguments, output_dir=tmp_path / "run")
    started.wait_for("step      5/")
    workers = [psutil.Process(pid) for pid in started.workers().values()]
    if number == "SIGINT":
        os.killpg(started.process.pid, signal.SIGINT)
    else:
        os.kill(started.process.pid, getattr(signal, number))
    _, output = started.finish()
    assert all_end(workers)
    run_status = status(tmp_path / "run")
    assert run_status["state"] == "preempted"
    assert (
        tmp_path / "run" / "checkpoints" / f"step_{run_status['step']:08d}" / "manifest.json"
    ).exists()
    assert not (tmp_path / "run" / "checkpoints" / ".writing").exists()
    assert output.count("Traceback") <= 1  # that of the launcher, not one per rank


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu", "2cpu"])
def test_time_to_save_without_a_launcher(config, tmp_path):
    """Ctrl-C ends the launcher of one process at once, SIGUSR1 any.

    The processes must still finish a slow save.
    """
    fault = "slow_save" if config == "cpu" else "slow_check"
    arguments = [fault, CIFAR, *ENDLESS.split()]
    started = Started(config, "tests/harness/wrapped.py", arguments, output_dir=tmp_path / "run")
    started.wait_for("step      5/")
    workers = [psutil.Process(pid) for pid in started.workers().values()]
    if config == "cpu":
        os.killpg(started.process.pid, signal.SIGINT)
    else:
        os.kill(started.process.pid, signal.SIGUSR1)
    started.finish()
    assert all_end(workers)
    assert status(tmp_path / "run")["state"] == "preempted"


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory):
    """A run on one process, preempted after step 8 with two valid checkpoints; tests use copies of
    it.
    """
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    faulty("sigterm_in_step@8", SMALL, folder, config="cpu")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir())[-2:] == [
        "step_00000006",
        "step_00000008",
    ]
    return folder


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def alter(path):
    """A change that leaves a valid manifest, of another run."""
    path.write_text(path.read_text().replace('"total_steps": 14', '"total_steps": 15'))


DAMAGES = [
    (truncate, "model.safetensors"),
    (flip, "optimizer.bin"),
    (flip, "manifest.json"),
    (alter, "manifest.json"),
    (os.remove, "random_states_0.pkl"),
    (os.remove, "manifest.json"),
]


@pytest.mark.parametrize(("damage", "name"), DAMAGES)
def test_damaged_checkpoint_is_found_before_it_is_loaded(
    damage, name, interrupted, tmp_path, capsys
):
    shutil.copytree(interrupted, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "step_00000008" / name)
    path, _ = checkpoint.find(tmp_path / "run", "auto")
    assert path.name == "step_00000006"
    warning = capsys.readouterr().err
    assert warning.count("warning:") == 1 and name in warning
    for other in (tmp_path / "run" / "checkpoints").iterdir():
        if other.name != "step_00000008":
            damage(other / name)
    with pytest.raises(UserError, match="damaged: restore one"):
        checkpoint.find(tmp_path / "run", "auto")


@pytest.mark.slow
def test_the_checkpoint_before_a_damaged_one_is_used(interrupted, reference, tmp_path):
    shutil.copytree(interrupted, tmp_path / "run")
    flip(tmp_path / "run" / "checkpoints" / "step_00000008" / "model.safetensors")
    again = relaunch_and_compare(reference("cpu").folder, tmp_path / "run", config="cpu")
    assert (
        "warning: checkpoint" in again.stderr
        and "model.safetensors does not match its checksum" in again.stderr
    )
    assert results(tmp_path / "run")["resumed_from"] == 6


def test_evaluating_an_unfinished_run_leaves_its_checkpoints_valid(interrupted, tmp_path):
    shutil.copytree(interrupted, tmp_path / "run")
    run(None, "scripts/evaluate.py", f"--checkpoint {tmp_path / 'run'}")
    assert (tmp_path / "run" / "evaluation" / "predictions.png").exists()
    path, _ = checkpoint.find(tmp_path / "run", "auto")
    assert path.name == "step_00000008"


def test_a_run_starts_from_a_checkpoint_of_another_run_and_continues_from_its_own(
    interrupted, tmp_path
):
    theirs, own = (
        interrupted / "checkpoints" / "step_00000008",
        tmp_path / "checkpoints" / "step_00000006",
    )
    assert checkpoint.find(tmp_path, str(theirs))[0] == theirs
    shutil.copytree(interrupted / "checkpoints" / own.name, own)
    assert checkpoint.find(tmp_path, str(theirs))[0] == own
    with pytest.raises(UserError, match="another --output_dir"):
        checkpoint.find(tmp_path, str(own))


def test_a_new_checkpoint_is_kept_and_the_later_damaged_ones_are_not(tmp_path):
    for step in (3, 5, 8):
        (tmp_path / f"step_{step:08d}").mkdir()
    checkpoint._prune(tmp_path, 1, tmp_path / "step_00000005")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def test_only_damaged_checkpoints_are_an_error_not_a_new_start(interrupted, tmp_path):
    shutil.copytree(interrupted, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        flip(path / "optimizer.bin")
    done = run(None, CIFAR, SMALL, output_dir=tmp_path / "run", check=False)
    assert done.returncode == 2 and "error: all checkpoints in" in done.stderr
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) >= 2


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


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
    "name", ["optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl"]
)
def test_a_poisoned_checkpoint_executes_nothing(name, interrupted, tmp_path):
    shutil.copytree(interrupted, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_00000008"
    (newest / name).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    update_manifest(newest)
    done = run(None, CIFAR, f"{SMALL} --resume {newest}", output_dir=tmp_path / "own", check=False)
    assert not (tmp_path / "executed").exists()
    assert done.returncode == 2 and done.stderr.count("error: ") == 1, done.stderr


def test_registered_state_executes_nothing(tmp_path):
    """Accelerate unpickles it (`load_custom_state`), in a folder of the run's own, too: that may
    have been downloaded.
    """
    (tmp_path / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    counter = torch.nn.BatchNorm1d(1)
    accelerate = SimpleNamespace(num_processes=1, process_index=0, scaler=None)
    accelerate.load_state = lambda path, **_: counter.load_state_dict(
        load(Path(path) / "custom_checkpoint_0.pkl", weights_only=False)
    )
    with pytest.raises(UserError, match="execute code"):
        checkpoint.load(accelerate, tmp_path)
    assert not (tmp_path / "executed").exists()
    torch.save(torch.nn.BatchNorm1d(1).state_dict(), tmp_path / "custom_checkpoint_0.pkl")
    checkpoint.load(accelerate, tmp_path)
    assert torch.load.__name__ == "load" and dcp.FileSystemReader is not shards.Reader


@pytest.mark.parametrize("poisoned", ["index", "value", "constructor", "elsewhere", None])
def test_a_poisoned_sharded_checkpoint_executes_nothing(poisoned, tmp_path):
    """Without the check, torch would unpickle the index of such a checkpoint, and every value that
    is not a tensor.
    """
    bomb, folder = Bomb(tmp_path / "executed"), tmp_path / "shards"
    state = {"weight": torch.ones(3), "plain": bomb if poisoned == "value" else [1, "two"]}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    if poisoned == "index":
        (folder / ".metadata").write_bytes(pickle.dumps(bomb))
    if poisoned == "constructor":  # a function that the module of the data classes imports
        (folder / ".metadata").write_bytes(
            b"ctorch.distributed.checkpoint.metadata\ndataclass\n(tR."
        )
    if poisoned == "elsewhere":
        shutil.copy(folder / "__0_0.distcp", tmp_path / "outside")
        index = pickle.loads((folder / ".metadata").read_bytes())
        for location in index.storage_data.values():
            location.relative_path = "../outside"
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    loaded = {"weight": torch.zeros(3), "plain": None}

    def load_state(path, **_):
        reader = dcp.FileSystemReader(path)  # the name by which Accelerate gets it
        dcp.load(loaded, storage_reader=reader, no_dist=True)

    accelerate = SimpleNamespace(
        num_processes=1, process_index=0, scaler=None, load_state=load_state
    )
    if poisoned is None:
        checkpoint.load(accelerate, folder)
        assert loaded["weight"].tolist() == [1, 1, 1] and loaded["plain"] == [1, "two"]
        return
    with pytest.raises(UserError, match="execute code"):
        checkpoint.load(accelerate, folder)
    assert not (tmp_path / "executed").exists() and loaded["weight"].tolist() == [0, 0, 0]


@contextlib.contextmanager
def small_disk(folder, size):
    """Mounts a file system of `size` in `folder`; yields its path."""
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_costs_a_checkpoint_not_the_run(reference, tmp_path):
    with small_disk(tmp_path, "2200k") as disk:
        # The disk is full during the third checkpoint, and has room again before the fourth.
        done = run(
            "cpu",
            "tests/harness/wrapped.py",
            [
                f"fill_disk@3:{disk}",
                CIFAR,
                *SMALL.replace("--eval_every 7", "--eval_every 14").split(),
            ],
            output_dir=disk / "run",
        )
        assert done.stderr.count("warning: checkpoint of step 9 not written") == 1, done.stderr
        written = {line["step"]: line["written"] for line in metrics(disk / "run", "checkpoint")}
        assert written == {3: True, 6: True, 9: False, 12: True, 14: True}
        assert final_weights(disk / "run") == final_weights(reference("cpu").folder)


@pytest.mark.slow
def test_a_full_disk_costs_a_sharded_run_a_checkpoint(tmp_path):
    """torch.distributed.checkpoint then raises what is no Exception, on every process."""
    arguments = (
        "--dataset synthetic --n_layer 1 --n_head 1 --n_embd 16 --block_size 16 --batch_size 4 "
        "--max_train_steps 12 --eval_every 12 --checkpoint_every 3 --track none"
    )
    with small_disk(tmp_path, "8m") as disk:
        done = run(
            "4gpu_fsdp",
            "tests/harness/wrapped.py",
            [f"fill_disk@2:{disk}", GPT, *arguments.split()],
            output_dir=disk / "run",
            launcher=("--num_processes", "2"),
        )
        warning = "warning: checkpoint of step 6 not written, training continues: "
        (why,) = re.findall(f"{warning}(.*)", done.stderr)
        assert "Exception" not in why, why
        written = {line["step"]: line["written"] for line in metrics(disk / "run", "checkpoint")}
    assert written == {3: True, 6: False, 9: True, 12: True}


@pytest.mark.slow
def test_a_slow_file_system_is_waited_for(tmp_path):
    """Longer than --timeout, which is for computing: otherwise rank 1 would give up while rank 0
    hashes a checkpoint.
    """
    # A new run hashes a checkpoint first; one that continues first verifies its checkpoint.
    for steps in ("14", "16"):
        arguments = f"slow_hash@1:0 {CIFAR} {SMALL} --max_train_steps {steps} --timeout 10"
        run("2cpu", "tests/harness/wrapped.py", arguments, output_dir=tmp_path / "run")
    assert results(tmp_path / "run")["resumed_from"] == 14


def test_a_folder_that_is_not_shared_is_an_error_at_the_start(tmp_path):
    done = run(
        "2cpu",
        "tests/harness/wrapped.py",
        [f"elsewhere@0:{tmp_path}", CIFAR, *SMALL.split()],
        output_dir="run",
        check=False,
    )
    assert done.stderr.count("error: --output_dir run is a different folder on") == 1, done.stderr
    assert (
        not (tmp_path / "0" / "run" / "args.json").exists()
        and not (tmp_path / "1" / "run").exists()
    )


def test_files_that_another_machine_does_not_see_are_an_error(tmp_path, monkeypatch):
    """A folder may also be lost during the run.

    A file that appears late, as over NFS, is waited for.
    """
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    elsewhere = [{}, {"model.safetensors": 7, "rank_1.distcp": 3}]
    monkeypatch.setattr(manifest.time, "sleep", lambda _: None)
    monkeypatch.setattr(
        manifest, "gather", lambda _, value, group: [value, elsewhere.pop(0) if elsewhere else {}]
    )
    one_of_two = SimpleNamespace(num_processes=2, process_index=0, is_local_main_process=True)
    with pytest.raises(UserError, match="rank 0 and rank 1 do not see the same model"):
        manifest.hash_and_sync(one_of_two, tmp_path)
    # Late; then nothing was left for the other process to hash.
    views = iter([{}, {"model.safetensors": 7}, {}])
    monkeypatch.setattr(manifest, "gather", lambda _, value, group: [value, next(views)])
    described = manifest.hash_and_sync(one_of_two, tmp_path)
    assert described == {"model.safetensors": {"size": 7, "sha256": sha256(b"weights").hexdigest()}}


@pytest.mark.slow
def test_checkpoints_that_keep_failing_end_the_run(reference, tmp_path):
    """On all processes, even if only one cannot write.

    The run continues from its last checkpoint once writing works again.
    """
    done = faulty("failing_saves@2:1", SMALL, tmp_path / "run")
    assert done.stderr.count("warning: checkpoint of step") == 3
    assert done.stderr.count("error: 3 checkpoints in a row could not be written") == 1
    assert (
        status(tmp_path / "run")["state"] == "failed"
        and "of step 3" in status(tmp_path / "run")["reason"]
    )
    relaunch_and_compare(reference("2cpu", 2).folder, tmp_path / "run")
    assert results(tmp_path / "run")["resumed_from"] == 3


def test_a_disk_that_stays_full_ends_the_run_with_a_one_line_error(reference, tmp_path):
    with small_disk(tmp_path, "2200k") as disk:
        done = faulty(
            f"full_disk@5:{disk}",
            SMALL + " --checkpoint_every 7",
            disk / "run",
            config="cpu",
        )
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "the disk is full" in errors[0], done.stderr
        assert "Traceback" not in done.stderr.split(errors[0])[0]
        (disk / "ballast").unlink()
        relaunch_and_compare(reference("cpu").folder, disk / "run", config="cpu")


def test_finished_run_is_left_alone(reference):
    folder = reference("2cpu", 2).folder
    before = {
        path: path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.name != ".lock" and path != folder
    }
    again = run("2cpu", CIFAR, SMALL, output_dir=folder)
    assert (
        "already finished" in again.stdout
        and f"test accuracy {results(folder)['test_accuracy']:.4f}" in again.stdout
    )
    assert before == {
        path: path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.name != ".lock" and path != folder
    }


@pytest.mark.slow
def test_second_job_in_the_same_folder_is_refused(tmp_path):
    arguments = SMALL.replace("--max_train_steps 14", "--max_train_steps 100000")
    first = Started("cpu", CIFAR, arguments, output_dir=tmp_path / "run")
    first.wait_for("step      1/")
    # Short, in case nothing stops it.
    second = run("cpu", CIFAR, SMALL, output_dir=tmp_path / "run", check=False)
    first.kill_all()
    assert "is in use by process" in second.stderr and second.stderr.count("error: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("2cpu", "cpu"), ("cpu", "2cpu")])
def test_another_number_of_processes_trains_on_the_same_samples(before, after, reference, tmp_path):
    faulty("die_in_step@8:0", SMALL, tmp_path / "run", config=before)
    run(after, CIFAR, SMALL, output_dir=tmp_path / "run")
    assert results(tmp_path / "run")["resumed_from"] == 6
    # With other samples, the loss of a step would differ by far more than rounding.
    for a, b in zip(
        metrics(tmp_path / "run", "train"), metrics(reference("cpu").folder, "train"), strict=True
    ):
        assert a["step"] == b["step"] and a["loss"] == pytest.approx(b["loss"], abs=1e-4)


@pytest.mark.slow
def test_a_finished_run_trains_longer_with_a_constant_schedule(tmp_path):
    constant = SMALL + " --lr_schedule constant"
    run(
        "cpu",
        CIFAR,
        constant.replace("--max_train_steps 14", "--max_train_steps 8"),
        output_dir=tmp_path / "run",
    )
    run("cpu", CIFAR, constant + " --log_every 2", output_dir=tmp_path / "run")
    assert (
        results(tmp_path / "run")["global_step"] == 14
        and results(tmp_path / "run")["resumed_from"] == 8
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_diverges_is_not_saved(processes, tmp_path):
    """The loss of a step is normally checked one step later, which would be too late for the
    checkpoint of that step.
    """
    faulty(
        f"nan@9:{processes - 1}",
        SMALL,
        tmp_path / "run",
        config="cpu" if processes == 1 else "2cpu",
    )
    assert "step 9" in status(tmp_path / "run")["reason"]
    assert not (tmp_path / "run" / "checkpoints" / "step_00000009").exists()


@pytest.mark.parametrize(
    ("step", "clip", "says"),
    [
        (6, "", "weights after"),
        pytest.param(4, " --max_grad_norm 1", "gradient norm at", marks=pytest.mark.slow),
    ],
)
def test_an_infinite_gradient_is_not_saved_and_the_run_goes_on_from_before_it(
    step, clip, says, made_once, tmp_path
):
    """In a step whose loss is finite.

    Clipping turns it into NaN weights: 0 x inf. Only step 6 has a checkpoint to save.
    """
    whole = run_once(made_once, f"clipped{clip[-1:]}", "cpu", CIFAR, SMALL + clip).folder
    done = faulty(f"infinite_gradient@{step}", SMALL + clip, tmp_path / "run", config="cpu")
    assert done.stderr.count(f"error: non-finite {says} step {step};") == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000003"]
    relaunch_and_compare(whole, tmp_path / "run", SMALL + clip, "cpu")


def test_with_a_gradient_scaler_an_infinite_gradient_is_normal(monkeypatch):
    """The scaler of fp16 skips such a step, and the run goes on."""
    monkeypatch.setattr(process, "_phase", "starting")
    for scaler in (None, object()):
        watched = guard.Guard(
            SimpleNamespace(num_processes=1, process_index=0, scaler=scaler), timeout=600
        )
        with (
            contextlib.nullcontext()
            if scaler
            else pytest.raises(failures.RunFailed, match="gradient norm at step 1")
        ):
            for step in (1, 2):
                watched.should_stop(
                    step, [torch.tensor(1.0)], [torch.tensor([7])], torch.tensor(float("inf"))
                )


def test_a_checkpoint_that_is_not_finite_is_passed_over(interrupted, tmp_path, capsys):
    shutil.copytree(interrupted, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_00000008"
    weights = load_file(newest / "model.safetensors")
    weights["fc3.bias"][4] = float("nan")
    save_file(weights, newest / "model.safetensors")
    update_manifest(newest)
    path, _ = checkpoint.find(tmp_path / "run", "auto")
    assert (
        path.name == "step_00000006"
        and "fc3.bias in model.safetensors is not finite" in capsys.readouterr().err
    )


@pytest.mark.parametrize("part", ["parameter", "buffer", None])
def test_weights_are_looked_at_before_saving(part):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    if part:
        (model[0].weight.data if part == "parameter" else model[1].running_var)[0] = float("inf")
    assert guard.all_finite(model) == (part is None)


@pytest.mark.parametrize("processes", some_slow([1, 2], 1))
def test_diverged_loss_stops_the_run_and_names_the_samples(processes, reference, tmp_path):
    config = "cpu" if processes == 1 else "2cpu"
    done = faulty(f"nan@8:{processes - 1}", SMALL, tmp_path / "run", config=config)
    error = next(
        line
        for line in done.stderr.splitlines()
        if line.startswith("error: non-finite loss at step 8")
    )
    assert error.endswith("] and 40 more, listed in status.json") and error.count(", ") < 30
    written = status(tmp_path / "run")
    assert written["state"] == "failed" and f"error: {written['reason']}".startswith(error)
    shown, others = (json.loads(ids) for ids in re.findall(r"\[.*?\]", written["reason"]))
    assert len(shown) == 20 and len({*shown, *others}) == 60  # the samples of all processes
    relaunch_and_compare(reference(config, processes).folder, tmp_path / "run", config=config)


def test_out_of_memory_says_what_to_do(tmp_path):
    done = faulty("out_of_memory@3:1", SMALL, tmp_path / "run")
    assert "out of memory on rank 1, which computes 30 samples at a time" in done.stderr
    assert (
        "out of memory on rank 1" in status(tmp_path / "run")["reason"]
    )  # the reason of the first process to fail, not of those that lost contact with it
    assert (
        "--gradient_accumulation_steps" in done.stderr
        and "Traceback (most recent call last)" not in done.stderr.split("error: ")[1][:500]
    )


@pytest.mark.slow
def test_the_others_give_up_on_a_hung_process(tmp_path):
    done = faulty("hang@5:1", SMALL + " --timeout 6", tmp_path / "run")
    assert "rank 0 lost contact with another process" in done.stderr


def test_a_dead_loader_worker_is_an_error(tmp_path):
    started = Started("cpu", GPT, GPT_WITH_A_WORKER, output_dir=tmp_path / "run")
    started.wait_for("step      3/")
    psutil.Process(started.workers()[0]).children()[0].kill()
    code, output = started.finish()
    assert code != 0 and output.count("error: rank 0: a data loader worker died") == 1, output


# With several processes, a lost process causes a similar error.
@pytest.mark.parametrize("config", ["cpu", "2cpu"])
def test_a_loader_worker_that_dies_while_sending_a_batch_is_the_same_error(config, tmp_path):
    rank = int(config == "2cpu")
    fault = f"worker_dies_handing_over@20:{rank}"
    done = faulty(fault, GPT_WITH_A_WORKER, tmp_path / "run", config, script=GPT)
    assert done.stderr.count(f"error: rank {rank}: a data loader worker died") == 1, done.stderr
    assert "Traceback" not in done.stderr.split("error: rank")[0]


@pytest.mark.parametrize("outer", ["loader", "connection"])
def test_a_dead_loader_worker_is_recognized_whichever_error_wraps_the_other(outer):
    loader, connection = (
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        ConnectionResetError("reset"),
    )
    errors = [loader, connection] if outer == "loader" else [connection, loader]
    errors[0].__context__ = errors[1]
    assert "a data loader worker died: DataLoader worker (pid 7)" in failures.describe(errors[0])


def test_full_output_folder_is_refused(tmp_path):
    with small_disk(tmp_path, "16k") as disk:
        done = run(None, CIFAR, SMALL, output_dir=disk / "run", check=False)
        assert (
            done.returncode == 2
            and "cannot write to --output_dir" in done.stderr
            and "No space left" in done.stderr
        )


@pytest.mark.slow
def test_chaos_finds_no_difference_unless_there_is_one(tmp_path):
    launch = command("cpu", CIFAR, f"{SMALL} --max_train_steps 120 --checkpoint_every 5")
    chaos = [
        sys.executable,
        str(ROOT / "scripts" / "chaos.py"),
        "--folder",
        str(tmp_path / "chaos"),
        "--kills",
    ]
    done = subprocess.run(
        [*chaos, "3", "--", *launch], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0 and "3 kills" in done.stdout, done.stdout + done.stderr
    # The weights of this run depend on the clock, so chaos.py must report a difference.
    irreproducible = [
        sys.executable,
        str(ROOT / "tests" / "wrapped.py"),
        "clock_seed",
        *command(None, CIFAR, SMALL)[1:],
    ]
    done = subprocess.run(
        [*chaos, "1", "--", *irreproducible], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode != 0 and "model.safetensors differs" in done.stdout, (
        done.stdout + done.stderr
    )
