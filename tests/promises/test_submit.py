"""What submit.sbatch decides, with commands of SLURM that only pretend (test_slurm.py has real ones)."""

import json
import os
import subprocess

import pytest
from harness.launches import ROOT

COMMANDS = {
    "scontrol": """case $1-$2 in
        show-hostnames) echo n1 ;;
        show-node) echo "NodeAddr=127.0.0.1 State=UP" ;;
        requeue-*) echo "requeued $3" >>"$LOG" ;;
    esac""",
    "srun": """while [[ $1 = --* ]]; do shift; done
        SLURM_NODEID=0 "$@" """,
    "accelerate": """[ "$1" = launch ] && echo "$*" >"$RUN.words" && exec bash "$RUN" """,
    "sleep": "",
}


@pytest.fixture
def submit(tmp_path):
    """Runs submit.sbatch, in which the training is a shell script; returns what it did and requeued."""
    for name, text in COMMANDS.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
    log, run = tmp_path / "log", tmp_path / "run.sh"

    def call(training, *arguments, attempt=0, **variables):
        run.write_text(training)
        log.write_text("")
        job = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1"}
        job |= {"SLURM_RESTART_COUNT": str(attempt), "LOG": str(log), "RUN": str(run), **variables}
        environment = {**os.environ, **job, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        words = ["bash", ROOT / "scripts" / "submit.sbatch", "train.py", *arguments]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        return done, log.read_text()

    return call


def training(folder, state, code, start=0, reason="", step=None):
    """What a script does that records its run in `folder`."""
    checkpoint = f"mkdir -p {folder}/checkpoints/step_{step:08d}\n" if step else ""
    status = json.dumps({"state": state, "reason": reason})
    return (
        f"mkdir -p {folder}\n{checkpoint}echo '{status}' >{folder}/status.json\n"
        f"printf '%s\\n' {folder} {start} >$RUN_FOLDER_FILE\nexit {code}\n"
    )


def test_the_resources_of_the_job_determine_the_topology(submit, tmp_path):
    gpus = dict(SLURM_NNODES="2", SLURM_GPUS_ON_NODE="2", SLURM_ARRAY_TASK_ID="7")
    text = training(tmp_path / "run", "finished", 0)
    done, _ = submit(text, "--output_dir", "check%a", **gpus)
    assert done.returncode == 0 and "on 2 node(s) x 2 process" in done.stdout
    words = (tmp_path / "run.sh.words").read_text()
    assert "4gpu.yaml --num_machines 2 --num_processes 4 --machine_rank 0" in words
    assert words.endswith("train.py --output_dir check7\n")


def test_a_preempted_run_is_requeued_wherever_it_writes(submit, tmp_path):
    done, log = submit(training(tmp_path / "its_folder", "preempted", 1), "@args.txt")
    assert done.returncode == 75 and log == "requeued 77\n", done.stdout + done.stderr
    assert "launchers' exit code 1, run preempted" in done.stdout
    assert not list(tmp_path.glob("*.folder"))


@pytest.mark.parametrize(
    ("state", "reason", "start", "step", "requeued"),
    [
        ("finished", "", 0, 9, False),
        ("failed", "the loss is not finite", 0, 9, False),
        ("failed", "lost contact with another process", 8, 9, True),
        ("failed", "lost contact with another process", 9, 9, False),  # no progress
        ("failed", "lost contact with another process", 0, None, False),
        ("running", "", 0, 10, True),
    ],
)
def test_a_lost_process_is_tried_again_only_after_progress(
    state, reason, start, step, requeued, submit, tmp_path
):
    text = training(tmp_path / "run", state, 1, start, reason, step)
    done, log = submit(text, "--output_dir", "elsewhere")
    assert bool(log) == requeued, done.stdout + done.stderr
    assert done.returncode == (75 if requeued else state != "finished")


def test_the_status_of_an_earlier_job_is_not_that_of_this_one(submit, tmp_path):
    (tmp_path / "runs" / "train").mkdir(parents=True)
    (tmp_path / "runs" / "train" / "status.json").write_text('{"state": "preempted"}')
    (tmp_path / "slurm-77.folder").write_text(f"{tmp_path}/runs/train\n0\n")  # of a killed attempt
    done, log = submit("exit 3\n")
    assert done.returncode == 3 and not log and "run left no status" in done.stdout
    done, log = submit(training(tmp_path / "run", "preempted", 1), attempt=100)
    assert done.returncode == 75 and not log  # requeued often enough
