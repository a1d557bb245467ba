"""The last step of a run, and averages that are updated once per step."""

import torch
from harness.launches import metrics, results, run, status

MINIMAL, IMAGES = "scripts/train_minimal.py", "scripts/train_images.py"


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


def test_weights_are_averaged_once_per_step_however_many_micro_batches(tmp_path):
    words = (
        "--dataset synthetic --model squeezenet1_1 --image_size 32 --batch_size 8 --num_workers 0 "
        "--gradient_accumulation_steps 2 --ema_decay 0.9 --max_train_steps 3 --eval_every 3"
    )
    run("cpu", IMAGES, words, output_dir=tmp_path)
    (newest,) = (tmp_path / "checkpoints").iterdir()
    saved = torch.load(newest / "custom_checkpoint_0.pkl", weights_only=True)
    assert saved["n_averaged"] == 3
