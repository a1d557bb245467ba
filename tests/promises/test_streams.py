"""A stream of documents of train_lm.py, which is read during training."""

import pytest
from harness.chats import conversations, write_rows
from harness.launches import run_as_if_killed

pytest.importorskip("transformers")

SCRIPT = "scripts/train_lm.py"
SMALL = (
    "--block_size 64 --batch_size 8 --max_train_steps 8 --log_every 1 --eval_every 4 "
    "--checkpoint_every 4 --track none --streaming"
)


def test_a_stream_killed_on_two_processes_continues_exactly(tmp_path):
    """From the positions of both, with accumulation."""
    (tmp_path / "data").mkdir()
    for split, numbers in (("train", range(200)), ("val", range(200, 220))):
        write_rows(tmp_path / "data" / f"{split}.jsonl", conversations(numbers))
    run_as_if_killed("2cpu", SCRIPT, f"--dataset {tmp_path / 'data'} {SMALL}", tmp_path)
