"""The loss of a causal language model of `transformers`, in chunks, and what packing needs.

Needs the packages in scripts/requirements_lm.txt.
"""

import functools
import types

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from utils.run.collectives import gather
from utils.run.failures import UserError

LOGITS = 2**26  # that exist at once: 256 MiB in float32


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
    if "flash" in (causal.config._attn_implementation or ""):
        # It finds packed documents by their positions in a batch of one row only.
        kwargs = {name: value.flatten()[None] for name, value in kwargs.items()}
        targets = targets.flatten()[None]
    balanced = _is_balanced(causal) and not per_block
    if balanced:
        kwargs["output_router_logits"] = True
    outputs = causal.base_model(**kwargs, use_cache=False)
    chosen = (targets >= 0).flatten().nonzero()[:, 0]
    hidden = outputs.last_hidden_state.flatten(0, 1)[chosen]
    targets = targets.flatten()[chosen]
    size = max(1, LOGITS // causal.config.get_text_config().vocab_size)
    parts = list(zip(hidden.split(size), targets.split(size), strict=True))
    loss_of = functools.partial(_loss_of, causal, type(outputs))
    if per_block:
        losses = torch.cat([loss_of(*part, reduction="none") for part in parts])
        return (F.one_hot(chosen // length, count) * losses[:, None]).sum(0)
    if len(parts) == 1:
        loss = loss_of(*parts[0])
    else:
        loss = sum(recompute(loss_of, *part, use_reentrant=False) for part in parts)
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


def _loss_of(causal, kind, hidden, targets, reduction="sum"):
    logits = _outputs_of(causal, hidden[None], kind).logits[0].float()
    return F.cross_entropy(logits, targets, reduction=reduction)


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
    own = model(**alone, labels=targets, shift_labels=targets, use_cache=False).loss.item()
    if far(loss, own * targets.numel(), rounding):
        raise UserError(f"{name} cannot be trained: it has another loss than that of each token")
    model.train(was_training)


def _has_experts(config):
    values = config.get_text_config().to_dict().items()
    return any("experts" in key and isinstance(value, int) and value > 1 for key, value in values)
