"""However a run ends, it says so in its status and exit code; whatever a process waits for, a signal
ends it in bounded time; and nothing is lost.
"""

import os
import shlex
import signal
import subprocess

import psutil
import pytest
from harness import warm
from harness.launches import (
    CIFAR,
    ENDLESS,
    GPT,
    GPT_WITH_A_WORKER,
    LIMIT,
    SMALL,
    Started,
    all_end,
    command,
    final_weights,
    metrics,
    results,
    run,
    run_once,
    scores,
    status,
)

MINIMAL = "scripts/train_minimal.py"
SHORT = "--max_train_steps 60 --eval_every 20 --checkpoint_every 40 --log_every 20"
PREEMPTED = 75


def faulty(faults, folder, script=MINIMAL, arguments=SHORT):
    """Runs a script with a fault."""
    return run(None, script, arguments, output_dir=folder, faults=faults, check=False)


@pytest.fixture
def uninterrupted(made_once):
    """The folder of a finished run of train_minimal.py."""
    return run_once(made_once, "minimal", None, MINIMAL, SHORT).folder


# ------------------------------------------------------------------------------------ how it ended


@pytest.mark.parametrize(
    ("fault", "code", "state", "says"),
    [
        ("die_in_step@30", -signal.SIGKILL, "running", ""),
        ("nan@30", 1, "failed", "non-finite loss at step 30"),
        ("signals_in_step@30", 75, "preempted", "stopped by SIGTERM at step 30, saved at step 30"),
        ("sighup_in_step@30", 75, "preempted", "stopped by SIGHUP at step 30, saved at step 30"),
        # In the final evaluation everything is saved: the restart writes the results.
        (
            "sigterm_in_evaluation@26",
            *(75, "preempted", "stopped by SIGTERM after the last step, which is saved"),
        ),
    ],
)
def test_the_status_and_the_exit_code_say_how_a_run_ended(
    fault, code, state, says, uninterrupted, tmp_path
):
    """And the same command ends it like a run that was not interrupted."""
    done = faulty(fault, tmp_path)
    written = status(tmp_path)
    assert (done.returncode, written["state"]) == (code, state), done.stdout + done.stderr
    assert says in (written.get("reason") or "") and says in done.stdout + done.stderr
    assert done.stderr.count("error: ") == (state == "failed")
    again = "run the same command again" in done.stdout + done.stderr
    assert again == (state == "preempted") and not (tmp_path / "results.json").exists()
    run(None, MINIMAL, SHORT, output_dir=tmp_path)
    assert status(tmp_path)["state"] == "finished"
    assert final_weights(tmp_path) == final_weights(uninterrupted)


@pytest.mark.parametrize(
    "faults",
    [
        # In the evaluation of step 20, which is saved; then in that of step 40, and in the one that
        # the restart makes up for.
        ["sigterm_in_evaluation@2", "sigterm_in_evaluation@17", "sigterm_in_evaluation@1"],
        # In a step that is due for an evaluation, the last one too: it is saved, and not evaluated.
        ["sigterm_in_step@20", "sigterm_in_step@20", "sigterm_in_step@20"],
    ],
)
def test_an_evaluation_is_interrupted_and_done_again(faults, uninterrupted, tmp_path):
    for number, fault in enumerate(faults, 1):
        done = faulty(fault, tmp_path)
        assert done.returncode == PREEMPTED and "stopped by " in done.stdout + done.stderr
        if "step" in fault:
            evaluated = [line["step"] for line in metrics(tmp_path, "val")]
            assert status(tmp_path)["step"] == 20 * number not in evaluated
    run(None, MINIMAL, SHORT, output_dir=tmp_path)
    assert final_weights(tmp_path) == final_weights(uninterrupted)
    for split in ("train", "val"):
        assert metrics(tmp_path, split) == metrics(uninterrupted, split)
    assert scores(tmp_path).items() >= scores(uninterrupted).items()
    assert results(tmp_path)["best_checkpoint"] == results(uninterrupted)["best_checkpoint"]


# --------------------------------------------------------------------------------- a signal arrives


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_signal_to_the_launcher(number, tmp_path):
    """Preemption, or Ctrl-C (which a terminal sends to every process)."""
    # With loader workers, because a terminal sends the signal to them too: they must continue
    # loading until the run is saved.
    script, arguments = (GPT, GPT_WITH_A_WORKER) if number == "SIGINT" else (CIFAR, ENDLESS)
    started = Started("2cpu", script, arguments, output_dir=tmp_path)
    started.wait_for("step      5/")
    workers = [psutil.Process(pid) for pid in started.workers().values()]
    if number == "SIGINT":
        os.killpg(started.process.pid, signal.SIGINT)
    else:
        # As a scheduler may: to each process, which then gets that of the launcher, too.
        for pid in [*(worker.pid for worker in workers), started.process.pid]:
            os.kill(pid, getattr(signal, number))
    _, output = started.finish()
    assert all_end(workers) and status(tmp_path)["state"] == "preempted", output
    step = status(tmp_path)["step"]
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert saved.name == f"step_{step:08d}" and (saved / "manifest.json").exists()
    assert output.count("Traceback") <= 1  # that of the launcher, not one per rank


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu", "2cpu"])
def test_time_to_save_without_a_launcher(config, tmp_path):
    """Ctrl-C ends the launcher of one process at once, SIGUSR1 any.

    The processes must still finish a slow save.
    """
    fault = "slow_save" if config == "cpu" else "slow_check"
    started = Started(config, CIFAR, ENDLESS, output_dir=tmp_path, faults=fault)
    started.wait_for("step      5/")
    workers = [psutil.Process(pid) for pid in started.workers().values()]
    if config == "cpu":
        os.killpg(started.process.pid, signal.SIGINT)
    else:
        os.kill(started.process.pid, signal.SIGUSR1)
    started.finish()
    assert all_end(workers) and status(tmp_path)["state"] == "preempted"
    assert list(tmp_path.glob("checkpoints/step_*"))


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    done = faulty("ctrl_c_twice_in_save", tmp_path, CIFAR, SMALL)
    assert done.returncode == PREEMPTED
    assert "stopped by SIGINT twice: the last checkpoint is valid" in done.stderr
    assert status(tmp_path)["state"] == "preempted"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".writing"]


