"""What GPUs would refuse, on a machine without any: see `gpu_rules.py`."""

import json

import pytest
from harness.gpu_rules import FORBIDDEN
from harness.launches import run, some_slow

# With a log line, an evaluation and a save after the last step only.
STEPS = "--max_train_steps 8 --eval_every 8 --checkpoint_every 8 --log_every 8"
SCRIPTS = {
    "train_minimal": STEPS,
    "train_cifar": f"--dataset synthetic --batch_size 20 --max_grad_norm 1 {STEPS}",
    "train_images": "--dataset synthetic --model shufflenet_v2_x0_5 --image_size 32 --batch_size 8 "
    f"--lr 1e-3 --num_workers 0 {STEPS}",
    "train_gpt": "--dataset synthetic --n_layer 1 --n_head 2 --n_embd 16 --block_size 16 "
    f"--batch_size 8 --sample_length 2 --max_grad_norm 1 {STEPS}",
    "train_lm": f"--dataset synthetic --batch_size 8 --block_size 64 --max_grad_norm 1 {STEPS}",
}


@pytest.mark.parametrize("script", some_slow(SCRIPTS, "train_cifar", "train_images", "train_lm"))
def test_two_processes_send_only_what_nccl_takes_and_no_step_waits(script, tmp_path):
    """From tensors on the CPU it could not: averages, statistics, ids, losses, all of a step."""
    if script == "train_lm":
        pytest.importorskip("peft")
    options = dict(output_dir=tmp_path / "run", faults=f"gpu_rules@0:{tmp_path}/seen.json")
    run("2cpu", f"scripts/{script}.py", SCRIPTS[script], **options)
    collectives, operations, strict, waits = json.loads((tmp_path / "seen.json").read_text())
    # So the rules were in force: gradients, log lines, evaluations.
    assert collectives >= 5
    assert {"c10d::allreduce_", "aten::_log_softmax_backward_data"} <= set(operations)
    assert "c10d::allgather_" in operations or script == "train_lm"
    # And no step does what GPUs cannot do twice in the same way.
    assert not set(operations) & FORBIDDEN
    assert strict or not any("attention" in name for name in operations)
    assert strict == (script in ("train_gpt", "train_images", "train_lm"))
    # The loop with its loader, the guard, and all that Accelerate does. (The first two wait on a CPU
    # only, and the loss of a language model once, to learn how many tokens are targets.)
    known = ("images/transforms.py", "document_attention.py", "lm_loss.py")
    waits = [where for _, where in waits if not where.partition(":")[0].endswith(known)]
    assert waits == [], waits
