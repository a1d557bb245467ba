"""Which folders `utils.run.claim` gives to a run, and what it leaves in those that it does not."""

import json
import os
import socket
import sys
from types import SimpleNamespace

import pytest

from utils.run import claim as module
from utils.run.claim import check_same, check_shared, claim
from utils.run.failures import UserError

OWN = {"lr": 0.1, "model": "net"}


def run_in(folder, arguments=OWN, command="scripts/train_a.py"):
    folder.mkdir(exist_ok=True)
    record = {"arguments": arguments, "command": [command, "--lr", "0.1"]}
    (folder / "args.json").write_text(json.dumps(record))
    return record


def refused(folder, match, arguments=OWN, resume="auto", may_change=()):
    with pytest.raises(UserError, match=match):
        claim(folder, arguments, resume, set(may_change))


def test_a_claim_that_is_undone_leaves_no_folder(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file),
    )
    path = tmp_path / "a" / "b" / "c"
    claimed = claim(path, OWN, "auto", set())
    assert claimed.earlier is None and claimed.file.name == str(path / ".lock")
    assert claimed.owner == f"process {os.getpid()} on {socket.gethostname()}"
    assert (path / ".lock").read_text() == claimed.owner and os.listdir(path) == [".lock"]
    assert claimed.made == [path, tmp_path / "a" / "b", tmp_path / "a"]
    # A power cut would lose folders whose names are not on disk.
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)
    claimed.undo()
    assert os.listdir(tmp_path) == []
    claimed.undo()  # the folder is gone
    there = claim(tmp_path, OWN, "auto", set())
    there.undo()
    assert there.made == [] and tmp_path.exists() and os.listdir(tmp_path) == []


@pytest.mark.parametrize("other", ["args.json", "a file of another process"])
def test_a_claim_is_undone_only_where_nothing_was_written(other, tmp_path):
    claimed = claim(tmp_path / "run", OWN, "auto", set())
    (tmp_path / "run" / other).write_text("x")
    claimed.undo()
    assert (tmp_path / "run" / ".lock").exists() == (other == "args.json")
    assert (tmp_path / "run" / other).exists()


LEFT_BY_A_START = (".lock", ".args.json.7.writing", "checkpoints", "status.json", ".status.json.12")


def test_a_folder_that_is_not_empty_is_no_place_for_a_run(tmp_path):
    for name in (*LEFT_BY_A_START, ".DS_Store"):  # the last one by the Finder of macOS
        (tmp_path / name).write_text("{}")
    assert claim(tmp_path, OWN, "auto", set()).earlier is None
    (tmp_path / "metrics.jsonl").write_text("")
    refused(tmp_path, "is not empty and does not contain a run of these")
    assert (tmp_path / "metrics.jsonl").exists() and not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("content", ['{"lr": 1}', "[1]", '"text"', '{"arguments": {}}'])
def test_the_args_json_of_another_program_is_one_line(content, tmp_path):
    (tmp_path / "args.json").write_text(content)
    refused(tmp_path, r"has an args.json of another program: use another")


@pytest.mark.parametrize("flag", ["dry_run", "overfit_batch"])
def test_only_a_quick_check_empties_the_folder_that_one_left(flag, tmp_path, monkeypatch):
    """args.json last: if it is killed, the folder still says whose it is."""
    run_in(tmp_path, {flag: True})
    (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)
    for name in ("a.png", "z.txt", "checkpoints/step_1/a"):
        (tmp_path / name).touch()
    refused(tmp_path, f"--{flag} False", {flag: False})
    assert (tmp_path / "a.png").exists() and (tmp_path / "args.json").exists()
    removed, unlink = [], type(tmp_path).unlink
    monkeypatch.setattr(
        type(tmp_path),
        "unlink",
        lambda self, **more: removed.append(self.name) or unlink(self, **more),
    )
    assert claim(tmp_path, {flag: True}, "auto", set()).earlier is None
    assert os.listdir(tmp_path) == [".lock"]
    assert [name for name in removed if name not in (".probe", ".lock")][-1] == "args.json"
    run_in(tmp_path, {flag: False})
    refused(tmp_path, f"--{flag} True", {flag: True})


