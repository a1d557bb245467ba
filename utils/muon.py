"""Muon for matrices and convolution filters, with AdamW or SGD for the other parameters."""

import torch
from torch.distributed.tensor import DTensor, Shard


class Muon:
    """Muon for groups with `muon=True`; the step of the other base class for all others.

    See K. Jordan, kellerjordan.github.io/posts/muon. A group with `muon=True` has `lr`,
    `weight_decay`, `momentum` (a number, or a first value, a last value, and the number of steps in
    which it rises linearly from one to the other), and may have `iterations` (default: 5; with 3 a
    GPT reaches the same loss). With `fixed_norm` its weights are first scaled to norm sqrt(rows): a
    batch norm that follows cancels their scale anyway. With `beta2`, each row of an update is
    divided by the root of a running mean of its squared norm, so that all rows change by about the
    same amount (NorMuon, arXiv:2510.05491). Convolution filters [outputs, inputs, height, width]
    are treated as matrices with `outputs` rows.

    Why not `torch.optim.Muon` and a second optimizer? `torch.optim.Muon` computes in bfloat16,
    where rounding differences between topologies become visible. It takes only two-dimensional
    matrices, one at a time, and does not support shards. And with FSDP, Accelerate saves only one
    optimizer.
    """

    @torch.no_grad()
    def step(self, closure=None):
        same_shape = {}
        for group in self.param_groups:
            for weight in group["params"] if group["muon"] else ():
                if weight.grad is None:  # frozen or unused
                    continue
                state = self.state[weight]
                # `step` is on the CPU, as AdamW expects it in every state that it loads.
                if not state:
                    state.update(
                        step=torch.zeros((), device="cpu"), momentum=torch.zeros_like(weight)
                    )
                kept = group["momentum"]
                if isinstance(kept, tuple | list):
                    first, last, steps = kept
                    kept = first + (last - first) * min(1.0, state["step"].item() / steps)
                state["step"] += 1
                momentum = state["momentum"].lerp_(weight.grad, 1 - kept)
                update = weight.grad.lerp(momentum, kept)
                weight.grad = None  # so that super().step() skips this weight
                alike = weight.shape, group.get("iterations", 5), group.get("beta2")
                same_shape.setdefault(alike, []).append((weight, update, group))
        for (shape, iterations, beta2), matrices in same_shape.items():
            updates = orthogonalize_all([update for _, update, _ in matrices], iterations)
            if beta2:
                updates = normalize_rows(
                    [self.state[weight] for weight, _, _ in matrices], updates, beta2
                )
            for (weight, _, group), update in zip(matrices, updates, strict=True):
                if group.get("fixed_norm"):
                    weight.mul_(len(weight) ** 0.5 / weight.norm())
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(
                    update, alpha=-group["lr"] * max(1, shape[0] / shape[1:].numel()) ** 0.5
                )
        return super().step(closure)


class MuonAdamW(Muon, torch.optim.AdamW):
    pass


class MuonSGD(Muon, torch.optim.SGD):
    pass


def orthogonalize_all(matrices, iterations):
    """`orthogonalize` for a list of weights of one shape.

    The weights are either all unsharded or all sharded in the same way.
    """
    first = matrices[0]
    if not isinstance(first, DTensor):
        return (
            orthogonalize(torch.stack(matrices).flatten(2), iterations)
            .reshape(-1, *first.shape)
            .unbind()
        )
    # A shard cannot be orthogonalized on its own. So redistribute: each process gets some of the
    # matrices, unsharded.
    rows = [Shard(1) if place.is_shard() else place for place in first.placements]
    whole = [Shard(0) if place.is_shard() else place for place in first.placements]
    shape = (len(matrices), *first.shape)
    like = dict(
        device_mesh=first.device_mesh,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    stack = DTensor.from_local(
        torch.stack([m.to_local() for m in matrices]), placements=rows, **like
    )
    stack = orthogonalize(stack.redistribute(placements=whole).to_local(), iterations)
    stack = (
        DTensor.from_local(stack, placements=whole, **like).redistribute(placements=rows).to_local()
    )
    like |= dict(shape=first.shape, stride=first.stride())
    return [DTensor.from_local(local, placements=first.placements, **like) for local in stack]


def normalize_rows(states, updates, beta2):
    """Divides each row of an update by the root of a running mean of its squared norm.

    The norm of the whole update stays.

    Args:
        states (list): the optimizer state of each weight. Holds the running means, without a bias
            correction: it would cancel.
        updates (list): tensors [rows, ...] of one shape, either all unsharded or all sharded in the
            same way.
        beta2 (float): the momentum of the running means.

    Returns:
        list: the new updates.
    """
    dims = tuple(range(1, updates[0].ndim))
    norms = torch.stack(
        [torch.linalg.vector_norm(update, dim=dims, keepdim=True) for update in updates]
    )
    for state, squares in zip(states, norms.square().unbind(), strict=True):
        if "row_squares" not in state:
            state["row_squares"] = torch.zeros_like(squares)
        state["row_squares"].lerp_(squares, 1 - beta2)
    scales = torch.stack([state["row_squares"] for state in states]).clamp(min=1e-16).rsqrt()
    # Of all matrices at once, because each norm is an all-reduce if the rows are sharded.
    scales = scales * (
        norms.norm(dim=1, keepdim=True) / (norms * scales).norm(dim=1, keepdim=True).clamp(min=1e-8)
    )
    return [update * scale for update, scale in zip(updates, scales.unbind(), strict=True)]


def orthogonalize(x, iterations=5):
    """Approximates the nearest orthogonal matrix: its singular values are near 1.

    Args:
        x: [count, rows, columns].

    Each Newton-Schulz iteration multiplies X from the left by a polynomial of the Gram matrix G = X
    X^T.
    """
    if x.size(1) > x.size(2):
        return orthogonalize(x.mT, iterations).mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    if x.size(2) < 1.5 * x.size(1):  # nearly square: the other way needs more operations
        for _ in range(iterations):
            x = _polynomial(x @ x.mT) @ x
        return x
    # The factors of all iterations are polynomials of the first Gram matrix, so they commute, and
    # only square matrices are multiplied inside the loop.
    gram = x @ x.mT
    product = factor = _polynomial(gram)
    for _ in range(iterations - 1):
        gram = factor @ gram @ factor
        factor = _polynomial(gram)
        product = factor @ product
    return product @ x


def _polynomial(gram):
    """3.4445 I - 4.7750 G + 2.0315 G^2, with the coefficients of K. Jordan."""
    polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
    polynomial.diagonal(dim1=1, dim2=2).add_(3.4445)
    return polynomial
