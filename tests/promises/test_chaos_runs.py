"""chaos.py with a command that does next to nothing: it kills, compares and cleans up."""

import json
import os
import signal
import sys

import psutil
import pytest
from harness.launches import Started, all_end, run

CHAOS = "scripts/tools/chaos.py"
# Behaves as plan.json says for the folder of a run: it fails, waits, or ends with other weights.
COMMAND = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
here = pathlib.Path(__file__).parent
plan = json.loads((here / "plan.json").read_text())
if plan.get("fails") == folder.name:
    sys.exit(3)
folder.mkdir(parents=True, exist_ok=True)
line = {"split": "train", "loss": plan.get("logs") == folder.name, "step_seconds": time.time()}
(folder / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
if plan.get("waits") == folder.name:
    (here / "pid").write_text(str(os.getpid()))
    time.sleep(1000)
time.sleep(0.3)
(folder / "model.safetensors").write_text(str(plan.get("differs") == folder.name))
(folder / "results.json").write_text(json.dumps({"resumed_from": plan["from"]}))
"""


def words(folder, **plan):
    """The arguments of chaos.py, given the plan of its command."""
    (folder / "command.py").write_text(COMMAND)
    (folder / "plan.json").write_text(json.dumps({"from": 5} | plan))
    command = ["--", sys.executable, "-S", str(folder / "command.py")]
    return ["--kills", "3", "--folder", str(folder / "chaos"), *command]


def test_kills_until_each_run_ended_as_the_uninterrupted_one(tmp_path):
    done = run(None, CHAOS, words(tmp_path))
    rounds = done.stdout.count("identical")
    last = done.stdout.splitlines()[-1]
    assert "killed 3 times (" in last and last.endswith(f"continued from a checkpoint: {rounds}")
    assert not (tmp_path / "chaos" / "round_1").exists()


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"fails": "round_1"}, "round_1: a relaunch failed without being killed"),
        ({"differs": "round_1"}, "kills so far: model.safetensors differs"),
        ({"logs": "round_1"}, "kills so far: metrics.jsonl differs"),
        ({"from": 0}, "3 kills, and no run continued from a checkpoint: give"),
    ],
)
def test_says_what_failed(plan, says, tmp_path):
    done = run(None, CHAOS, words(tmp_path, **plan), check=False)
    assert done.returncode == 1 and says in done.stdout + done.stderr
    assert (tmp_path / "chaos" / "chaos.log").exists()


def test_what_chaos_launches_ends_with_it(tmp_path):
    os.mkfifo(tmp_path / "pid")
    started = Started(None, CHAOS, words(tmp_path, waits="reference"))
    launched = psutil.Process(int((tmp_path / "pid").read_text()))
    os.kill(started.process.pid, signal.SIGTERM)
    code, _ = started.finish()
    assert code != 0 and all_end([launched])
