"""The loss of a causal language model of `transformers`, in chunks, and attention in packed blocks.

Needs the packages in scripts/requirements_lm.txt.
"""

import functools
import inspect
import types

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from utils.run.collectives import gather
from utils.run.failures import UserError

LOGITS = 2**26  # that exist at once: 256 MiB in float32
NAME, KERNEL = "sdpa_by_document", "varlen_by_document"


def chunk_loss(model):
    """Gives a model's forward pass the argument `targets`, with which it returns a loss.

    `targets`, int64 [batch, time], are the tokens that follow: -100 is none. The result is the sum
    of their cross entropies in nats, a float32 scalar. The logits of a large vocabulary never exist
    at once: only of positions with a target, some at a time, and the backward pass computes them
    again. Without `targets`, as in `generate`, the forward pass is as before. With `per_block`, for
    an evaluation, the result is the sum of each block, float32 [batch]. Otherwise the loss that
    balances experts is added, if the model's configuration asks for it (`output_router_logits`).

    This happens within the forward pass of the prepared model, so that the hooks of DDP and FSDP
    run. A model may scale or cap its logits (unlike `torch.nn.functional.linear_cross_entropy`), so
    its own forward pass computes them, on the chosen hidden states in place of its backbone.

    Args:
        model: a causal language model of `transformers`, or one of `peft` around it.
    """
    causal = _causal(model)

    # Methods, so that those of a copy of the model compute with the weights of the copy.
    @functools.wraps(type(causal).forward)  # `generate` reads the names of the arguments
    def forward(self, *args, targets=None, per_block=False, **kwargs):
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if targets is not None:
            return _sum_of_losses(self, targets, per_block, kwargs)
        if _is_balanced(self):
            kwargs["output_router_logits"] = False  # with which `generate` fails
        return self.own_forward(*args, **kwargs)

    causal.own_forward = causal.forward
    causal.forward = types.MethodType(forward, causal)


