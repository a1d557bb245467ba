"""--track: any tracker of Accelerate gets each record once, and the name and arguments of the run."""

import json
import textwrap

import pytest
from harness.launches import CIFAR, SMALL, results, run

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


@pytest.fixture(scope="module")
def wandb(tmp_path_factory):
    """A fake `wandb` package: it writes each call as a line to the file $WANDB_CALLS."""
    site = tmp_path_factory.mktemp("site")
    (site / "wandb.py").write_text(
        textwrap.dedent("""
        import json, os

        def note(*call):
            with open(os.environ["WANDB_CALLS"], "a") as file:
                file.write(json.dumps(call, default=str) + "\\n")

        class config:
            update = staticmethod(lambda values, **_: note("config", values))

        class Image:
            def __init__(self, image):
                self.shape = image.shape

        class Run:
            def log(self, values, step=None, **_):
                note("log", list(values), step)

            def finish(self):
                note("finish")

        run = Run()

        def log(values, step=None, **_):
            run.log(values, step)

        def init(**options):
            note("init", options)
            return run
        """)
    )
    (site / "wandb-0.20.dist-info").mkdir()
    (site / "wandb-0.20.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: wandb\nVersion: 0.20\n"
    )
    return site


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
