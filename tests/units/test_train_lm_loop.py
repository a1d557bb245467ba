"""The loop of train_lm.py, in this process: dropout. (Promises show the rest.)"""

import sys

import pytest
import torch
from harness.chats import conversations, make_tokenizer, write_rows
from harness.language_models import make_config
from harness.launches import column, final_weights, load_script, results

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

STEPS = "--block_size 32 --batch_size 4 --lr 0.01 --max_train_steps 4 --log_every 1 --eval_every 2"
STEPS += " --gradient_accumulation_steps 2 --checkpoint_every 1 --wait_for_checkpoints"


@pytest.fixture
def train(tmp_path, monkeypatch):
    """`train(name, words)` trains a model with dropout; returns the folder of the run."""
    write_rows(tmp_path / "chats.jsonl", conversations(range(120)))
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)
    make_config("gpt2", vocab_size=330, **dropout).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")

    def run(name):
        words = f"--model {tmp_path / 'model'} --from_scratch --dataset {tmp_path / 'chats.jsonl'}"
        words += f" {STEPS} --output_dir {tmp_path / name}"
        monkeypatch.setattr(sys, "argv", ["train_lm.py", *words.split()])
        load_script("train_lm").main()
        return tmp_path / name

    return run


def test_a_restart_draws_the_same_dropout_masks(train, monkeypatch):
    """Which differ for each micro-batch and each step."""
    script, drawn = load_script("train_lm"), []
    compute = script.compute_loss

    def compute_loss(model, batch, per_block=False):
        if model.training:
            drawn.append(torch.rand(1).item())
            if len(drawn) == fails_at:
                raise KeyboardInterrupt
        return compute(model, batch, per_block)

    monkeypatch.setattr(script, "compute_loss", compute_loss)
    fails_at = None
    whole = train("whole")
    masks = drawn[-8:]
    assert len(set(masks)) == 8
    fails_at, drawn[:] = len(drawn) - 8 + 6, []  # in step 3
    with pytest.raises(KeyboardInterrupt):
        train("stopped")
    fails_at, drawn[:] = None, []
    stopped = train("stopped")
    assert results(stopped)["resumed_from"] == 2 and drawn[-4:] == masks[-4:]
    assert column(stopped, "loss") == column(whole, "loss")
    assert final_weights(stopped) == final_weights(whole)
    assert column(stopped, "loss", "val") == column(whole, "loss", "val")
