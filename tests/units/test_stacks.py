"""Where every process is: written if a run hangs, or if a person asks. (promises/test_hangs.py
starts commands.)
"""

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from utils.scale.stacks import Watcher, describe, main_thread, place

from utils.run import process
from utils.scale import stacks


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
def watch(tmp_path, monkeypatch):
    """`watch(rank, seconds)`: a Watcher of one of two processes, which saw nothing for 100 s."""
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 20.0)
    monkeypatch.setattr(place, "moved_at", stacks.time.monotonic() - 100)
    monkeypatch.setattr(place, "step", 7)
    monkeypatch.setattr(place, "save_asked", False)
    return lambda rank, seconds: Watcher(tmp_path, rank, 2, seconds)


def test_a_process_without_progress_asks_all(watch, tmp_path, capsys):
    watch(0, 1000).look()
    assert list(tmp_path.iterdir()) == []  # it has not waited for long enough
    threads = [threading.Thread(target=watch(rank, 50 + 450 * rank).look) for rank in (0, 1)]
    threads[0].start()
    while not (tmp_path / "dump_stacks").exists():
        threads[0].join(0.01)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    line, where = capsys.readouterr().err.splitlines()
    assert re.match(r"no progress for 10\d s: ranks? 0.* 1 (is|are) in .* in step 7", line), line
    assert where == f"all stacks: {tmp_path}/stacks"
    assert not (tmp_path / "dump_stacks").exists()
    for rank in (0, 1):
        head, _, rest = (tmp_path / "stacks" / f"rank_{rank}.txt").read_text().partition("\n")
        wrote = json.loads(head)
        assert wrote["step"] == 7 and wrote["seconds_without_progress"] in range(100, 110)
        assert "test_stacks.py" in rest


def test_a_stall_is_reported_once_until_there_is_progress(watch):
    asked, watcher, eager = [], watch(0, 50), watch(0, -1)
    watcher.ask = eager.ask = asked.append
    watcher.look()
    watcher.look()
    assert len(asked) == 1 and asked[0].startswith("no progress for 10")
    place.moved(8)
    watcher.look()
    assert len(asked) == 1 and place.step == 8
    for _ in range(2):
        place.moved()
        eager.look()
    assert len(asked) == 3 and place.step == 8


def test_a_process_that_does_not_answer_is_named(watch, tmp_path, monkeypatch, capsys):
    """Folders are listed before files are looked for: else NFS may say for a minute that a file
    which another machine made is not there.
    """
    listed = []
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder))
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.05)
    (tmp_path / "dump_stacks").touch()
    watcher = watch(1, 500)
    watcher.look()
    assert listed == [tmp_path, tmp_path / "stacks"]
    said = capsys.readouterr().err
    assert said.startswith("asked by the file dump_stacks: rank 1 is in ")
    assert "rank 0 did not answer: stopped, or lost" in said
    assert not (tmp_path / "dump_stacks").exists()
    watcher.look()  # nothing to do
    assert capsys.readouterr().err == "" and listed[2:] == [tmp_path]


def test_who_asks_for_a_checkpoint_asks_once(watch, tmp_path):
    watchers = watch(0, 500), watch(1, 500)
    assert stacks.answer_save(tmp_path) is False
    (tmp_path / "save_now").touch()
    seen = []
    for watcher in (watchers[1], watchers[0], watchers[0]):
        watcher.look()
        seen.append(place.save_asked)
        place.save_asked = False
    assert seen == [False, True, False]  # the first process does for all
    assert stacks.answer_save(tmp_path) is True and not (tmp_path / "save_now").exists()


def test_a_folder_that_is_gone_ends_nothing(tmp_path):
    watcher = Watcher(tmp_path / "gone", 0, 1, 0)
    watcher.look()
    watcher.ask("again")
