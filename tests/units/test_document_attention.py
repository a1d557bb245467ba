"""Attention by document; its losses and gradients are in the properties of the loss."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from harness.language_models import VOCABULARY, make_model

transformers = pytest.importorskip("transformers")

from utils.language import document_attention

CPU = SimpleNamespace(device=torch.device("cpu"), mixed_precision="bf16")
GPU = SimpleNamespace(device=torch.device("cuda"), mixed_precision="bf16")


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
):
    """Stands in for the kernel of GPUs: the formula, document by document."""
    bounds, groups = cu_seq_q.tolist(), query.size(1) // key.size(1)
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert cu_seq_q.dtype == torch.int32 and cu_seq_k is cu_seq_q
    assert (max_q, max_k) == (max(sizes), max(sizes)) and sum(sizes) == len(query) == len(key)
    assert window_size == (-1, 0) and enable_gqa == (groups > 1)
    outputs = []
    for q, k, v in zip(*(part.split(sizes) for part in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", shares, v))
    return torch.cat(outputs)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(document_attention, "varlen_attn", varlen_attn)


def chosen(name, attention=None, accelerator=CPU, **changes):
    model = make_model(name, attention, **changes)
    document_attention.use(accelerator, model)
    return model


@pytest.mark.parametrize(
    ("name", "attention", "changes", "used"),
    [
        ("llama", None, {}, True),
        ("llama", "eager", {}, False),
        ("mistral", None, {"sliding_window": None}, True),
        ("mistral", None, {"sliding_window": 8}, False),
        ("gpt2", None, {}, True),
    ],
)
def test_only_where_a_token_attends_to_all_before_it(name, attention, changes, used):
    model = chosen(name, attention, **changes)
    assert (model.config._attn_implementation == document_attention.NAME) == used


@pytest.mark.parametrize(
    ("family", "changes"), [("Doge", {"num_key_value_heads": 4}), ("Persimmon", {})]
)
def test_layers_with_a_mask_of_their_own_or_without_positions_keep_the_mask(family, changes):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    config = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, **sizes, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = model.config._attn_implementation
    document_attention.use(CPU, model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("place", [CPU, GPU])
def test_padded_prompts_are_answered_as_alone(place, gpu):
    """Also with a cache, whose tokens are not in the query; on a GPU without the kernel."""
    model = chosen("llama", accelerator=place)
    prompts = [torch.arange(3, 9) % VOCABULARY, torch.arange(3, 5) % VOCABULARY]
    padded = torch.stack([prompts[0], torch.cat([torch.zeros(4).long(), prompts[1]])])
    mask = torch.ones_like(padded)
    mask[1, :4] = 0
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    together = model.generate(padded, attention_mask=mask, **options)[:, 6:]
    plain = make_model("llama")
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.tolist() == plain.generate(prompt[None], **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_kernel_of_gpus_gets_all_documents_at_once(gpu, name):
    """Grouped heads, two rows of one and of three documents; loss, gradients, and a recomputation.

    In float64, so that the results agree to rounding.
    """
    changes = dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0) if name == "gpt2" else {}
    models = [chosen(name, accelerator=each, **changes).double() for each in (CPU, GPU)]
    models[1].load_state_dict(models[0].state_dict())
    assert models[1].config._attn_implementation == document_attention.KERNEL
    tokens = torch.randint(VOCABULARY, (2, 12))
    positions = torch.stack([torch.arange(12), torch.tensor([*range(7), 0, *range(4)])])
    for model in models:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        model(
            input_ids=tokens, position_ids=positions.clone(), use_cache=False
        ).logits.square().sum().backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"attention_dropout": 0.1}, {}),
        ({"head_dim": 12}, {}),
        ({"head_dim": 264}, {}),
        ({}, {"mixed_precision": "no"}),
        ({}, {"device": torch.device("mps")}),
    ],
)
def test_other_models_and_gpus_keep_the_mask(gpu, changes, settings):
    model = chosen("llama", accelerator=SimpleNamespace(**{**vars(GPU), **settings}), **changes)
    assert model.config._attn_implementation == "sdpa"


def test_older_gpus_and_releases_of_torch_keep_the_mask(gpu, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert chosen("llama", accelerator=GPU).config._attn_implementation == "sdpa"
    assert chosen("llama", accelerator=GPU).config._attn_implementation != "sdpa"
    monkeypatch.setattr(document_attention, "varlen_attn", lambda query, key, value: None)
    assert chosen("llama", accelerator=GPU).config._attn_implementation == "sdpa"
