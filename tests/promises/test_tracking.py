"""--track: TensorBoard gets each record once. What the other trackers get has units."""

import pytest
from harness.launches import CIFAR, SMALL, results, run

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_each_record_is_sent_once_across_a_restart(tmp_path):
    """A run that dies in step 6 and continues from step 3."""
    words, options = f"{SMALL} --track tensorboard", dict(output_dir=tmp_path)
    run("cpu", CIFAR, words, faults="die_in_step@6", check=False, **options)
    run("cpu", CIFAR, words, **options)
    assert results(tmp_path)["resumed_from"] == 3
    logged = tmp_path / "tensorboard" / "train_cifar"
    events = event_accumulator.EventAccumulator(str(logged)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 15))
    assert [event.step for event in events.Scalars("test/accuracy")] == [7, 14]
    assert {"predictions", "confusion_matrix"} <= set(events.Tags()["images"])
