"""Attention in packed blocks: each document by itself, without a mask.

With a mask of a whole block, `sdpa` computes all pairs of its tokens, of which a block of short
documents needs few: of documents of 500 tokens in a block of 16,384, one of 33.

On a CPU, `sdpa` gets one document after the other. On a GPU that computes in half precision, the
flash kernel of `torch.nn.attention.varlen` gets all of them at once; its backward pass obeys
`attention.make_deterministic`.

Needs the packages in scripts/requirements_lm.txt.
"""

import inspect

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME, KERNEL = "sdpa_by_document", "varlen_by_document"


class _Unsuited(Exception):
    """A layer is not told the positions of its tokens, or needs what is not computed here."""


def use(accelerator, model):
    """Lets a model with `sdpa` attend to each document by itself, if its layers allow it.

    They do if they attend to everything before a token, are told the positions, and have no mask of
    their own; for the kernel of GPUs also no dropout, and heads of a size that it has.
    """
    on_cpu = accelerator.device.type == "cpu"
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds:
        kinds = {"window" if getattr(config, "sliding_window", None) else "full_attention"}
    if getattr(config, "use_bidirectional_attention", False):
        kinds.add("bidirectional")
    if model.config._attn_implementation != "sdpa" or kinds != {"full_attention"}:
        return
    if not (on_cpu or _has_kernel(accelerator)):
        return
    model.set_attn_implementation(NAME if on_cpu else KERNEL)
    tokens, training = torch.zeros(1, 2, dtype=torch.int64), model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.train()  # with dropout
            model(input_ids=tokens, position_ids=torch.arange(2)[None], use_cache=False)
    except _Unsuited:
        model.set_attn_implementation("sdpa")
    model.train(training)


def _has_kernel(accelerator):
    """Whether this GPU, precision and version of torch have the kernel with grouped heads."""
    return (
        accelerator.device.type == "cuda"
        and accelerator.mixed_precision in ("bf16", "fp16")
        and torch.cuda.get_device_capability(accelerator.device) >= (8, 0)
        and "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.14
    )


def attend(module, query, key, value, attention_mask, **options):
    """An attention function of `transformers`, as its `sdpa`, by document if there is no mask.

    Args:
        query, key, value: [batch, heads, time, size].
        attention_mask: of `generate`; None in training.
        options: with `position_ids`, int64 [batch, time]: a document begins at each 0.

    Returns:
        tuple: [batch, time, heads, size]; None.
    """
    if _is_generating(module, query, key, attention_mask, options):
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


def attend_with_kernel(module, query, key, value, attention_mask, **options):
    """As `attend`, for GPUs. Without half precision, as in samples, it is the same function."""
    autocast, size = torch.is_autocast_enabled("cuda"), query.size(-1)
    dtype = torch.get_autocast_dtype("cuda") if autocast else query.dtype
    if options.get("dropout") or size != value.size(-1) or size > 256 or size % 8:
        raise _Unsuited
    if dtype == torch.float32 or _is_generating(module, query, key, attention_mask, options):
        return attend(module, query, key, value, attention_mask, **options)
    # [batch * time, heads, size]
    parts = [part.transpose(1, 2).flatten(0, 1).to(dtype) for part in (query, key, value)]
    bounds, longest = _bounds(options["position_ids"])
    output = varlen_attn(
        *parts,
        *(bounds, bounds, longest, longest),
        scale=options.get("scaling"),
        window_size=(-1, 0),  # causal
        enable_gqa=query.size(1) != key.size(1),
    )
    return output.unflatten(0, (query.size(0), query.size(2))), None


def _is_generating(module, query, key, attention_mask, options):
    """Whether a layer has padding or a cache, as in `generate`.

    Raises _Unsuited if it has a mask of its own, or is not told the positions.
    """
    has_mask = attention_mask is not None
    if (has_mask and module.training) or (not has_mask and options.get("position_ids") is None):
        raise _Unsuited
    return has_mask or query.size(2) != key.size(2)


def _bounds(positions):
    """Where documents begin and end, int32 [documents + 1], and the length (int) of the longest."""
    # Once per forward pass, not once per layer: each time the host waits for the GPU.
    if not hasattr(positions, "document_bounds"):
        starts = (positions.flatten() == 0).nonzero()[:, 0]
        bounds = torch.cat([starts, starts.new_tensor([positions.numel()])]).int()
        positions.document_bounds = bounds, bounds.diff().max().item()
    return positions.document_bounds


def mask(*args, attention_mask=None, **options):
    """A mask function of `transformers`: none, unless `generate` gives one of padding."""
    if attention_mask is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **options)


for name, function in {NAME: attend, KERNEL: attend_with_kernel}.items():
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)
