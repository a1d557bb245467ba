"""train_lm.py: the same losses on every topology, exact resume, LoRA, and what others can load."""

import json
import math
import os
import re
import shutil
import sys
from hashlib import sha256

import pytest
import torch
from harness.chats import MARKED, conversations, make_tokenizer, write_rows
from harness.language_models import make_config
from harness.launches import Started, column, final_weights, metrics, results, run, run_once, status
from safetensors import safe_open
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LM, EVALUATE = "scripts/train_lm.py", "scripts/evaluate.py"
PROBE = "tests/harness/probe_shards.py"
MODEL = "--block_size 128 --batch_size 8"
SMALL = f"{MODEL} --max_train_steps 12 --log_every 1 --eval_every 6 --checkpoint_every 4 --eval_samples 3"
LORA = f"{SMALL} --lora_rank 4"


@pytest.fixture(scope="session")
def chats(made_once):
    """Conversations of very different length. Of those that are held out, none has to be cut."""

    def make(folder):
        held_out = (number for number in range(200, 229) if number % 7)
        for split, numbers in (("train", range(200)), ("val", held_out)):
            write_rows(folder / f"{split}.jsonl", conversations(numbers))
        return folder

    return made_once("chats", make)


@pytest.fixture(scope="session")
def lm(chats, made_once):
    """The uninterrupted run of SMALL: its output, and its folder as `.folder`."""
    return run_once(made_once, "lm", "cpu", LM, f"--dataset {chats} {SMALL}")


def run_killed(config, arguments, folder, **options):
    """Runs the script, kills all its processes after step 8, and continues."""
    started = Started(config, LM, arguments, output_dir=folder, **options)
    started.wait_for("step  9/12")
    started.kill_all()
    done = run(config, LM, arguments, output_dir=folder, **options)
    assert "continuing from" in done.stdout and results(folder)["resumed_from"] > 0


