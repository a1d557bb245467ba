"""The loss of a causal language model of `transformers`, in chunks, and what packing needs.

Needs the packages in scripts/requirements_lm.txt.
"""

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from utils.run.collectives import gather
from utils.run.failures import UserError
from utils.run.launch import notice

LOGITS = 2**26  # that exist at once: 256 MiB in float32


def chunk_loss(model):
    """Gives a model's forward pass the argument `targets`, with which it returns a loss.

    `targets`, int64 [batch, time], are the tokens that follow: -100 is none. The result is the sum
    of their cross entropies in nats, a float32 scalar. The logits of a large vocabulary never exist
    at once: only of positions with a target, some at a time, and the backward pass computes them
    again. Without `targets`, as in `generate`, the forward pass is as before.

    This happens within the forward pass of the prepared model, so that the hooks of DDP and FSDP
    run. Between the last hidden states and the logits a model may scale or cap them, so its own
    forward pass computes them: on the chosen hidden states in place of its backbone.

    Args:
        model: a causal language model of `transformers`, or one of `peft` around it.
    """
    causal = _causal(model)
    original, backbone = causal.forward, causal.base_model
    causal.own_loss = backbone is causal or causal.get_output_embeddings() is None

    def logits_of(hidden, outputs, **kwargs):
        result, computes = type(outputs)(last_hidden_state=hidden, **kwargs), backbone.forward
        backbone.forward = lambda *_, **__: result
        try:
            return original(input_ids=None, use_cache=False)
        finally:
            backbone.forward = computes

    def loss_of(hidden, targets, outputs):
        logits = logits_of(hidden[None], outputs).logits[0].float()
        return F.cross_entropy(logits, targets, reduction="sum")

    def forward(*args, targets=None, **kwargs):
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        experts = getattr(causal.config, "output_router_logits", False)
        if targets is None:
            # `generate` fails if it is asked for the balance of experts, too.
            return original(*args, **({"output_router_logits": False} if experts else {}), **kwargs)
        if _flattens(causal):
            kwargs, targets = _flat(kwargs), targets.flatten()[None]
        if causal.own_loss:
            count = (targets >= 0).sum().clamp(min=1)
            # A cache would make `transformers` forget that packed documents are several.
            own = {**kwargs, "use_cache": False, "labels": targets, "shift_labels": targets}
            return original(**own).loss * count
        extra = {"output_router_logits": True} if experts else {}
        outputs = backbone(**{**kwargs, **extra, "use_cache": False})
        chosen = (targets >= 0).flatten().nonzero()[:, 0]
        hidden = outputs.last_hidden_state.flatten(0, 1)[chosen]
        targets = targets.flatten()[chosen]
        size = max(1, LOGITS // causal.config.get_text_config().vocab_size)
        parts = list(zip(hidden.split(size), targets.split(size), strict=True))
        if len(parts) == 1 or not torch.is_grad_enabled():
            total = sum(loss_of(*part, outputs) for part in parts)
        else:
            total = sum(recompute(loss_of, *part, outputs, use_reentrant=False) for part in parts)
        if not parts:
            total = hidden.sum().float()  # zero, with a gradient for DDP
        if experts:  # counts as often as there are targets, as the loss itself does
            balance = logits_of(hidden[None, :1], outputs, router_logits=outputs.router_logits)
            total = total + causal.router_aux_loss_coef * balance.aux_loss * len(targets)
        return total

    causal.forward = forward


def _causal(model):
    """The model of `transformers` inside the wrappers of `peft`."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _flattens(causal):
    """Flash attention finds packed documents by their positions in a batch of one row only."""
    return "flash" in (causal.config._attn_implementation or "")


def _flat(kwargs):
    names = ("input_ids", "position_ids")
    flat = {name: kwargs[name].flatten()[None] for name in names if name in kwargs}
    return {**kwargs, **flat}


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

    Of two documents in a block, the second has the loss that it has alone: otherwise its tokens
    attend to the first. And the loss is the model's own: if not, that is used from now on.

    Args:
        model: as `prepare` returned it.
        packed (bool): whether blocks will have several documents.

    Raises:
        UserError: packed documents attend to each other.
    """
    was_training = model.training
    model.eval()
    causal = _causal(accelerator.unwrap_model(model))
    exact = accelerator.mixed_precision == "no" and causal.dtype == torch.float32

    def differ(one, other):
        far = abs(one / other - 1) > (1e-4 if exact else 2e-2)
        return any(gather(accelerator, far))  # the same on every process

    batch = small_batch(accelerator, model)
    alone = {name: value[:, 5:] for name, value in batch.items()}
    second = {**batch, "targets": batch["targets"].clone()}
    second["targets"][:, :5] = -100
    experts = getattr(causal.config, "output_router_logits", False)
    if experts:
        causal.config.output_router_logits = False  # their balance depends on the whole batch
    if packed and differ(model(**second).item(), model(**alone).item()):
        raise UserError(
            f"{type(causal).__name__} with --attention {causal.config._attn_implementation} lets "
            "packed documents attend to each other: use another --attention"
        )
    if experts:
        causal.config.output_router_logits = True
    if not causal.own_loss:
        expected = model(**alone).item()
        causal.own_loss = True
        causal.own_loss = differ(model(**alone).item(), expected)
    if causal.own_loss and accelerator.is_main_process:
        notice(f"{type(causal).__name__} computes its own loss, with all logits in memory at once")
    model.train(was_training)