# -------------------------------------------------------------------------- what a process waits for


def test_a_worker_that_sends_nothing_does_not_outlive_a_signal(tmp_path):
    options = dict(faults="silent_loader@6", env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1.5"})
    started = Started(None, GPT, GPT_WITH_A_WORKER, output_dir=tmp_path, **options)
    started.wait_for("step      3/")  # two more batches are loaded ahead
    workers = psutil.Process(started.process.pid).children(recursive=True)
    os.kill(started.process.pid, signal.SIGTERM)
    assert workers and all_end(workers, 20)
    code, output = started.finish()
    assert code == PREEMPTED and ", 1 s later still in main (train_gpt.py:" in output, output
    assert status(tmp_path)["state"] == "preempted"


def test_a_batch_that_cannot_be_sent_is_an_error_at_once(tmp_path):
    """The socket of a worker is in TMPDIR; Python would print the error, and wait forever."""
    long = tmp_path / ("x" * 60) / ("y" * 60)
    long.mkdir(parents=True)
    options = dict(output_dir=tmp_path / "run", env={"TMPDIR": str(long)}, check=False)
    done = run(None, GPT, f"{GPT_WITH_A_WORKER} --timeout 20", **options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("a data loader worker cannot send its batch: OSError: AF_UNIX") == 1
    assert done.stderr.count("error: rank 0: a data loader worker died") == 1
    assert "Traceback" not in done.stderr and "same command" not in done.stderr


@pytest.mark.slow
def test_a_stopped_process_does_not_keep_the_others_from_ending(tmp_path):
    """The others wait for it in a collective, inside C++, where no handler of Python runs."""
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
    started = Started("2cpu", CIFAR, ENDLESS, output_dir=tmp_path, env=environment)
    started.wait_for("step      3/")
    stopped = psutil.Process(started.workers()[1])
    stopped.suspend()
    os.kill(started.process.pid, signal.SIGTERM)
    code, output = started.finish()
    says = ", 2 s later still in main (train_cifar.py:"
    assert code != 0 and says in output, output
    assert status(tmp_path)["state"] == "preempted" and all_end([stopped])


# ---------------------------------------------------------------------------------------- output


def test_output_that_cannot_be_printed_costs_nothing(uninterrupted, tmp_path):
    """On a full disk, or to a pipe that nobody reads. An error is then in the status."""
    reader, nobody = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor, fault, code in ((full, "nan@99", 0), (nobody, "nan@30", 1)):
        with os.fdopen(descriptor, "w") as lost:
            folder = tmp_path / fault
            words = command(None, MINIMAL, SHORT, output_dir=folder, faults=fault)
            program = warm.Program(words[1:], dict(os.environ), lost, lost)
            assert program.wait(LIMIT) == code
    assert metrics(tmp_path / "nan@99", "val") == metrics(uninterrupted, "val")
    assert "non-finite loss at step 30" in status(tmp_path / "nan@30")["reason"]


@pytest.mark.slow
def test_a_system_may_lack_what_is_usual(uninterrupted, tmp_path):
    """Few files may be open, there is no home, nothing to print to, and a hangup is ignored: also
    where a variable of a launcher is left over.
    """
    words = command(None, MINIMAL, SHORT, output_dir=tmp_path, faults="sighup_in_step@30")
    system = "ulimit -n 64; unset HOME; ACCELERATE_MIXED_PRECISION=no exec nohup"
    line = ["sh", "-c", f"{system} {shlex.join(words)} >&- 2>&-"]
    done = subprocess.run(line, capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path, "val") == metrics(uninterrupted, "val")


# -------------------------------------------------------------------------------------- launchers


@pytest.mark.parametrize(
    ("config", "variables", "named"),
    [
        (None, {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "2"}, "WORLD_SIZE, LOCAL_RANK are"),
        (None, {"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE is set"),
        ("cpu", {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "elsewhere"}, "RANK, WORLD_SIZE"),
    ],
)
def test_variables_of_another_launch_are_named(config, variables, named, tmp_path):
    done = run(config, MINIMAL, SHORT, output_dir=tmp_path / "run", env=variables, check=False)
    assert done.returncode == (2 if config is None else 1)
    assert done.stderr.count(f"error: {named}") == 1 and "unset " in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------- the folder and the extras


def test_files_have_usual_permissions(uninterrupted, tmp_path):
    """torch and safetensors may write them for their owner only."""
    (tmp_path / "usual").touch()
    files = [tmp_path / "usual", *uninterrupted.rglob("*")]
    assert len({path.stat().st_mode for path in files if path.is_file()}) == 1


def test_plots_that_cannot_be_drawn_cost_no_result(tmp_path):
    done = faulty("no_plots", tmp_path, CIFAR, SMALL)
    assert done.stderr.count("warning: a plot") == 4 and "\x1b" not in done.stderr, done.stderr
    for name in ("results.json", "model.safetensors", "README.md"):
        assert (tmp_path / name).exists()
    assert done.returncode == 0 and not list(tmp_path.glob("*.png"))