def load(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


def test_leaves_a_model_that_transformers_loads(lm):
    done, folder = lm, lm.folder
    model, result, lines = load(folder / "model"), results(folder), metrics(folder, "val")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.chat_template and tokenizer.eos_token_id is not None
    for name in ("args.json", "metrics.jsonl", "sample.txt", "curves.png", "tensorboard"):
        assert (folder / name).exists(), name
    assert status(folder)["state"] == "finished"
    assert lines[-1]["loss"] < lines[0]["loss"] and [line["step"] for line in lines] == [0, 6, 12]
    assert result["val_perplexity"] == pytest.approx(math.exp(result["val_loss"]))
    assert result["parameters"] == sum(weight.numel() for weight in model.parameters())
    # Evaluations take the same blocks, the last one all.
    assert "evaluations: 3 of " in done.stdout and len({line["tokens"] for line in lines}) == 1
    assert result["val_tokens"] > lines[0]["tokens"] and result["val_loss"] != lines[-1]["loss"]
    assert result["evaluated_samples"] == result["held_out_samples"] > 3
    card = (folder / "README.md").read_text()
    assert "library_name: transformers" in card and "pipeline_tag: text-generation" in card
    assert "of them trained" in done.stdout and "target" in done.stdout
    said = run(None, LM, f"--generate {folder} --prompt Hello").stdout
    assert said.strip() or said == "\n"


def test_samples_belong_to_their_evaluation_which_a_restart_repeats(lm, chats, tmp_path):
    words = f"--dataset {chats} {SMALL}"
    fault = f"die_before_sample@3 {LM} {words}"  # after the last step, which is saved
    run("cpu", "tests/harness/wrapped.py", fault, output_dir=tmp_path, check=False)
    run("cpu", LM, words, output_dir=tmp_path)
    assert results(tmp_path)["resumed_from"] == 12
    for split in ("sample", "val"):
        steps = [line["step"] for line in metrics(tmp_path, split)]
        assert steps == [line["step"] for line in metrics(lm.folder, split)] == [0, 6, 12]
    assert column(tmp_path, "text", "sample") == column(lm.folder, "text", "sample")


def test_the_validation_loss_is_that_of_each_conversation_alone(lm, chats):
    """Computed again by transformers, from what the run exported, by marks in its template."""
    folder = lm.folder
    model = load(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    total = count = 0
    for line in (chats / "val.jsonl").read_text().splitlines():
        options = dict(return_assistant_tokens_mask=True, return_dict=True, return_tensors="pt")
        options["chat_template"] = MARKED
        told = tokenizer.apply_chat_template(json.loads(line)["messages"], **options)
        chosen = told["assistant_masks"][0, 1:].bool()
        with torch.no_grad():
            logits = model(input_ids=told["input_ids"]).logits[0, :-1].double()
        losses = F.cross_entropy(logits, told["input_ids"][0, 1:], reduction="none")
        total, count = total + losses[chosen].sum().item(), count + chosen.sum().item()
    assert results(folder)["val_tokens"] == count
    assert results(folder)["val_loss"] == pytest.approx(total / count, rel=1e-5)


def test_evaluate_scores_other_data(lm, tmp_path):
    """All of its 300 bytes, and the end; the first is not predicted."""
    (tmp_path / "a.txt").write_text("ab" * 150)
    words = f"{lm.folder} --dataset {tmp_path}/a.txt"
    run(None, EVALUATE, words, output_dir=tmp_path / "scores")
    found = results(tmp_path / "scores")
    expected = found["all_loss"] * 300 / 299 / math.log(2)
    assert found["all_tokens"] == 300
    assert found["all_bits_per_byte"] == pytest.approx(expected)


def test_lora_saves_the_adapter_only_and_refuses_another_base(lm, chats, tmp_path, monkeypatch):
    base, folder = shutil.copytree(lm.folder / "model", tmp_path / "base"), tmp_path / "run"
    words = f"--model {os.path.relpath(base)} --dataset {chats} {LORA}"
    run(None, LM, f"{words} --max_train_steps 4 --lr 0.01", output_dir=folder)
    with safe_open(folder / "checkpoints" / "step_00000004" / "model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118 (not a dict)
    run(None, LM, f"--merge {folder}")
    adapted = peft.PeftModel.from_pretrained(load(base), folder / "adapter").eval()
    ids, plain = torch.arange(1, 20)[None], load(base)
    with torch.no_grad():
        merged = load(folder / "model")(ids).logits
        assert torch.allclose(adapted(ids).logits, merged, atol=1e-4)
        assert not torch.allclose(plain(ids).logits, merged, atol=1e-4)
        monkeypatch.chdir(folder)  # the card's own lines, where it is
        card, on_the_card = (folder / "README.md").read_text(), {}
        exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], on_the_card)
        assert torch.allclose(on_the_card["model"].eval()(ids).logits, merged, atol=1e-4)
        monkeypatch.undo()
        next(plain.parameters()).add_(1)
    plain.save_pretrained(base)
    done = run(None, LM, words, output_dir=folder, check=False)
    assert done.returncode == 2 and ", base " in done.stderr, done.stderr


# ------------------------------------------------------------------------------------- slow tests


SHARDED = dict(launcher=("--mixed_precision", "no", "--num_processes", "2"))
CONTINUED = {
    "lora": ("cpu", f"--model {{base}} {LORA}", {}),
    "sharded": ("4gpu_fsdp", f"{SMALL} --export_dtype bfloat16", SHARDED),
    "pretrained": ("4gpu_fsdp", f"--model {{base}} {SMALL}", SHARDED),
    "qwen3": ("2cpu", f"{SMALL} --gradient_accumulation_steps 2 --activation_checkpointing", {}),
    "gpt2": ("2cpu", f"{SMALL} --gradient_accumulation_steps 2", {}),  # with dropout
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUED)
def test_every_kind_of_model_continues_exactly(name, lm, chats, tmp_path):
    """The score of one that is exported in bfloat16 is that of the rounded weights."""
    config, words, options = CONTINUED[name]
    base, one = shutil.copytree(lm.folder / "model", tmp_path / "base"), lm.folder
    words = f"--dataset {chats} {words}".format(base=base)
    if name in ("qwen3", "gpt2"):
        sizes = dict(vocab_size=330, max_position_embeddings=128)
        make_config(name, **sizes).save_pretrained(tmp_path / "config")
        make_tokenizer().save_pretrained(tmp_path / "config")
        words += f" --model {tmp_path / 'config'} --from_scratch"
    if name == "pretrained":
        load(base).to(torch.bfloat16).save_pretrained(base)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(config, LM, words, output_dir=whole, **options)
    run_killed(config, words, killed, **options)
    assert final_weights(killed) == final_weights(whole)
    if name in ("qwen3", "pretrained"):
        one = tmp_path / "one"
        run("cpu", LM, words, output_dir=one)
        assert load(whole / "model").dtype == load(one / "model").dtype
    if name not in ("lora", "gpt2"):
        assert column(whole, "loss") == pytest.approx(column(one, "loss"), abs=1e-4)
    if name == "sharded":
        run("cpu", EVALUATE, f"{whole} --dataset {chats}", output_dir=tmp_path / "scores")
        said = results(whole)["val_loss"]
        assert load(whole / "model").dtype == torch.bfloat16
        assert results(tmp_path / "scores")["val_loss"] == pytest.approx(said, rel=1e-6)
        assert abs(said - results(one)["val_loss"]) > 1e-5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_of_a_sharded_run_holds_the_model(lm, tmp_path):
    """The bound: its shard, twice the largest tensor, and 16 MiB for what a first use imports."""
    sizes = dict(vocab_size=2048, hidden_size=512, intermediate_size=1536, num_hidden_layers=12)
    sizes |= dict(num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=128)
    base = shutil.copytree(lm.folder / "model", tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))
    model.save_pretrained(base)
    for processes in (2, 4):
        out = tmp_path / str(processes)
        out.mkdir()
        launcher = ("--mixed_precision", "no", "--num_processes", str(processes))
        run("4gpu_fsdp", PROBE, [str(base), str(out)], launcher=launcher)
        expected = sha256((base / "model.safetensors").read_bytes()).hexdigest()
        assert final_weights(out) == expected
    grown = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(4)]
    whole = sum(weight.nbytes for weight in model.parameters())
    for seen in grown:
        most = seen["shard"] + 2 * seen["largest"] + 2**24
        assert most < whole / 2 and max(seen["loading"], seen["exporting"]) <= most, seen
        assert seen["buffers"] == [value.double().sum().item() for value in model.buffers()]
