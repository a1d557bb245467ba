"""Which folders a run may continue, and which it may not: in one line."""

import json
import os
import sys

import pytest
from harness import fakes

from utils.run import opening, process
from utils.run.failures import UserError
from utils.run.opening import Identity, check_same, find
from utils.run.plan import Plan

OWN = {"lr": 0.1, "model": "net"}


@pytest.fixture(autouse=True)
def script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["elsewhere/train_a.py"])
    yield
    process.record_with(None)


def run_in(folder, arguments=OWN, command="scripts/train_a.py", **more):
    folder.mkdir(exist_ok=True)
    record = {"arguments": arguments, "data": {"data": "cifar"}, "command": [command, "--lr", "1"]}
    (folder / "args.json").write_text(json.dumps(record | more))


def identity(arguments=OWN, may_change=(), resume="auto", data="cifar"):
    return Identity(arguments, {"data": data}, set(may_change), resume)


def look(folder, *who, **identified):
    """Where a run starts from."""
    return find(fakes.accelerator(), folder, identity(*who, **identified), Plan(10, 5))


def refused(folder, match, *who, **identified):
    with pytest.raises(UserError, match=match):
        look(folder, *who, **identified)


@pytest.mark.parametrize("flag", ["dry_run", "overfit_batch"])
def test_only_a_quick_check_empties_the_folder_that_one_left(flag, tmp_path, monkeypatch):
    """args.json last: if it is killed, the folder still says whose it is."""
    run_in(tmp_path, {flag: True})
    (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)
    for name in (".lock", "a.png", "z.txt", "checkpoints/step_1/a"):
        (tmp_path / name).touch()
    refused(tmp_path, f"--{flag} False", {flag: False})
    assert (tmp_path / "a.png").exists()
    kind, removed = type(tmp_path), []
    unlink = kind.unlink
    monkeypatch.setattr(kind, "unlink", lambda path: removed.append(path.name) or unlink(path))
    assert look(tmp_path, {flag: True}).run_id is None
    assert removed[-1] == "args.json" and os.listdir(tmp_path) == [".lock"]  # which is held
    run_in(tmp_path, {flag: False})
    refused(tmp_path, f"--{flag} True", {flag: True})


def test_a_run_is_continued_with_its_own_arguments_only(tmp_path):
    run_in(tmp_path, run_id="its id")
    other = OWN | {"lr": 1, "model": "gpt"}
    for who in ((OWN,), (other, {"lr", "model"})):
        assert look(tmp_path, *who).run_id == "its id"
    refused(tmp_path, f"^{tmp_path} already contains a run: with --resume never", resume="never")
    both = r"--lr 1 \(was 0.1\), --model gpt \(was net\), data x \(was cifar\)\. Use another"
    says = f"^{tmp_path} belongs to a run with other arguments: {both}"
    refused(tmp_path, says, other, data="x")
    refused(tmp_path, r": data x \(was cifar\)\. Use .*, or the earlier values\. To", data="x")
    # The checksum of the data says that they are the same at another path; without one, paths count.
    here, there = {**OWN, "dataset": "/a/photos"}, {**OWN, "dataset": "/b/pictures"}
    run_in(tmp_path, here)
    look(tmp_path, there)
    refused(tmp_path, "data imagenet .was cifar", there, data="imagenet")
    with pytest.raises(UserError, match=r"--dataset /b/pictures .was /a/photos"):
        check_same({"arguments": here, "data": {}}, Identity(there, {}, set(), "auto"), tmp_path)


def test_a_fork_may_be_trained_in_another_way_but_is_of_the_same_model_and_data(
    tmp_path, monkeypatch
):
    """Another seed may hold out other samples."""
    place, folder, own = tmp_path / "step_00000003", tmp_path / "run", OWN | {"seed": 0}
    contents = {"arguments": own, "data": {"data": "cifar"}, "progress": {"step": 3}}
    monkeypatch.setattr(opening.checkpoint, "find", lambda *_: (place, contents))
    start = look(folder, own | {"lr": 1, "seed": 1}, resume=str(place))
    assert start.changes == ["--lr 1 (was 0.1)", "--seed 1 (was 0)"] and start.checkpoint == place
    with pytest.raises(UserError, match="ask for 2 steps, but the run has taken 3 already"):
        find(fakes.accelerator(), folder, identity(own), Plan(2, 5))
    refused(folder, "other arguments", own | {"lr": 1})  # not of its own checkpoint
    refused(folder, "other arguments", own | {"model": "gpt"}, resume=str(place))
    for seed, named in ((0, False), (1, True)):
        with pytest.raises(UserError, match="other arguments") as error:
            look(folder, OWN | {"seed": seed}, data="x", resume=str(place))
        assert ("--seed, which may choose what is held out" in str(error.value)) == named
    contents["data"] = {}  # nothing says that it is the same
    with pytest.raises(UserError, match=r"other arguments: .*--seed 1"):
        unknown = Identity(OWN | {"seed": 1}, {}, set(), str(place))
        find(fakes.accelerator(), folder, unknown, Plan(10, 5))
