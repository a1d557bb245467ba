"""Whatever a process waits for, a signal ends it in bounded time, and nothing is lost."""

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
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
    run,
    some_slow,
    status,
)

from utils.run import manifest
from utils.run.process import PREEMPTED

MINIMAL = "scripts/train_minimal.py"
SHORT = "--max_train_steps 60 --eval_every 20 --checkpoint_every 40 --log_every 20"


def scores(folder):
    """The score of each checkpoint, by name."""
    paths = manifest.all_in(folder)
    return {path.name: manifest.read(path)["progress"]["score"] for path in paths}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Finished runs of train_minimal.py, by configuration."""
    folders = {name: tmp_path_factory.mktemp("signals") / name for name in ("cpu", "2cpu")}
    for config, folder in folders.items():
        run(config, MINIMAL, SHORT, output_dir=folder)
    return folders


@pytest.mark.parametrize(
    ("config", "faults"),
    [
        # In the evaluation of step 20, which is saved; then in that of step 40, and in the one that
        # the restart makes up for.
        ("cpu", ["sigterm_in_evaluation@2", "sigterm_in_evaluation@17", "sigterm_in_evaluation@1"]),
        ("2cpu", ["sigterm_in_evaluation@1:1", "sigterm_in_evaluation@2:0"]),
        # In a step that is due for an evaluation: it is saved, and not evaluated.
        ("cpu", ["sigterm_in_step@20", "sigterm_in_step@40"]),
    ],
)
def test_an_evaluation_is_interrupted_and_done_again(config, faults, uninterrupted, tmp_path):
    for fault in faults:
        words = [fault, MINIMAL, *SHORT.split()]
        done = run(config, "tests/harness/wrapped.py", words, output_dir=tmp_path, check=False)
        assert done.returncode != 0 and "stopped by " in done.stdout + done.stderr
        assert status(tmp_path)["state"] == "preempted"
        if fault == "sigterm_in_step@20":
            assert not metrics(tmp_path, "val")
    run(config, MINIMAL, SHORT, output_dir=tmp_path)
    assert final_weights(tmp_path) == final_weights(uninterrupted[config])
    for split in ("train", "val"):
        assert metrics(tmp_path, split) == metrics(uninterrupted[config], split)
    assert scores(tmp_path).items() >= scores(uninterrupted[config]).items()


def test_a_signal_after_the_last_save_ends_at_once_and_costs_no_result(uninterrupted, tmp_path):
    """In the final evaluation everything is saved. The 25th batch is one of it."""
    words = ["sigterm_in_evaluation@26", MINIMAL, *SHORT.split()]
    done = run("cpu", "tests/harness/wrapped.py", words, output_dir=tmp_path, check=False)
    assert "after the last step, which is saved: run the same command again" in done.stderr
    assert status(tmp_path)["state"] == "preempted" and not (tmp_path / "results.json").exists()
    run("cpu", MINIMAL, SHORT, output_dir=tmp_path)
    assert final_weights(tmp_path) == final_weights(uninterrupted["cpu"])


def test_a_closed_terminal_saves(tmp_path):
    words = ["sighup_in_step@30", MINIMAL, *SHORT.split()]
    done = run("cpu", "tests/harness/wrapped.py", words, output_dir=tmp_path, check=False)
    assert done.returncode != 0 and "stopped by SIGHUP at step 30, saved at step 30" in done.stdout


@pytest.mark.slow
def test_a_hangup_that_is_ignored_at_the_start_stays_ignored(tmp_path):
    """As under `nohup`, also where a variable of a launcher is left over."""
    words = command(
        None, "tests/harness/wrapped.py", ["sighup_in_step@30", MINIMAL, *SHORT.split()]
    )
    done = subprocess.run(
        ["nohup", *words, "--output_dir", str(tmp_path)],
        env={**os.environ, "ACCELERATE_MIXED_PRECISION": "no"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert status(tmp_path)["state"] == "finished"


@pytest.mark.slow
def test_a_process_without_a_launcher_outlives_whoever_started_it(tmp_path):
    """An exported variable does not make the shell a launcher."""
    words = command(None, MINIMAL, SHORT.replace("60", "1000"), output_dir=tmp_path / "run")
    line = (
        f"nohup {' '.join(words)} >{tmp_path}/log 2>&1 & echo $!; "
        f"until grep -q 'starting at step' {tmp_path}/log; do :; done"
    )
    environment = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no", "PYTHONUNBUFFERED": "1"}
    started = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True)
    process = psutil.Process(int(started.stdout))
    assert all_end([process], LIMIT)
    assert status(tmp_path / "run")["state"] == "finished", (tmp_path / "log").read_text()


def test_a_worker_that_sends_nothing_does_not_outlive_a_signal(tmp_path):
    words = ["silent_loader@6", GPT, *GPT_WITH_A_WORKER.split()]
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1.5"}
    started = Started(None, "tests/harness/wrapped.py", words, output_dir=tmp_path, env=environment)
    started.wait_for("step      3/")  # two more batches are loaded ahead
    workers = psutil.Process(started.process.pid).children(recursive=True)
    os.kill(started.process.pid, signal.SIGTERM)
    assert workers and all_end(workers, 20)
    code, output = started.finish()
    assert code == PREEMPTED and "waiting for a batch 1 s later" in output, output
    assert status(tmp_path)["state"] == "preempted"


def test_a_worker_that_sends_nothing_is_waited_for_as_long_as_for_a_process(tmp_path):
    words = ["silent_loader@4", GPT, *GPT_WITH_A_WORKER.split(), "--timeout", "3"]
    done = run(None, "tests/harness/wrapped.py", words, output_dir=tmp_path, check=False)
    assert done.returncode == 1 and done.stderr.count("error: rank 0 waited longer than") == 1
    assert "--num_workers 0" in done.stderr and "same command again" not in done.stderr


def test_a_stopped_process_does_not_keep_the_others_from_ending(tmp_path):
    """The others wait for it in a collective, inside C++, where no handler of Python runs."""
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
    started = Started("2cpu", CIFAR, ENDLESS, output_dir=tmp_path, env=environment)
    started.wait_for("step      3/")
    stopped = psutil.Process(started.workers()[1])
    stopped.suspend()
    os.kill(started.process.pid, signal.SIGTERM)
    code, output = started.finish()
    assert code != 0 and "in a step or a collective 2 s later: the last checkpoint" in output, (
        output
    )
    assert status(tmp_path)["state"] == "preempted" and all_end([stopped])


@pytest.mark.slow
def test_a_save_is_finished_however_long_it_takes(tmp_path):
    """The signal arrives in a save of six seconds, and may wait only two for anything else."""
    words = ["slow_save", CIFAR, *ENDLESS.replace("every 0", "every 3").split()]
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
    started = Started(None, "tests/harness/wrapped.py", words, output_dir=tmp_path, env=environment)
    started.wait_for("step      3/")
    while not (tmp_path / "checkpoints" / ".writing").exists():
        pass
    os.kill(started.process.pid, signal.SIGTERM)
    code, output = started.finish()
    assert code == PREEMPTED and "stopped by SIGTERM at step " in output, output
    assert manifest.all_in(tmp_path)[0].name == "step_00000003"


def test_a_batch_that_cannot_be_sent_is_an_error_at_once(tmp_path):
    """The socket of a worker is in TMPDIR; Python would print the error, and wait forever."""
    long = tmp_path / ("x" * 60) / ("y" * 60)
    long.mkdir(parents=True)
    done = run(
        None,
        GPT,
        f"{GPT_WITH_A_WORKER} --timeout 20",
        output_dir=tmp_path / "run",
        env={"TMPDIR": str(long)},
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("a data loader worker cannot send its batch: OSError: AF_UNIX") == 1
    assert done.stderr.count("error: rank 0: a data loader worker died") == 1
    assert "Traceback" not in done.stderr and "same command" not in done.stderr


# ---------------------------------------------------------------------------------------- output


@pytest.mark.parametrize(
    "closed",
    some_slow(
        [">&-", "2>&-", ">&- 2>&-", ">/dev/full", "| true", "2>&1 | true"],
        "2>&-",
        ">&-",
        ">&- 2>&-",
        "| true",
        "2>&1 | true",
    ),
)
def test_output_that_cannot_be_printed_costs_nothing(closed, uninterrupted, tmp_path):
    words = " ".join(command(None, MINIMAL, SHORT, output_dir=tmp_path / "run"))
    line = f"{{ {words}; echo $? >{tmp_path}/code; }} {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=LIMIT)
    assert (tmp_path / "code").read_text() == "0\n", done.stderr
    assert metrics(tmp_path / "run", "val") == metrics(uninterrupted["cpu"], "val")


def test_a_worker_that_is_spawned_ignores_ctrl_c(tmp_path):
    """From its import of the script on: a terminal sends it to all (macOS)."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import multiprocessing, signal, sys
