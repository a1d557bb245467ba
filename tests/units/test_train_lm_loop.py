"""The loop of train_lm.py, in this process: dropout and sources. (Promises show the rest.)"""

import shlex
import sys

import pytest
import torch
from harness.chats import conversations, make_tokenizer, write_rows
from harness.language_models import make_config
from harness.launches import column, final_weights, load_script, metrics, results

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

STEPS = "--block_size 32 --batch_size 4 --lr 0.01 --max_train_steps 4 --log_every 1 --eval_every 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations, texts, and models with and without dropout."""
    folder = tmp_path_factory.mktemp("train_lm")
    write_rows(folder / "chats.jsonl", conversations(range(120)))
    texts = [{"text": f"text {n} of words " * (1 + n % 3)} for n in range(120)]
    write_rows(folder / "texts.jsonl", texts)
    for name, dropout in (("plain", 0.0), ("dropout", 0.2)):
        parts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        make_config("gpt2", vocab_size=330, **parts).save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def train(folder, tmp_path, monkeypatch):
    """`train(name, words)` runs the script; returns the folder of the run."""

    def run(name, words="", model="plain", data="chats.jsonl"):
        files = " ".join(str(folder / file) for file in data.split())
        words = f"--model {folder / model} --from_scratch --dataset {files} {STEPS} {words}"
        words = [*shlex.split(words), "--output_dir", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", ["train_lm.py", *words])
        load_script("train_lm").main()
        return tmp_path / name

    return run


def test_a_restart_draws_the_same_dropout_masks(train, monkeypatch):
    """Which differ for each micro-batch and each step."""
    script, drawn = load_script("train_lm"), []
    compute = script.compute_loss
    words = "--gradient_accumulation_steps 2 --checkpoint_every 1 --wait_for_checkpoints"

    def compute_loss(model, batch, per_block=False):
        if model.training:
            drawn.append(torch.rand(1).item())
            if len(drawn) == fails_at:
                raise KeyboardInterrupt
        return compute(model, batch, per_block)

    monkeypatch.setattr(script, "compute_loss", compute_loss)
    fails_at = None
    whole = train("whole", words, "dropout")
    masks = drawn[-8:]
    assert len(set(masks)) == 8
    fails_at, drawn[:] = len(drawn) - 8 + 6, []  # in step 3
    with pytest.raises(KeyboardInterrupt):
        train("stopped", words, "dropout")
    fails_at, drawn[:] = None, []
    stopped = train("stopped", words, "dropout")
    assert results(stopped)["resumed_from"] == 2 and drawn[-4:] == masks[-4:]
    assert column(stopped, "loss") == column(whole, "loss")
    assert final_weights(stopped) == final_weights(whole)
    assert column(stopped, "loss", "val") == column(whole, "loss", "val")


def test_a_mixture_is_evaluated_by_source(train):
    words = "--mixture 3 1 --batch_size 8 --max_train_steps 8 --eval_every 8"
    run = train("run", words, data="chats.jsonl texts.jsonl")
    line = metrics(run, "val")[-1]
    parts = [line[f"loss/{name}.jsonl"] for name in ("chats", "texts")]
    assert min(parts) < line["loss"] < max(parts)
    sample = (run / "sample.txt").read_text()
    assert sample.startswith("> user\nSay ") and "in the data: w w" in sample
