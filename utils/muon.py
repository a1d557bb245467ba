"""Optimizers with orthogonal updates for matrices and convolution filters, and AdamW or SGD for the rest."""

import torch
from torch.distributed.tensor import DTensor, Replicate


class Muon:
    """Momentum whose update is made orthogonal, for the groups with `muon`; the other base class' step for the rest.

    K. Jordan, kellerjordan.github.io/posts/muon. A group with `muon` has `lr`, `weight_decay` and `momentum`; with
    `fixed_norm` its weights are first scaled to norm sqrt(rows), for filters whose length a batch norm undoes anyway.
    Filters [outputs, inputs, height, width] count as matrices of `outputs` rows.

    Why not `torch.optim.Muon` beside another optimizer: it computes in bfloat16, in which the rounding differences
    between topologies grow to visible ones; it takes two-dimensional matrices, one at a time, and knows nothing of
    shards; and of an FSDP model Accelerate saves only one optimizer.
    """

    @torch.no_grad()
    def step(self, closure=None):
        same_shape = {}
        for group in self.param_groups:
            for weight in group["params"] if group["muon"] else ():
                state = self.state[weight]
                if not state:  # AdamW wants a count in whatever state it loads
                    state.update(step=torch.zeros(()), momentum=torch.zeros_like(weight))
                momentum = state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(momentum, group["momentum"])
                weight.grad = None  # AdamW passes over what has no gradient
                # A shard cannot be made orthogonal: every process does the whole matrix and keeps its part.
                update = update.full_tensor() if isinstance(update, DTensor) else update.flatten(1)
                same_shape.setdefault(tuple(sorted(update.shape)), []).append((weight, update, group))
        for matrices in same_shape.values():
            wide = torch.stack([update if update.size(0) <= update.size(1) else update.T for _, update, _ in matrices])
            for (weight, update, group), new in zip(matrices, orthogonalise(wide), strict=True):
                new = (new if update.size(0) <= update.size(1) else new.T).reshape(weight.shape)
                if group.get("fixed_norm"):
                    weight.mul_(len(weight) ** 0.5 / weight.norm())
                if isinstance(weight, DTensor):
                    new = DTensor.from_local(new, weight.device_mesh, [Replicate()]).redistribute(placements=weight.placements)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(new, alpha=-group["lr"] * max(1, update.size(0) / update.size(1)) ** 0.5)
        super().step(closure)


class MuonAdamW(Muon, torch.optim.AdamW):
    pass


class MuonSGD(Muon, torch.optim.SGD):
    pass


def orthogonalise(x):
    """Roughly the nearest orthogonal matrix to each of `x` [count, rows <= columns, columns]: all singular values near 1."""
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):  # Newton-Schulz steps, with Jordan's coefficients
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x
