"""--track: any tracker of Accelerate gets each record once, and the name and arguments of the run."""

import json

import pytest
from harness.launches import CIFAR, SMALL, results, run

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


WANDB = """
import json, os
from types import SimpleNamespace

def note(*call):
    with open(os.environ["WANDB_CALLS"], "a") as file:
        file.write(json.dumps(call, default=str) + "\\n")

def log(values, step=None, **_):
    note("log", list(values), step)

def init(**options):
    note("init", options)
    return run


def Image(image):
    return image.shape

config = SimpleNamespace(update=lambda values, **_: note("config", values))
run = SimpleNamespace(log=log, finish=lambda: note("finish"))
"""


def calls(path, kind):
    return [call[1:] for call in map(json.loads, path.read_text().splitlines()) if call[0] == kind]


@pytest.mark.parametrize(
    "trackers", ["tensorboard", pytest.param("tensorboard,wandb", marks=pytest.mark.slow)]
)
def test_each_record_is_sent_once_across_a_restart(trackers, tmp_path):
    """A run that dies in step 6 and continues from step 3, with a fake package `wandb`."""
    (tmp_path / "wandb-0.20.dist-info").mkdir()
    known = "Metadata-Version: 2.1\nName: wandb\nVersion: 0.20\n"
    (tmp_path / "wandb-0.20.dist-info" / "METADATA").write_text(known)
    (tmp_path / "wandb.py").write_text(WANDB)
    folder, recorded, fake = tmp_path / "mine", tmp_path / "calls", "wandb" in trackers
    environment = {"PYTHONPATH": str(tmp_path), "WANDB_CALLS": str(recorded)} if fake else {}
    # Started by `exec`, because Accelerate looks for packages when it is imported.
    words = f"{SMALL} --track {trackers}"
    options = dict(output_dir=folder, env=environment, cold=fake)
    run("cpu", CIFAR, words, faults="die_in_step@6", check=False, **options)
    run("cpu", CIFAR, words, **options)
    assert results(folder)["resumed_from"] == 3
    logged = folder / "tensorboard" / "train_cifar"
    events = event_accumulator.EventAccumulator(str(logged)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 15))
    assert [event.step for event in events.Scalars("test/accuracy")] == [7, 14]
    assert {"predictions", "confusion_matrix"} <= set(events.Tags()["images"])
    if not fake:
        return
    first, second = (call[0] for call in calls(recorded, "init"))
    assert first == second and first["project"] == "train_cifar" and first["name"] == "mine"
    assert first["id"] == json.loads((folder / "args.json").read_text())["run_id"]
    assert calls(recorded, "config")[0][0]["batch_size"] == 60
    losses = [(n, step) for names, step in calls(recorded, "log") for n in names if "/loss" in n]
    evaluated = [("test/loss", 7), ("test/loss", 14)]
    assert sorted(losses) == [*evaluated, *(("train/loss", step) for step in range(1, 15))]
