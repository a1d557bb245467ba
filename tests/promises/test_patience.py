"""Patience: a run ends after so many evaluations without a better score."""

from harness.launches import CIFAR, as_if_killed, metrics, results, run, status

WORSE = (  # a learning rate with which the score soon gets worse
    "--dataset synthetic --model net --batch_size 100 --val_fraction 0.1 --lr 0.3 --max_train_steps 40 "
    "--log_every 1 --eval_every 2 --checkpoint_every 1 --keep_checkpoints 99 --lr_schedule constant "
    "--track none"
)


def test_a_run_ends_at_the_same_step_after_a_kill_and_goes_on_with_more_patience(tmp_path):
    folder, killed = tmp_path / "run", tmp_path / "killed"
    done = run("2cpu", CIFAR, f"{WORSE} --patience 2", output_dir=folder)
    assert "finished: no better score for 2 evaluations" in done.stdout
    state, step = status(folder), results(folder)["global_step"]
    assert (state["state"], state["step"]) == ("finished", step)
    assert state["reason"] == "no better score for 2 evaluations"
    scores = [line["score"] for line in metrics(folder, "val")]
    best = max(range(len(scores)), key=lambda i: (scores[i], i))
    # It ends with the second that is not better.
    assert len(scores) == best + 3 == step // 2 and step < 40 and step % 2 == 0
    assert results(folder)["best_checkpoint"] == f"step_{2 * (best + 1):08d}"
    as_if_killed(folder, killed, step - 1)
    run("2cpu", CIFAR, f"{WORSE} --patience 2", output_dir=killed)
    assert (results(killed)["resumed_from"], results(killed)["global_step"]) == (step - 1, step)
    assert status(killed)["reason"] == state["reason"]
    done = run(None, CIFAR, f"{WORSE} --patience 1", output_dir=folder)
    assert "has already finished" in done.stdout and "or a larger --patience" in done.stdout
    run(None, CIFAR, f"{WORSE} --patience 3", output_dir=folder)
    assert results(folder)["resumed_from"] == step < results(folder)["global_step"]
