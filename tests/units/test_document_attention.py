"""Attention by document; its losses and gradients are in the properties of the loss."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from harness.language_models import VOCABULARY, make_model

transformers = pytest.importorskip("transformers")

from utils.language import lm_loss

CPU = dict(device=torch.device("cpu"), mixed_precision="bf16")
GPU = dict(device=torch.device("cuda"), mixed_precision="bf16")


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
    monkeypatch.setattr(lm_loss, "varlen_attn", varlen_attn)


def chosen(name, place=CPU, attention=None, **changes):
    model = make_model(name, attention, **changes)
    lm_loss.attend_by_document(SimpleNamespace(**place), model)
    return model


FORMULA, KERNEL = lm_loss.NAME, lm_loss.KERNEL


@pytest.mark.parametrize(
    ("name", "changes", "place", "expected"),
    [
        ("llama", {}, CPU, FORMULA),
        ("llama", {}, GPU, KERNEL),
        ("gpt2", {}, CPU, FORMULA),
        # Tokens that do not attend to all before them, or another attention that was chosen.
        ("mistral", {"sliding_window": None}, CPU, FORMULA),
        ("mistral", {"sliding_window": 8}, CPU, "sdpa"),
        ("llama", {"attention": "eager"}, CPU, "eager"),
        ("doge", {"num_key_value_heads": 4}, CPU, "sdpa"),  # its layers have a mask of their own
        ("persimmon", {}, CPU, "sdpa"),  # its layers are not told positions
        # What the kernel does not compute.
        ("llama", {"attention_dropout": 0.1}, GPU, "sdpa"),
        ("llama", {"head_dim": 12}, GPU, "sdpa"),
        ("llama", {"head_dim": 264}, GPU, "sdpa"),
        ("llama", {}, GPU | {"mixed_precision": "no"}, "sdpa"),
        ("llama", {}, GPU | {"device": torch.device("mps")}, "sdpa"),
        ("llama", {}, GPU | {"capability": (7, 5)}, "sdpa"),
        (
            "llama",
            {},
            GPU | {"kernel": lambda query, key, value: None},
            "sdpa",
        ),  # of older releases
    ],
)
def test_documents_are_computed_one_by_one_where_that_is_the_same(
    name, changes, place, expected, monkeypatch
):
    capability = place.get("capability", (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(lm_loss, "varlen_attn", place.get("kernel", varlen_attn))
    assert chosen(name, place, **changes).config._attn_implementation == expected


@pytest.mark.parametrize("place", [CPU, GPU])
def test_padded_prompts_are_answered_as_alone(place, gpu):
    """Also with a cache, whose tokens are not in the query; on a GPU without the kernel."""
    model = chosen("llama", place)
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
    models = [chosen(name, each, **changes).double() for each in (CPU, GPU)]
    models[1].load_state_dict(models[0].state_dict())
    assert models[1].config._attn_implementation == lm_loss.KERNEL
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
