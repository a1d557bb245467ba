"""A run that hangs, waits or is slow says which process is to blame, and answers a person."""

import json

import pytest
from harness.launches import CIFAR, ENDLESS, GPT, SMALL, TINY_GPT, Started, run, status


def test_a_person_asks_where_the_processes_are_and_for_a_checkpoint(tmp_path):
    """Twice; the run goes on."""
    started = Started("2cpu", CIFAR, ENDLESS, output_dir=tmp_path)
    steps, stacks = [], []
    started.wait_for("step      2/")
    for _ in range(2):
        (tmp_path / "save_now").touch()
        line = started.wait_for("asked by the file save_now: checkpoint of step")
        steps.append(f"step_{int(line.split()[-1]):08d}")
        assert not (tmp_path / "save_now").exists()
        (tmp_path / "dump_stacks").touch()
        assert "rank" in started.wait_for("asked by the file dump_stacks: ")
        started.wait_for("all stacks: ")
        for rank in (0, 1):
            text = (tmp_path / "stacks" / f"rank_{rank}.txt").read_text()
            assert '"does"' in text and "in main\n" in text and text not in stacks
            stacks.append(text)
        started.wait_for("step ")
    for _ in range(5):  # it trains on, and saves no more
        started.wait_for("step ")
    started.kill_all()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert saved == steps and len(set(steps)) == 2


@pytest.mark.slow
def test_a_slow_process_is_named_in_the_log_line(tmp_path):
    """The loader of rank 1 is late, and rank 0 waits for it in each backward pass."""
    arguments = f"{TINY_GPT} --num_workers 0 --max_train_steps 8 --log_every 8 --eval_every 100"
    done = run("2cpu", GPT, arguments, output_dir=tmp_path, faults="slow_loader@0:1")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (line,) = (json.loads(line) for line in lines if '"split": "train"' in line)
    assert line["slow_rank"] == 1 and line["slowest_behind"] > 0.5
    assert f"left 0:00:00  rank 1 is {line['slowest_behind']:.0%} slower\n" in done.stdout


@pytest.mark.slow
def test_a_process_that_hangs_is_named_before_the_time_out(tmp_path):
    """One of three; they wait at most 10 seconds."""
    options = dict(launcher=("--num_processes", "3"), output_dir=tmp_path / "run", check=False)
    errors = run("2cpu", CIFAR, f"{SMALL} --timeout 10", faults="hang@5:1", **options).stderr
    line = next(line for line in errors.splitlines() if line.startswith("no progress for"))
    assert "ranks 0, 2 " in line and "rank 1 is in" in line and "after step 4" in line, line
    assert f"all stacks: {tmp_path}/run/stacks" in errors
    # The last lines, and the reports of all that lost contact, repeat it.
    last = errors[errors.index("error: rank") :].partition("multiprocessing/api.py")[0]
    assert f"\n{line}\n" in last and "run the same command again to continue" in last
    assert errors.count(f"; {line[:100]}") >= 1


@pytest.mark.slow
def test_what_one_process_does_alone_may_take_longer_than_the_time_out(tmp_path):
    """The others do not wait for it in a collective of the evaluation that follows."""
    words = f"{TINY_GPT} --max_train_steps 2 --timeout 7 --track none"
    run("2cpu", GPT, words, output_dir=tmp_path, faults="slow_export@1:0")
    assert status(tmp_path)["state"] == "finished"
