"""Attention in packed blocks: each document by itself, without a mask.

With a mask of a whole block, `sdpa` computes all pairs of its tokens, of which a block of short
documents needs few: of documents of 500 tokens in a block of 16,384, one of 33.

Needs the packages in scripts/requirements_lm.txt.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME, PROBE = "sdpa_by_document", "sdpa_by_document_probe"


class _Unsuited(Exception):
    """A layer is not told the positions of its tokens, or makes a mask of its own."""


def use(model):
    """Lets a model with `sdpa` attend to each document by itself, if its layers allow it.

    They do if they attend to everything before a token, are told the positions, and have no mask of
    their own.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds:
        kinds = {"window" if getattr(config, "sliding_window", None) else "full_attention"}
    if getattr(config, "use_bidirectional_attention", False):
        kinds.add("bidirectional")
    if model.config._attn_implementation != "sdpa" or kinds != {"full_attention"}:
        return
    model.set_attn_implementation(PROBE)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    try:
        with torch.no_grad():
            model(input_ids=tokens, position_ids=torch.arange(2)[None], use_cache=False)
    except _Unsuited:
        model.set_attn_implementation("sdpa")
    else:
        model.set_attn_implementation(NAME)


def attend(module, query, key, value, attention_mask, **options):
    """An attention function of `transformers`, as its `sdpa`, by document if there is no mask.

    Args:
        query, key, value: [batch, heads, time, size].
        attention_mask: of `generate`; None in training.
        options: with `position_ids`, int64 [batch, time]: a document begins at each 0.

    Returns:
        tuple: [batch, time, heads, size]; None.
    """
    if attention_mask is not None or query.size(2) != key.size(2):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    positions, rows = options["position_ids"], []
    for row, starts in enumerate((positions == 0).unbind()):
        sizes = starts.nonzero()[:, 0].tolist()
        sizes = [end - start for start, end in zip(sizes, [*sizes[1:], query.size(2)], strict=True)]
        parts = (tensor[row : row + 1].split(sizes, 2) for tensor in (query, key, value))
        outputs = [
            sdpa_attention_forward(module, *part, None, **options | {"is_causal": True})[0]
            for part in zip(*parts, strict=True)
        ]
        rows.append(torch.cat(outputs, 1))
    return torch.cat(rows), None


def _probe(module, query, key, value, attention_mask, **options):
    if attention_mask is not None or options.get("position_ids") is None:
        raise _Unsuited
    return attend(module, query, key, value, None, **options)


def mask(*args, attention_mask=None, **options):
    """A mask function of `transformers`: none, unless `generate` gives one of padding."""
    if attention_mask is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **options)


for name, function in ((NAME, attend), (PROBE, _probe)):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)
