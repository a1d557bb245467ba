"""Muon for matrices and convolution filters, with AdamW or SGD for the other parameters."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

FIRST = 3.4445  # coefficient of the polynomial's first term


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

    Why not `torch.optim.Muon` and a second optimizer? `torch.optim.Muon` computes in bfloat16 also
    on a CPU, where rounding differences between topologies become visible. It takes only
    two-dimensional matrices, one at a time, and does not support shards. And with FSDP, Accelerate
    saves only one optimizer.
    """

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group["muon"]:
                self._step_group(group)
        return super().step(closure)

    def _step_group(self, group):
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if not weights:  # frozen or unused
            return
        states = [self.state[weight] for weight in weights]
        for state, weight in zip(states, weights, strict=True):
            if not state:
                # `step` is on the CPU, as AdamW expects it in every state that it loads.
                state.update(step=torch.zeros((), device="cpu"), momentum=torch.zeros_like(weight))
        momentum = group["momentum"]
        if isinstance(momentum, tuple | list):
            first, last, steps = momentum
            momentum = first + (last - first) * min(1.0, states[0]["step"].item() / steps)
        # Operations on lists: on a GPU, one kernel for all weights.
        updates, momenta = [w.grad for w in weights], [state["momentum"] for state in states]
        torch._foreach_add_([state["step"] for state in states], 1)
        torch._foreach_lerp_(momenta, updates, 1 - momentum)
        torch._foreach_lerp_(updates, momenta, momentum)
        updates = orthogonalize_all(updates, group.get("iterations", 5), group.get("beta2"), states)
        if group.get("fixed_norm"):
            torch._foreach_div_(weights, torch._foreach_norm(weights))
            torch._foreach_mul_(weights, [len(weight) ** 0.5 for weight in weights])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        ratios = [max(1, len(weight) / weight.shape[1:].numel()) for weight in weights]
        torch._foreach_mul_(updates, [-group["lr"] * ratio**0.5 for ratio in ratios])
        torch._foreach_add_(weights, updates)
        for weight in weights:
            weight.grad = None  # so that super().step() skips this weight


class MuonAdamW(Muon, torch.optim.AdamW):
    pass


class MuonSGD(Muon, torch.optim.SGD):
    pass


def orthogonalize_all(updates, iterations, beta2=None, states=()):
    """`orthogonalize` for a list of updates [rows, ...], and with `beta2` then `normalize_rows`.

    Those of one shape are computed together. So are, on a GPU, filters with as many outputs: it
    waits longer for the launches of kernels than for their operations.

    Args:
        states (list): the optimizer state of each update, for `normalize_rows`.
    """
    places = {}
    for place, update in enumerate(updates):
        filters = update.ndim == 4 and not isinstance(update, DTensor) and not beta2
        key = len(update) if filters and update.is_cuda else update.shape
        places.setdefault(key, []).append(place)
    results = [None] * len(updates)
    for alike in places.values():
        computed = _orthogonalize_alike([updates[place] for place in alike], iterations)
        if beta2:
            computed = normalize_rows([states[place] for place in alike], computed, beta2)
        for place, result in zip(alike, computed, strict=True):
            results[place] = result
    return results


def _orthogonalize_alike(matrices, iterations):
    """`orthogonalize` for a list of [rows, ...]: unsharded, or of one shape and sharding."""
    first = matrices[0]
    if not isinstance(first, DTensor):
        flat = [matrix.flatten(1) for matrix in matrices]
        # Columns of zeros stay zero, and do not change the others.
        width = max(matrix.size(1) for matrix in flat)
        filled = [F.pad(m, (0, width - m.size(1))) if m.size(1) < width else m for m in flat]
        results = orthogonalize(torch.stack(filled), iterations)
        return [
            result[:, : matrix[0].numel()].reshape(matrix.shape)
            for matrix, result in zip(matrices, results, strict=True)
        ]
    # A shard cannot be orthogonalized on its own. So redistribute: each process gets some of the
    # matrices, unsharded.
    rows = torch.stack(matrices)
    whole = [Shard(0) if place.is_shard() else place for place in rows.placements]
    local = orthogonalize(rows.redistribute(placements=whole).to_local(), iterations)
    like = dict(run_check=False, shape=rows.shape, stride=rows.stride())
    made = DTensor.from_local(local, rows.device_mesh, whole, **like)
    return made.redistribute(placements=rows.placements).unbind()


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


def orthogonalize(x, iterations=5, half=None):
    """Approximates the nearest orthogonal matrix: its singular values are near 1.

    Each Newton-Schulz iteration multiplies X from the left by a polynomial of the Gram matrix G = X
    X^T: 3.4445 I - 4.7750 G + 2.0315 G^2, with the coefficients of K. Jordan.

    Args:
        x: [count, rows, columns].
        half (bool | None): compute in float16, in which GPUs multiply matrices many times as fast;
            None: on a GPU. Of the two half precisions it rounds less: no value is far from 1, and
            so the range of bfloat16 is not needed.
    """
    if x.size(1) > x.size(2):
        return orthogonalize(x.mT, iterations, half).mT
    dtype, half = x.dtype, x.is_cuda if half is None else half
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    if half or x.size(2) < 1.5 * x.size(1):
        x = x.half() if half else x
        for _ in range(iterations):
            x = _times(_higher_terms(x @ x.mT), x)
        return x.to(dtype)
    # The factors of all iterations are polynomials of the first Gram matrix, so they commute, and
    # only square matrices are multiplied inside the loop. For wide matrices these are fewer
    # operations. In half precision, rounding errors would grow.
    gram = x @ x.mT
    terms = _higher_terms(gram)
    product = terms.clone()
    product.diagonal(dim1=1, dim2=2).add_(FIRST)
    for _ in range(iterations - 1):
        gram = _times(terms, _times(terms, gram))
        terms = _higher_terms(gram)
        product = _times(terms, product)
    return product @ x


def _higher_terms(gram):
    """The polynomial without its first term: -4.7750 G + 2.0315 G^2."""
    return torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)


def _times(terms, x):
    """The product of the polynomial and `x`."""
    return torch.baddbmm(x, terms, x, beta=FIRST)