def test_a_name_that_is_no_folder_is_refused_before_anything_is_made(tmp_path):
    refused(tmp_path / "caf\udce9", "is not valid UTF-8, and weights cannot be written to it")
    assert os.listdir(tmp_path) == []
    (tmp_path / "run").touch()
    refused(tmp_path / "run", r"cannot write to --output_dir .*/run: it is a file")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError("odd")])
def test_a_folder_on_a_full_disk_is_refused(error, tmp_path, monkeypatch):
    """By writing a file that is not empty: on a full disk an empty one can still be made."""
    tried = []

    def write_bytes(path, data):
        tried.append((path, len(data)))
        path.touch()  # a part of it fits
        raise error

    monkeypatch.setattr(type(tmp_path), "write_bytes", write_bytes)
    reason = error.strerror or "odd"
    refused(tmp_path / "run", f"^cannot write to --output_dir {tmp_path / 'run'}: {reason}$")
    assert tried == [(tmp_path / "run" / ".probe", 65536)] and not (tmp_path / "run").exists()


def test_the_processes_of_a_killed_job_are_waited_for(tmp_path, monkeypatch):
    seen = []

    def lock(path, owner, patience):
        seen.append((path, patience))
        return path.open("w")

    monkeypatch.setattr(module, "lock", lock)
    claim(tmp_path, OWN, "auto", set())
    assert seen == [(tmp_path / ".lock", 2 * module.process.ORPHAN_SECONDS)]


def test_a_run_is_continued_with_its_own_arguments_only(tmp_path, monkeypatch):
    earlier = run_in(tmp_path)
    monkeypatch.setattr(sys, "argv", ["elsewhere/train_a.py"])
    assert claim(tmp_path, OWN, "auto", set()).earlier == earlier
    other = OWN | {"lr": 1, "model": "gpt"}
    assert claim(tmp_path, other, "auto", {"lr", "model"}).earlier == earlier
    refused(tmp_path, f"^{tmp_path} already contains a run: with --resume never", resume="never")
    both = r"--lr 1 \(was 0.1\), --model gpt \(was net\). To continue a run,"
    refused(tmp_path, f"^{tmp_path} belongs to a run with other arguments: {both}", other)


def test_a_run_of_another_script_is_named(tmp_path, monkeypatch):
    """Unless it has the same arguments, as a copy or a renamed script has."""
    earlier = run_in(tmp_path, command="scripts/train_b.py")
    monkeypatch.setattr(sys, "argv", ["scripts/train_a.py", "--x"])
    assert claim(tmp_path, OWN, "auto", set()).earlier == earlier
    says = f"^{tmp_path} holds a run of train_b.py, not train_a.py: use another --output_dir$"
    refused(tmp_path, says, OWN | {"padding": 4}, may_change=["padding"])
    monkeypatch.setattr(sys, "argv", ["scripts/train_b.py"])
    assert claim(tmp_path, OWN | {"padding": 4}, "auto", {"padding"}).earlier == earlier


def test_weights_are_offered_only_to_the_same_model(tmp_path):
    check_same(OWN, OWN, tmp_path, ())
    flag = {"init_from": None}  # which a script may lack
    cases = [(OWN | flag | {"lr": 1}, True), (flag | {"lr": 1, "model": "gpt"}, False)]
    for now, offered in [*cases, (OWN | {"lr": 1}, False)]:
        with pytest.raises(UserError) as error:
            check_same(OWN, now, "runs/a", ())
        ending = "another --output_dir" + " (from these weights: --init_from runs/a)" * offered
        assert str(error.value).endswith(ending)


def test_the_lock_of_the_main_process_may_take_a_while_to_show(tmp_path, monkeypatch):
    """A network file system shows a new file to other machines after seconds."""
    owner, seconds = "process 7 on a", []
    stages = [
        lambda: (tmp_path / "run").mkdir(),
        lambda: (tmp_path / "run" / ".lock").write_text("process 6"),
        lambda: (tmp_path / "run" / ".lock").write_text(owner),
    ]

    def sleep(delay):
        seconds.append(delay)
        if stages:
            stages.pop(0)()

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    check_shared(tmp_path / "run", owner)
    assert seconds == [0.5] * 3 and not stages
    with pytest.raises(UserError, match=f"different folder on {socket.gethostname()} than for me"):
        check_shared(tmp_path / "run", "me")
    assert len(seconds) == 3 + module.SHARED_CHECKS