sys.path.insert(1, {str(ROOT)!r})
from utils.run import process

def report(queue):
    queue.put([signal.getsignal(signum) is signal.SIG_IGN for signum in process.STOPPING])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    worker = context.Process(target=report, args=(queue,))
    worker.start()
    print(queue.get(), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    worker.join()
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout == "[True, True, True, True] True\n", done.stderr


@pytest.mark.slow
def test_an_error_is_found_in_the_status_if_nobody_reads_it(tmp_path):
    words = " ".join(
        command(
            None,
            "tests/harness/wrapped.py",
            f"nan@30 {MINIMAL} {SHORT}",
            output_dir=tmp_path / "run",
        )
    )
    line = f"{{ {words}; echo $? >{tmp_path}/code; }} 2>&1 | true"
    subprocess.run(["sh", "-c", line], timeout=LIMIT)
    assert (tmp_path / "code").read_text() == "1\n"
    assert "non-finite loss at step 30" in status(tmp_path / "run")["reason"]


# -------------------------------------------------------------------------------------- launchers


@pytest.mark.parametrize(
    ("config", "variables", "named"),
    [
        (None, {"RANK": "1"}, "RANK is set"),
        (None, {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "2"}, "WORLD_SIZE, LOCAL_RANK are"),
        (None, {"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE is set"),
        (None, {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is set"),
        ("cpu", {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "elsewhere"}, "RANK, WORLD_SIZE"),
    ],
)
def test_variables_of_another_launch_are_named(config, variables, named, tmp_path):
    done = run(config, MINIMAL, SHORT, output_dir=tmp_path / "run", env=variables, check=False)
    assert done.returncode == (2 if config is None else 1)
    assert done.stderr.count(f"error: {named}") == 1 and "unset " in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "variables"),
    [
        (None, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "elsewhere"}),
        ("cpu", {"PMI_RANK": "0", "PMI_SIZE": "1", "NODE_RANK": "3"}),
        ("2cpu", {"PMI_RANK": "1", "PMI_SIZE": "2", "RANK": "7", "OMPI_COMM_WORLD_SIZE": "9"}),
    ],
)
def test_variables_that_mean_nothing_here_are_ignored(config, variables, uninterrupted, tmp_path):
    """An `srun` step with a launcher on each node sets those of MPI."""
    run(config, MINIMAL, SHORT, output_dir=tmp_path / "run", env=variables)
    assert final_weights(tmp_path / "run") == final_weights(uninterrupted[config or "cpu"])


@pytest.mark.parametrize(
    ("config", "variables", "launcher", "threads"),
    [
        (None, {"OMP_NUM_THREADS": "1"}, (), 1),
        ("cpu", {"OMP_NUM_THREADS": "3"}, (), 3),
        (None, {"OMP_NUM_THREADS": "2,1"}, (), 2),
        ("cpu", {"OMP_NUM_THREADS": "many"}, ("--num_cpu_threads_per_process", "3"), 3),
    ],
)
def test_threads_that_a_person_asks_for(config, variables, launcher, threads, tmp_path):
    done = run(
        config, MINIMAL, SHORT, output_dir=tmp_path / "run", env=variables, launcher=launcher
    )
    assert f"each on CPU, {threads} thread" in done.stdout


# ------------------------------------------------------------------------------------ the folder


def test_an_old_checkpoint_that_cannot_be_deleted_costs_a_warning(uninterrupted, tmp_path):
    arguments = f"{SHORT} --checkpoint_every 5 --keep_checkpoints 1"
    words = ["undeletable@step_00000005", MINIMAL, *arguments.split()]
    done = run("cpu", "tests/harness/wrapped.py", words, output_dir=tmp_path)
    assert done.stderr.count("the old checkpoint step_00000005 was not deleted") == 1, done.stderr
    assert final_weights(tmp_path) == final_weights(uninterrupted["cpu"])
    assert {line["written"] for line in metrics(tmp_path, "checkpoint")} == {True}
    run("cpu", MINIMAL, f"{arguments} --max_train_steps 70", output_dir=tmp_path)
    assert not list((tmp_path / "checkpoints").glob(".del*"))


def test_files_of_the_system_in_a_checkpoint_are_ignored(tmp_path):
    run(None, MINIMAL, SHORT, output_dir=tmp_path)
    newest = manifest.all_in(tmp_path)[-1]
    for name in (".DS_Store", "._model.safetensors", ".nfs0000123"):
        (newest / name).write_bytes(b"\0")
    done = run(None, MINIMAL, SHORT.replace("60", "70"), output_dir=tmp_path)
    assert f"continuing from {newest}" in done.stdout


@pytest.mark.parametrize("config", ["cpu", "2cpu"])
def test_a_folder_that_is_renamed_while_training_is_one_line(config, tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    words = [f"rename_folder@30:{moved}", MINIMAL, *SHORT.split()]
    done = run(config, "tests/harness/wrapped.py", words, output_dir=folder, check=False)
    assert done.returncode == 1 and done.stderr.count("error: --output_dir") == 1, done.stderr
    assert "was removed or renamed while the run was writing to it" in done.stderr
    assert "same command again to continue" not in done.stderr


def test_all_files_of_a_run_have_usual_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        done = run(None, MINIMAL, SHORT, output_dir=tmp_path / "run", cold=True)
    finally:
        os.umask(before)
    assert done.returncode == 0
    modes = {
        path.relative_to(tmp_path): oct(path.stat().st_mode & 0o777)
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    }
    assert set(modes.values()) == {"0o640"}, modes


@pytest.mark.parametrize("arguments", ["--init_from nowhere", "--resume nowhere"])
def test_an_error_before_training_leaves_no_folder(arguments, tmp_path):
    words = [*SHORT.split(), *arguments.split()]
    done = run(None, MINIMAL, words, output_dir=tmp_path / "runs" / "mine", check=False)
    assert done.returncode == 2 and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_nothing_is_left_open(tmp_path):
    environment = {"PYTHONWARNINGS": "error::ResourceWarning"}
    done = run(None, MINIMAL, SHORT, output_dir=tmp_path / "run", env=environment, cold=True)
    assert "ResourceWarning" not in done.stderr, done.stderr


# ------------------------------------------------------------------------------------- the extras


def test_plots_that_cannot_be_drawn_cost_no_result(tmp_path):
    words = ["no_plots", CIFAR, *SMALL.split()]
    done = run(None, "tests/harness/wrapped.py", words, output_dir=tmp_path)
    assert done.stderr.count("warning: a plot") == 3 and "\x1b" not in done.stderr, done.stderr
    for name in ("results.json", "model.safetensors", "README.md"):
        assert (tmp_path / name).exists()
    assert status(tmp_path)["state"] == "finished" and not list(tmp_path.glob("*.png"))


def test_a_tracker_that_cannot_write_costs_no_result(tmp_path):
    run(None, CIFAR, f"{SMALL} --max_train_steps 3", output_dir=tmp_path)
    shutil.rmtree(tmp_path / "tensorboard")
    (tmp_path / "tensorboard").write_text("not a folder")
    done = run(None, CIFAR, f"{SMALL} --max_train_steps 5", output_dir=tmp_path)
    assert "warning: experiment tracking is missing" in done.stderr, done.stderr
    assert status(tmp_path)["state"] == "finished"
