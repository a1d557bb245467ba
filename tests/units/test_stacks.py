"""Where every process is: written if a run hangs, or if a person asks."""

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.launches import CIFAR, ENDLESS, GPT, GPT_WITH_A_WORKER, SMALL, Started, run

from utils.run import failures, process, stacks
from utils.run.stacks import Watcher, describe, main_thread, place


def state(does, step=3, seconds=9):
    return {"does": does, "step": step, "seconds_without_progress": seconds}


def test_one_line_says_which_processes_are_where():
    wait = "waits for the other processes, should_stop (guard.py:1)"
    states = {rank: state(wait, seconds=rank) for rank in (3, 0)}
    states[2] = state("is in load (data.py:7)", step=4, seconds=40)
    assert describe(states, 5) == (
        "ranks 0, 3 wait for the other processes, should_stop (guard.py:1) in step 3, 3 s without "
        "progress; rank 2 is in load (data.py:7) in step 4, 40 s without progress; "
        "ranks 1, 4 did not answer: stopped, or lost"
    )


def test_what_the_main_thread_does():
    """Seen from another thread: the innermost function that is not of a library."""
    name = "test_what_the_main_thread_does (test_stacks.py:"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main_thread).result().startswith(f"is in {name}")
        with process.waiting_for("a batch"):
            assert pool.submit(main_thread).result().startswith(f"waits for a batch, {name}")
            with process.waiting_for("the other processes"):
                pass
            assert process.waits_for() == "a batch"
        assert process.waits_for() is None


@pytest.fixture
def watchers(tmp_path, monkeypatch):
    """Two processes, of which one saw nothing for long."""
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 20.0)
    monkeypatch.setattr(failures, "_stacks", None)
    monkeypatch.setattr(place, "moved_at", stacks.time.monotonic() - 100)
    monkeypatch.setattr(place, "step", 7)
    return Watcher(tmp_path, 0, 2, 50), Watcher(tmp_path, 1, 2, 500)


def both_look(watchers):
    threads = [threading.Thread(target=watcher.look) for watcher in watchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def test_a_process_without_progress_asks_all(watchers, tmp_path, capsys):
    watchers[0]._seconds, watchers[1]._seconds = 1000, 500
    watchers[0].look()
    assert list(tmp_path.iterdir()) == []  # it has not waited for long enough
    watchers[0]._seconds = 50
    watchers[0].ask(f"no progress for {100} s")
    both_look(watchers)
    line, where = capsys.readouterr().err.splitlines()
    assert re.match("no progress for 100 s: ranks? 0.* 1 (is|are) in .* in step 7", line), line
    assert where == f"all stacks: {tmp_path}/stacks"
    assert not (tmp_path / "dump_stacks").exists()
    for rank in (0, 1):
        head, _, rest = (tmp_path / "stacks" / f"rank_{rank}.txt").read_text().partition("\n")
        assert json.loads(head)["step"] == 7 and "test_stacks.py" in rest
    assert "where every process was" in failures._lost_contact(TimeoutError("timed out"))


def test_a_stall_is_reported_once_until_there_is_progress(watchers, tmp_path):
    asked = []
    watcher = watchers[0]
    watcher.ask = asked.append
    watcher.look()
    watcher.look()
    assert len(asked) == 1 and asked[0].startswith("no progress for 10")
    place.moved(8)
    watcher.look()
    assert len(asked) == 1 and place.step == 8
    watcher._seconds = -1
    watcher.look()
    assert len(asked) == 2


def test_a_process_that_does_not_answer_is_named(watchers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.3)
    (tmp_path / "dump_stacks").touch()
    watchers[1].look()
    lines = capsys.readouterr().err
    assert lines.startswith("asked by the file dump_stacks: rank 1 is in ")
    assert "rank 0 did not answer: stopped, or lost" in lines
    assert not (tmp_path / "dump_stacks").exists()
    watchers[1].look()  # nothing to do
    assert capsys.readouterr().err == ""


def test_folders_are_listed_before_files_are_looked_for(watchers, tmp_path, monkeypatch):
    """Else NFS may say for a minute that a file which another machine made is not there."""
    listed = []
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder))
    watchers[1].look()
    assert listed == [tmp_path]
    (tmp_path / "dump_stacks").touch()
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.05)  # it looks once
    watchers[1].look()
    assert listed == [tmp_path] * 2 + [tmp_path / "stacks"]


def test_a_folder_that_is_gone_ends_nothing(tmp_path):
    watcher = Watcher(tmp_path / "gone", 0, 1, 0)
    watcher.look()
    watcher.ask("again")


@pytest.mark.parametrize("way", ["file", "signal"])
def test_a_person_asks(way, tmp_path):
    """With a file, or with SIGQUIT to one of the processes; the run goes on."""
    started = Started("2cpu", CIFAR, ENDLESS, output_dir=tmp_path / "run")
    started.wait_for("step      2/")
    if way == "file":
        (tmp_path / "run" / "dump_stacks").touch()
    else:
        os.kill(started.workers()[1], signal.SIGQUIT)
    asked = {"file": "asked by the file dump_stacks", "signal": "SIGQUIT"}[way]
    assert "rank" in started.wait_for(f"{asked}: ")
    started.wait_for("all stacks: ")
    started.wait_for("step ")
    started.kill_all()
    for rank in (0, 1):
        text = (tmp_path / "run" / "stacks" / f"rank_{rank}.txt").read_text()
        assert '"does"' in text and "in main\n" in text


def test_save_now_saves_once_and_the_run_goes_on(tmp_path):
    started = Started("2cpu", CIFAR, ENDLESS, output_dir=tmp_path / "run")
    started.wait_for("step      2/")
    (tmp_path / "run" / "save_now").touch()
    step = int(started.wait_for("asked by the file save_now: checkpoint of step").split()[-1])
    assert not (tmp_path / "run" / "save_now").exists()
    for _ in range(5):  # the message came some steps after its checkpoint
        started.wait_for("step ")
    started.kill_all()
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    assert saved == [f"step_{step:08d}"]


def three(fault, tmp_path, arguments=SMALL, script=CIFAR):
    """The output of three processes of which one has a fault; they wait at most 14 seconds."""
    words = [fault, script, *arguments.split(), "--timeout", "14"]
    launcher = ("--num_processes", "3")
    options = dict(launcher=launcher, output_dir=tmp_path / "run", check=False)
    return run("2cpu", "tests/harness/wrapped.py", words, **options).stderr


@pytest.mark.slow
def test_a_process_that_hangs_is_named_before_the_time_out(tmp_path):
    errors = three("hang@5:1", tmp_path)
    line = next(line for line in errors.splitlines() if line.startswith("no progress for"))
    assert "ranks 0, 2 " in line and "rank 1 is in" in line and "in step 5" in line, line
    assert f"(where every process was: {tmp_path}/run/stacks)" in errors


@pytest.mark.slow
def test_a_stopped_process_is_named(tmp_path):
    errors = three("stop@5:1", tmp_path)
    line = next(line for line in errors.splitlines() if line.startswith("no progress for"))
    assert "ranks 0, 2 " in line and "rank 1 did not answer: stopped, or lost" in line, line


@pytest.mark.slow
def test_a_stalled_loader_is_named(tmp_path):
    arguments = f"{GPT_WITH_A_WORKER} --num_workers 0 --batch_size 6"
    errors = three("silent_loader@5:1", tmp_path, arguments, GPT)
    line = next(line for line in errors.splitlines() if line.startswith("no progress for"))
    assert "rank 1 waits for a batch" in line and "ranks 0, 2 " in line, line
