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


@pytest.fixture
def wandb(tmp_path):
    """A fake `wandb` package: it writes each call as a line to the file $WANDB_CALLS."""
    (tmp_path / "wandb-0.20.dist-info").mkdir()
    known = "Metadata-Version: 2.1\nName: wandb\nVersion: 0.20\n"
    (tmp_path / "wandb-0.20.dist-info" / "METADATA").write_text(known)
    (tmp_path / "wandb.py").write_text(WANDB)
    return tmp_path


def calls(path, kind):
    return [call[1:] for call in map(json.loads, path.read_text().splitlines()) if call[0] == kind]


def run_and_restart(arguments, folder, **options):
    """Runs to step 6 and dies, continues from step 3, and checks what TensorBoard has of it."""
    run(
        "cpu",
        "tests/harness/wrapped.py",
        ["die_in_step@6", CIFAR, *arguments.split()],
        output_dir=folder,
        check=False,
        **options,
    )
    run("cpu", CIFAR, arguments, output_dir=folder, **options)
    assert results(folder)["resumed_from"] == 3
    events = event_accumulator.EventAccumulator(
        str(folder / "tensorboard" / "train_cifar")
    ).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 15))
    assert [event.step for event in events.Scalars("test/accuracy")] == [7, 14]
    assert {"predictions", "confusion_matrix"} <= set(events.Tags()["images"])


def test_tensorboard_gets_each_record_once_across_a_restart(tmp_path):
    run_and_restart(SMALL, tmp_path / "mine")


@pytest.mark.slow
def test_two_trackers_get_each_record_once_across_a_restart(wandb, tmp_path):
    recorded = tmp_path / "calls"
    environment = {"PYTHONPATH": str(wandb), "WANDB_CALLS": str(recorded)}
    # Started by `exec`, because Accelerate looks for packages when it is imported.
    run_and_restart(
        f"{SMALL} --track tensorboard,wandb", tmp_path / "mine", env=environment, cold=True
    )

    first, second = (call[0] for call in calls(recorded, "init"))
    assert first == second and first["project"] == "train_cifar" and first["name"] == "mine"
    assert first["id"] == json.loads((tmp_path / "mine" / "args.json").read_text())["run_id"]
    assert calls(recorded, "config")[0][0]["batch_size"] == 60
    logged = [
        (name, step)
        for values, step in calls(recorded, "log")
        for name in values
        if name.endswith("/loss")
    ]
    assert sorted(logged) == sorted(
        [("train/loss", step) for step in range(1, 15)] + [("test/loss", 7), ("test/loss", 14)]
    )
