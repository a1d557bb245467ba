"""The last step of a run."""

from harness.launches import metrics, results, run, status

MINIMAL = "scripts/train_minimal.py"


def test_a_signal_in_the_last_step_leaves_its_evaluation_to_the_restart(tmp_path):
    length = ["--max_train_steps", "8"]
    words = ["sigterm_in_step@8", MINIMAL, *length]
    stopped = run("cpu", "tests/harness/wrapped.py", words, output_dir=tmp_path, check=False)
    assert stopped.returncode
    assert status(tmp_path)["state"] == "preempted" and not metrics(tmp_path, "val")
    run("cpu", MINIMAL, length, output_dir=tmp_path)
    assert status(tmp_path)["state"] == "finished" and results(tmp_path)["global_step"] == 8
    (line,) = metrics(tmp_path, "val")
    assert line["step"] == 8 and line["accuracy"] == results(tmp_path)["val_accuracy"]
    assert results(tmp_path)["best_checkpoint"] == "step_00000008"
