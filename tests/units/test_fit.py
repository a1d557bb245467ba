"""What training a language model takes: estimates against what autograd keeps, and what is advised."""

from types import SimpleNamespace

import pytest
import torch
from harness.fakes import accelerator

transformers = pytest.importorskip("transformers")

from utils.language import fit, lm_loss
from utils.language.fit import GIB, Job, Sizes
from utils.run.failures import UserError

CONFIG = dict(num_hidden_layers=3, hidden_size=64, intermediate_size=160, vocab_size=300)
CONFIG |= dict(num_attention_heads=4, num_key_value_heads=2)
# 1 Gi weights, of which blocks have most.
LARGE = Sizes(GIB, GIB, 4, GIB // 10, GIB // 5, 8, 1024, 2048, 10_000)
JOB = Job(1, 1, 1024, 256, False, False)


def test_a_model_is_measured_without_memory():
    config = transformers.LlamaConfig(**CONFIG, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    sizes = fit.measure(config)
    assert sizes.parameters == sizes.trained == model.num_parameters()
    assert sizes.block == sum(weight.numel() for weight in model.model.layers[0].parameters())
    assert sizes.rest == 300 * 64 + 64  # the embedding and the last norm
    assert (sizes.layers, sizes.hidden, sizes.vocabulary, sizes.frozen_bytes) == (3, 64, 300, 4)
    frozen = fit.measure(config, torch.bfloat16)
    assert frozen.frozen_bytes == 2 and frozen.trained == round(model.num_parameters() / 100)
    assert sizes.kept == 6 * 64 + 2 * (4 + 2) * 16 + 4 * 160  # 2 of 4 heads have keys and values
    wide = fit.measure(transformers.LlamaConfig(**CONFIG, head_dim=48))
    assert wide.kept == 6 * 64 + 2 * (4 + 2) * 48 + 4 * 160
    experts = fit.measure(transformers.MixtralConfig(**CONFIG, num_local_experts=4))
    assert experts.kept == sizes.kept + 4 * 160  # a token has two of them
    other = transformers.GPT2Config(n_embd=64, n_head=4, n_layer=1)  # without these names
    assert fit.measure(other).kept == 6 * 64 + 2 * 8 * 16 + 4 * 256
    untied = fit.measure(transformers.LlamaConfig(**CONFIG))
    assert untied.parameters == sizes.parameters + 300 * 64


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [("Llama", False), ("Llama", True), ("Qwen3", False), ("Olmo2", True)],
)
def test_activations_are_about_those_that_autograd_keeps(family, checkpointing):
    config = getattr(transformers, f"{family}Config")(**CONFIG, head_dim=16, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    lm_loss.chunk_loss(model)
    weights, kept = {weight.data_ptr() for weight in model.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    tokens = torch.randint(0, 300, (4, 128))
    inputs = dict(input_ids=tokens, position_ids=torch.arange(128).expand(4, -1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()(**inputs, targets=tokens)
    measured = sum(size for size, _ in kept.values())
    sizes, job = fit.measure(config), Job(1, 1, 512, 128, False, checkpointing)
    expected = fit.estimate(sizes, job).activations
    if checkpointing:  # a block is there only while the backward pass computes it again
        expected -= 512 * sizes.kept * 4
    assert 0.5 * measured < expected < 2 * measured, (measured, expected)


def test_weights_gradients_and_moments_are_counted():
    need = fit.estimate(LARGE, JOB)
    assert [value / GIB for value in need[:3]] == [4, 4, 8]
    kept = 1024 * (8 * 10_000 + 8 * 1024) * 4
    assert need.activations == kept + 3 * 4 * 1024 * 2048
    several = fit.estimate(LARGE, JOB._replace(processes=2))
    assert several.gradients == 2 * need.gradients  # the buckets of DDP
    half = fit.estimate(LARGE, JOB._replace(half=True))
    assert half.weights == need.weights + 2 * GIB and half.gradients == need.gradients
    sharded = fit.estimate(LARGE, JOB._replace(processes=8, shards=4))
    assert [sharded.gradients / GIB, sharded.optimizer / GIB] == [1, 2]
    assert sharded.weights == pytest.approx(GIB + 4 * (2 * GIB // 10 + GIB // 5))
    lora = fit.estimate(LARGE._replace(trained=GIB // 4, frozen_bytes=2), JOB)
    assert [value / GIB for value in lora[:3]] == [2.5, 1, 2]
    again = fit.estimate(LARGE, JOB._replace(checkpointing=True))
    assert again.activations == 1024 * (10_000 + 8 * 1024) * 4 + 3 * 4 * 1024 * 2048
    many = LARGE._replace(vocabulary=2**20)
    logits = fit.estimate(many, JOB).activations - kept
    assert logits == 3 * 4 * lm_loss.LOGITS  # a chunk of the loss


@pytest.mark.parametrize(
    ("free", "job", "advice"),
    [
        (16.2, JOB, "--activation_checkpointing"),
        (16.05, JOB, "--activation_checkpointing and 4 times the --gradient_accumulation_steps"),
        (16.2, JOB._replace(checkpointing=True), ""),
        (5, JOB, "_steps, and --lora_rank 16 or 8 GPUs with an FSDP configuration"),
        (9, JOB, "_steps, and --lora_rank 16 or 4 GPUs with an FSDP configuration"),
        (3, JOB._replace(processes=2, shards=2), "--activation_checkpointing, 4 times "),
        (1, JOB, "and a smaller --block_size, or another --model"),
    ],
)
def test_the_cheapest_way_is_advised(free, job, advice):
    assert advice in fit.advise(LARGE, job, free * GIB)


def check(rank=0, **changed):
    """A check of a job of two processes, with blocks of 256 tokens."""
    here = accelerator(2, rank, device=torch.device("cpu"), mixed_precision="no")
    args = dict(lora_rank=0, adapter=None, dtype=None, activation_checkpointing=False)
    args |= dict(batch_size=24, gradient_accumulation_steps=3, block_size=256) | changed
    fit.check(here, SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace(**args))


def test_what_cannot_fit_is_refused_and_what_may_is_said(monkeypatch, capsys):
    memory = SimpleNamespace(available=50 * GIB)
    monkeypatch.setattr(fit.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(fit.devices, "local_processes", lambda: 2)
    monkeypatch.setattr(fit, "measure", lambda *_: LARGE)
    check()
    said = capsys.readouterr().out
    assert said.startswith("memory per process: weights 4.0, gradients 8.0, optimizer 8.0, activ")
    assert said.endswith(": 20.4 of 25.0 GiB free\n")
    memory.available = 2 * 20.2 * GIB
    check()
    assert "GiB free. It would fit with --activation_checkpointing ***" in capsys.readouterr().err
    memory.available = 2 * 9 * GIB
    says = r"^the model does not fit: .* 20\.4 of 9\.0 GiB free\. It would fit with .* 4 GPUs"
    with pytest.raises(UserError, match=says):
        check()
    memory.available = 2 * 20.2 * GIB
    check(rank=1)
    monkeypatch.setattr(fit, "measure", lambda *_: LARGE._replace(parameters=9, trained=9))
    check(batch_size=2, gradient_accumulation_steps=1)  # small: no word
    assert capsys.readouterr() == ("", "")


def test_the_job_is_that_of_the_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(fit, "measure", lambda _, frozen: seen.append(frozen) or LARGE)
    monkeypatch.setattr(fit, "estimate", lambda _, job: seen.append(job) or fit.Need(0, 0, 0, 0))
    for options, dtype in (
        ({}, None),
        ({"lora_rank": 4}, torch.bfloat16),
        ({"adapter": "a"}, torch.bfloat16),
        ({"adapter": "a", "dtype": "float32"}, torch.float32),
    ):
        seen.clear()
        check(**options, activation_checkpointing=True)
        assert seen[:2] == [dtype, Job(2, 1, 1024, 256, False, True)]