def _sum_of_losses(causal, targets, per_block, kwargs):
    count, length = targets.shape
    balanced = _is_balanced(causal) and not per_block
    if balanced:
        kwargs["output_router_logits"] = True
    outputs = causal.base_model(**kwargs, use_cache=False)
    chosen = (targets >= 0).flatten().nonzero()[:, 0]
    hidden = outputs.last_hidden_state.flatten(0, 1)[chosen]
    targets = targets.flatten()[chosen]
    size = max(1, LOGITS // causal.config.get_text_config().vocab_size)
    parts = list(zip(hidden.split(size), targets.split(size), strict=True))
    losses_of = functools.partial(_losses_of, causal, type(outputs))
    if len(parts) > 1 and torch.is_grad_enabled():
        losses_of = functools.partial(recompute, losses_of, use_reentrant=False)
    losses = torch.cat([losses_of(*part) for part in parts])
    if per_block:
        return (F.one_hot(chosen // length, count) * losses[:, None]).sum(0)
    loss = losses.sum()
    if balanced:  # counts as often as there are targets, as the loss itself does
        routers = {"router_logits": outputs.router_logits}
        balance = _outputs_of(causal, hidden[None, :1], type(outputs), **routers).aux_loss
        loss = loss + causal.router_aux_loss_coef * balance * len(targets)
    return loss


def _is_balanced(causal):
    return getattr(causal.config, "output_router_logits", False)


def _outputs_of(causal, hidden, kind, **more):
    """The outputs of a model for hidden states that take the place of those of the backbone."""
    backbone, result = causal.base_model, kind(last_hidden_state=hidden, **more)
    computes, backbone.forward = backbone.forward, lambda *_, **__: result
    try:
        return causal.own_forward(input_ids=None, use_cache=False)
    except (ValueError, TypeError, AttributeError):  # for want of inputs
        raise UserError(
            f"{type(causal).__name__} cannot be trained: its forward pass does not call its "
            "backbone, but a part of it"
        ) from None
    finally:
        backbone.forward = computes


def _losses_of(causal, kind, hidden, targets):
    logits = _outputs_of(causal, hidden[None], kind).logits[0].float()
    return F.cross_entropy(logits, targets, reduction="none")


def _causal(model):
    """The model of `transformers` inside the wrappers of `peft`."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def small_batch(accelerator, model):
    """A batch of one block that has two documents, of 5 and 11 tokens, on the device."""
    vocabulary = _causal(accelerator.unwrap_model(model)).config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(vocabulary, 250), (1, 17), generator=generator)
    positions = torch.cat([torch.arange(5), torch.arange(11)])[None]
    targets = tokens[:, 1:].clone()
    targets[:, 4] = -100
    batch = dict(input_ids=tokens[:, :-1], position_ids=positions, targets=targets)
    return {name: value.contiguous().to(accelerator.device) for name, value in batch.items()}


@torch.no_grad()
def check(accelerator, model, packed):
    """Compares the loss of a small batch with what it must be; call it on every process.

    Of two documents in a block, the second may not depend on the first, and has the loss that it
    has alone. And the loss is the model's own.

    Args: model: as `prepare` returned it. packed (bool): whether blocks have several documents.

    Raises:
        UserError: one of these is not so.
    """
    was_training = model.training
    model.eval()
    causal = _causal(accelerator.unwrap_model(model))
    name, config = type(causal).__name__, causal.config

    def far(one, other, tolerance):
        return any(gather(accelerator, abs(one / other - 1) > tolerance))  # the same everywhere

    def loss_of(inputs):
        return model(**inputs, per_block=True).sum().item()  # without the balance of experts

    exact = accelerator.mixed_precision == "no" and causal.dtype == torch.float32
    rounding = 1e-4 if exact else 2e-2
    batch = small_batch(accelerator, model)
    alone = {key: value[:, 5:] for key, value in batch.items()}
    inputs, targets = batch.pop("input_ids"), batch["targets"].clone()
    if packed:
        targets[:, :5] = -100
        batch["targets"], changed = targets, inputs.clone()
        changed[:, :5] = (inputs[:, :5] + 1) % inputs.max()
        loss, other = (loss_of({**batch, "input_ids": tokens}) for tokens in (inputs, changed))
        # What a token does not attend to has no effect at all, in any precision and even if the
        # weights are random and the losses differ little. But experts take tokens together.
        sensitive = rounding if _has_experts(config) else 1e-6
        if far(loss, other, sensitive) or far(loss, loss_of(alone), rounding):
            raise UserError(
                f"{name} with --attention {config._attn_implementation} lets packed documents "
                "attend to each other: use another --attention, or another model"
            )
    loss, targets = loss_of(alone), alone.pop("targets")
    mean_loss = model(**alone, labels=targets, shift_labels=targets, use_cache=False).loss.item()
    if far(loss, mean_loss * targets.numel(), rounding):
        raise UserError(f"{name} cannot be trained: it has another loss than that of each token")
    model.train(was_training)


def _has_experts(config):
    values = config.get_text_config().to_dict().items()
    return any("experts" in key and isinstance(value, int) and value > 1 for key, value in values)


# ------------------------------------------------------------------------------------- attention
#
# With a mask of a whole block, `sdpa` computes all pairs of its tokens, of which a block of short
# documents needs few: of documents of 500 tokens in a block of 16,384, one of 33. So here each
# document attends by itself, without a mask. On a CPU, `sdpa` gets one document after the other. On
# a GPU that computes in half precision, the flash kernel of `torch.nn.attention.varlen` gets all of
# them at once; its backward pass obeys `compilation.make_attention_deterministic`.


class _Unsuited(Exception):
    """A layer is not told the positions of its tokens, or needs what is not computed here."""


def attend_by_document(accelerator, model):
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


def mask_of_padding(*args, attention_mask=None, **options):
    """A mask function of `transformers`: none, unless `generate` gives one of padding."""
    if attention_mask is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **options)


for name, function in {NAME: attend, KERNEL: attend_with_kernel}.items():
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask_of_padding)
