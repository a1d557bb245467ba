"""train_gpt.py: what it leaves, its evaluations, its shards, and the text that it samples."""

import json
import math

import numpy as np
import pytest
from accelerate.utils import merge_fsdp_weights
from harness.launches import (
    GPT,
    column,
    metrics,
    results,
    run,
    run_as_if_killed,
    run_once,
    status,
)
from PIL import Image
from safetensors.torch import load_file

EVALUATE, WRAPPED = "scripts/evaluate.py", "tests/harness/wrapped.py"
MODEL = "--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --batch_size 12 --sample_length 40"
SMALL = f"{MODEL} --max_train_steps 8 --log_every 1 --eval_every 4 --checkpoint_every 4"
# Two processes, the model sharded over them.
SHARDED = ("--mixed_precision", "no", "--num_processes", "2")


@pytest.fixture(scope="session")
def text(made_once):
    """A local text file."""

    def make(folder):
        words = np.random.default_rng(0).choice("to be or not that is the question".split(), 18_000)
        (folder / "made_up.txt").write_text(" ".join(words))
        return folder / "made_up.txt"

    return made_once("text", make)


@pytest.fixture(scope="session")
def gpt(text, made_once):
    """An uninterrupted run with dropout: its output, and its folder as `.folder`."""
    words = f"--dataset {text} {SMALL} --dropout 0.2 --prompt abc --temperature 0"
    return run_once(made_once, "gpt", None, GPT, words)


def test_leaves_everything_it_promises(gpt):
    done, folder = gpt, gpt.folder
    for name in ("args.json", "tensorboard", "checkpoints/step_00000008/manifest.json"):
        assert (folder / name).exists(), name
    assert min(Image.open(folder / "curves.png").size) > 300
    assert status(folder)["state"] == "finished"
    result = results(folder)
    assert result["tokens_seen"] == 8 * 12 * 32 and result["samples_seen"] == 8 * 12
    assert result["val_bits_per_byte"] == pytest.approx(result["val_loss"] / math.log(2))
    assert result["val_loss"] == column(folder, "loss", "val")[8]
    # 2 blocks with 12 width^2 + 5 width parameters each, embedding and head; the formula of PaLM
    # leaves out the embedding
    assert result["parameters"] == 2 * (12 * 32**2 + 5 * 32) + 2 * 256 * 32
    assert result["flops_per_token"] == 6 * (2 * 12 * 32**2 + 256 * 32) + 12 * 2 * 32 * 32
    # The peak of a CPU is not known.
    assert not any("mfu" in line for line in metrics(folder, "train"))
    [sample] = metrics(folder, "sample")
    assert sample["step"] == 8 and sample["text"].startswith("abc")
    assert (folder / "sample.txt").read_bytes().decode() == sample["text"]
    assert "global batch 12 = 1 process x 12 samples" in done.stdout


def test_evaluations_take_some_windows_always_the_same_and_the_last_one_all(gpt, text, tmp_path):
    """The weights do not change, so the same windows have the same loss: after a signal in the last
    evaluation, on two processes, in a longer run that evaluates at other steps.
    """
    first, folder = gpt.folder, tmp_path / "run"
    words = f"--dataset {text} {MODEL} --init_from {first} --lr 0 --weight_decay 0 --log_every 1"
    short = f"{words} --eval_samples 30 --max_train_steps 4 --eval_every 2"
    fault = f"sigterm_in_evaluation@3 {GPT} {short}"
    done = run("cpu", WRAPPED, fault, output_dir=folder, check=False)
    windows = math.ceil(results(first)["val_bytes"] / 32)
    assert f"evaluations: 30 of {windows:,} held-out samples, always the same" in done.stdout
    assert "after the last step, which is saved" in done.stderr
    assert status(folder)["state"] == "preempted" and (folder / "model.safetensors").exists()
    longer = short.replace("steps 4 --eval_every 2", "steps 7 --eval_every 3")
    done = run("2cpu", GPT, longer, output_dir=folder)
    lines, whole = metrics(folder, "val"), results(folder)
    assert [line["step"] for line in lines] == [2, 4, 6, 7]
    assert {line["bytes"] for line in lines} == {30 * 32}
    few = lines[0]["loss"]
    assert [line["loss"] for line in lines] == pytest.approx([few] * 4, rel=1e-6)
    assert whole["val_bytes"] == results(first)["val_bytes"]
    assert whole["val_loss"] == pytest.approx(results(first)["val_loss"], rel=1e-6)
    assert abs(whole["val_loss"] - few) > 1e-4
    assert whole["val_loss_standard_error"] < lines[0]["loss_standard_error"]
    # By the scores of the 30 windows, not by the metrics of all.
    assert whole["best_checkpoint"] == "step_00000007"
    best = json.loads((folder / "checkpoints/step_00000007/manifest.json").read_text())
    assert best["progress"]["score"] == pytest.approx(-few, rel=1e-6)
    assert best["progress"]["eval_samples"] == 30
    said = f"± {whole['val_loss_standard_error']:.4f}, val bits per byte"
    assert said in done.stdout and f"{whole['val_bytes']:,} val bytes" in done.stdout


