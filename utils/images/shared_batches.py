"""Passes batches of images from loader workers to the training process in reused shared memory.

PyTorch takes new shared memory for every tensor of every batch. The system clears it, maps it page
by page into both processes and passes a file descriptor on, which takes longer than a cached image
takes to scale.
"""

import os
import threading

import numpy as np
import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef

# In a worker: its buffers, uint8; the last byte says whether the training process uses the buffer.
_own = []
# In the training process: (worker, number) -> buffer.
_attached = {}
# In the training process: pairs of a weak reference to a batch's memory and its buffer.
_lent = []
_lock = threading.Lock()  # the thread that pins memory receives batches, too


class SharedBatch:
    """A batch in a worker; the training process receives it as a dict of tensors.

    A buffer is free when the training process has no tensor left that refers to it. So that process
    can keep batches for as long as it wants: the worker then takes another buffer.
    """

    def __init__(self, images, **others):
        """
        Args:
            images: list of uint8 [height, width, channels], all of one shape.
            others: small tensors, and anything else.
        """
        self._shape, self._others = (len(images), *images[0].shape), others
        size = images[0].numel() * len(images)
        free = (i for i, b in enumerate(_own) if len(b) > size and not b[-1])
        self._number = next(free, len(_own))
        self._new = self._number == len(_own)
        if self._new:
            _own.append(torch.empty(size + 1, dtype=torch.uint8).share_memory_())
        buffer = _own[self._number]
        buffer[-1] = 1
        torch.stack(images, out=buffer[:size].view(self._shape))

    def __reduce__(self):
        others = {
            name: value.numpy() if torch.is_tensor(value) else value
            for name, value in self._others.items()
        }
        key, buffer = (os.getpid(), self._number), _own[self._number] if self._new else None
        return _receive, (key, buffer, self._shape, others)


def _receive(key, buffer, shape, others):
    """Turns what a worker sent into a batch.

    Returns:
        dict: `images`, uint8 [batch, channels, height, width] in channels-last memory format, and
        the rest of the batch.
    """
    with _lock:
        if buffer is not None:
            ended = [other for other in _attached if not psutil.pid_exists(other[0])]
            for other in ended:
                del _attached[other]
            _attached[key] = buffer
        for lent in [lent for lent in _lent if lent[0].expired()]:
            lent[1][-1] = 0
            _lent.remove(lent)
        buffer = _attached[key]
        # A storage of its own, because PyTorch knows when the last tensor that uses it is gone.
        count = int(np.prod(shape))
        images = torch.frombuffer(buffer.numpy(), dtype=torch.uint8, count=count).view(shape)
        _lent.append((StorageWeakRef(images.untyped_storage()), buffer))
    others = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in others.items()
    }
    return {"images": images.permute(0, 3, 1, 2), **others}
