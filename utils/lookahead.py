"""An optimizer that averages its weights as it goes."""

import torch


class LookaheadSGD(torch.optim.SGD):
    """SGD that returns, every fifth step, to a slow moving average of its weights (M. Zhang, arXiv:1907.08610).

    The average is part of the optimizer's state, so it is saved and restored with it.
    """

    def __init__(self, parameters, total_steps, **kwargs):
        super().__init__(parameters, **kwargs)
        self.defaults["total_steps"] = total_steps
        for group in self.param_groups:
            group.update(total_steps=total_steps, done=0)

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["done"] += 1
            # Follows the weights closely at first, and slower and slower.
            inertia = 0.95**5 * (group["done"] / group["total_steps"]) ** 3
            for weight in group["params"] if group["done"] % 5 == 0 else ():
                slow = self.state[weight].setdefault("slow", weight.clone())
                weight.copy_(slow.lerp_(weight, 1 - inertia))