def test_a_sharded_run_killed_continues_bit_for_bit(text, tmp_path):
    """With the shards of the optimizer's state, dropout, and accumulation."""
    words = f"--dataset {text} {SMALL} --dropout 0.1 --activation_checkpointing"
    whole = run_as_if_killed("4gpu_fsdp", GPT, words, tmp_path, launcher=SHARDED)
    shards = list(whole.glob("checkpoints/step_00000004/*/*.distcp"))
    assert len(shards) == 4  # of model and optimizer, a file for each process


@pytest.mark.slow
def test_a_sharded_run_computes_the_same_also_on_other_numbers_of_processes(text, tmp_path):
    folder, words = tmp_path / "run", f"--dataset {text} {SMALL}"
    run(None, GPT, words, output_dir=tmp_path / "one")
    fault = f"die_in_step@6:1 {GPT} {words}"
    run("4gpu_fsdp", WRAPPED, fault, output_dir=folder, launcher=SHARDED, check=False)
    run("4gpu_fsdp", GPT, words, output_dir=folder, launcher=(*SHARDED[:-1], "3"))
    assert results(folder)["num_processes"] == 3 and results(folder)["resumed_from"] == 4
    expected = column(tmp_path / "one", "loss")
    assert len(expected) == 8 and column(folder, "loss") == pytest.approx(expected, abs=1e-4)
    names = [load_file(f / "model.safetensors").keys() for f in (folder, tmp_path / "one")]
    assert names[0] == names[1]
    # The shards of the last checkpoint have the weights that the script exported.
    newest = folder / "checkpoints" / "step_00000008"
    merge_fsdp_weights(newest / "pytorch_model_fsdp_0", tmp_path)
    merged, exported = (load_file(at / "model.safetensors") for at in (tmp_path, folder))
    assert merged.keys() == exported.keys()
    assert all((merged[name] == exported[name]).all() for name in merged)
    run("2cpu", EVALUATE, [str(folder)], output_dir=tmp_path / "figures")
    found, expected = results(tmp_path / "figures"), results(folder)
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
    assert found["val_bytes"] == expected["val_bytes"]
    done = run(None, GPT, f"--sample {newest}", check=False)
    assert done.returncode == 2 and "finish the run" in done.stderr


@pytest.mark.slow
def test_a_model_that_overfits_samples_what_it_saw(text, tmp_path):
    arguments = f"--dataset {text} {MODEL} --overfit_batch --batch_size 2 --profile"
    run("cpu", GPT, arguments, output_dir=tmp_path / "run")
    made = tmp_path / "run_overfit_batch"
    assert metrics(made, "train")[-1]["loss"] < 0.01
    assert (made / "profile" / "trace.json").exists()
    memorized = text.read_bytes()[:60].decode()
    sample = ["--sample", str(made), "--prompt", memorized[:20]]
    sample += ["--sample_length", "12", "--temperature"]
    cold, hot = (run(None, GPT, [*sample, value]).stdout for value in ("0", "9"))
    assert cold.rstrip("\n") == memorized[:32] and hot != cold
