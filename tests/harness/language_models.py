"""Small causal language models of several architectures, for tests."""

import torch

VOCABULARY = 300
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    head_dim=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
# What is particular about each: tied weights, windows, caps and scales of logits, experts.
OWN = {
    "llama": dict(tie_word_embeddings=True),
    "qwen3": {},
    "gpt2": {},
    "gemma2": dict(sliding_window=4, final_logit_softcapping=2.0, query_pre_attn_scalar=8),
    "granite": dict(logits_scaling=4.0),
    "cohere": dict(logit_scale=0.25),
    "mistral": dict(sliding_window=4),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),  # its masks ignore positions
}
PACKED = [name for name in OWN if name != "opt"]


def make_config(name, **changes):
    import transformers

    sizes = {**SIZES, **OWN.get(name, {}), **changes}
    if name in ("gpt2", "opt"):  # older ones, which have no other sizes
        for key in ("intermediate_size", "num_key_value_heads", "head_dim"):
            del sizes[key]
    return transformers.AutoConfig.for_model(name, **sizes)


def make_model(name, attention=None, **changes):
    """A model with random weights, so large that a token that sees others has another loss."""
    import transformers

    torch.manual_seed(0)
    config = make_config(name, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    return model.eval()


def document(length=17):
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))


def batch(tokens):
    """The inputs of `compute_loss` for documents, one in each block."""
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
    targets = tokens[:, 1:].clone()
    return dict(input_ids=tokens[:, :-1], position_ids=positions, targets=targets)
