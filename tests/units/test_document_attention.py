"""Attention by document; its losses and gradients are in the properties of the loss."""

import pytest
import torch
from harness.language_models import VOCABULARY, make_model

transformers = pytest.importorskip("transformers")

from utils.language import document_attention


def chosen(name, attention=None, **changes):
    model = make_model(name, attention, **changes)
    document_attention.use(model)
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


def test_layers_with_a_mask_of_their_own_keep_it():
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    config = transformers.DogeConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = model.config._attn_implementation
    document_attention.use(model)
    assert model.config._attn_implementation == before


def test_layers_that_are_not_told_the_positions_need_a_mask():
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    config = transformers.PersimmonConfig(vocab_size=VOCABULARY, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    document_attention.use(model)
    assert model.config._attn_implementation == "sdpa"


def test_padded_prompts_are_answered_as_alone():
    """Also with a cache, whose tokens are not in the query."""
    model = chosen("llama")
    prompts = [torch.arange(3, 9) % VOCABULARY, torch.arange(3, 5) % VOCABULARY]
    padded = torch.stack([prompts[0], torch.cat([torch.zeros(4).long(), prompts[1]])])
    mask = torch.ones_like(padded)
    mask[1, :4] = 0
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    together = model.generate(padded, attention_mask=mask, **options)[:, 6:]
    for prompt, answer in zip(prompts, together, strict=True):
        alone = model.generate(prompt[None], **options)[0, len(prompt) :]
        assert answer.tolist() == alone.tolist()
