"""The exponential moving average of the weights of a model."""

import copy

import torch
from accelerate.utils import broadcast


class MovingAverage:
    """The exponential moving average of all parameters and buffers of a model.

    `torch.optim.swa_utils.AveragedModel` computes the same. But it counts its updates in a buffer
    on the CPU, which cannot be sent over NCCL with the other buffers, and which it copies to the
    device in every update, so that the host waits twice. This class counts in Python.

    Attributes:
        module (nn.Module): a copy of the model, which holds the averages.
        updates (int): the number of updates so far.
    """

    def __init__(self, model, decay_at):
        """Args: decay_at (Callable): the decay of an update, given the number of those before."""
        self.module, self.updates, self._decay_at = copy.deepcopy(model), 0, decay_at

    @torch.no_grad()
    def update(self, model):
        """Averages in the present weights of the model; the first update copies them.

        Buffers of integers, such as the number of batches that a batch norm has seen, are copied.
        """
        decay = self._decay_at(self.updates) if self.updates else 0.0
        averages, values, counts, new_counts = [], [], [], []
        for average, value in zip(_tensors(self.module), _tensors(model), strict=True):
            floating = average.is_floating_point()
            (averages if floating else counts).append(average)
            (values if floating else new_counts).append(value)
        torch._foreach_lerp_(averages, values, 1 - decay)
        if counts:
            torch._foreach_copy_(counts, new_counts)
        self.updates += 1

    def broadcast_buffers(self):
        """Gives every process the buffers of the first, as DDP does: statistics of batch norm."""
        for buffer in self.module.buffers():
            broadcast(buffer)

    def state_dict(self):
        """The state in the format of `AveragedModel`, which `checkpoint_weights` recognizes."""
        averages = {f"module.{name}": value for name, value in self.module.state_dict().items()}
        return {"n_averaged": self.updates, **averages}

    def load_state_dict(self, state):
        """Restores a state of this class, or of an `AveragedModel`, whose count is a tensor."""
        averages = {
            name.removeprefix("module."): value
            for name, value in state.items()
            if name != "n_averaged"
        }
        self.module.load_state_dict(averages)
        self.updates = int(state["n_averaged"])


def _tensors(model):
    return [*model.parameters(), *model.buffers()]
