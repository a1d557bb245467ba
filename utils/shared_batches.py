"""Passes batches of images from the workers of a `DataLoader` to the training process in shared memory that is used again.

PyTorch takes new shared memory for every tensor of every batch. The system clears it, maps it page by page into both
processes and passes a file descriptor on, which takes longer than a cached picture takes to scale.
"""

import os
import threading

import numpy as np
import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef

_own = []  # in a worker: its buffers, uint8; the last byte says whether the training process uses the buffer
_attached, _lent = {}, []  # in the training process: (worker, number) -> buffer; (weak reference to a batch's memory, buffer)
_lock = threading.Lock()  # the thread that pins memory receives batches, too


class SharedBatch:
    """A batch in a worker; the training process receives it as a dict of tensors.

    A buffer is free when the training process has no tensor left that refers to it. So it can keep batches for as long as it
    wants: the worker then takes another buffer.
    """

    def __init__(self, images, **others):
        """Args: images: list of uint8 [height, width, channels] of one shape. others: small tensors, and anything else."""
        self._shape, self._others = (len(images), *images[0].shape), others
        size = images[0].numel() * len(images)
        self._number = next((i for i, b in enumerate(_own) if len(b) > size and not b[-1]), len(_own))
        self._new = self._number == len(_own)
        if self._new:
            _own.append(torch.empty(size + 1, dtype=torch.uint8).share_memory_())
        buffer = _own[self._number]
        buffer[-1] = 1
        torch.stack(images, out=buffer[:size].view(self._shape))

    def __reduce__(self):
        others = {name: value.numpy() if torch.is_tensor(value) else value for name, value in self._others.items()}
        return _receive, ((os.getpid(), self._number), _own[self._number] if self._new else None, self._shape, others)


def _receive(key, buffer, shape, others):
    """Returns `images`, uint8 [batch, channels, height, width] in channels-last memory format, and the rest of the batch."""
    with _lock:
        if buffer is not None:
            for other in [other for other in _attached if not psutil.pid_exists(other[0])]:  # of workers that have ended
                del _attached[other]
            _attached[key] = buffer
        for lent in [lent for lent in _lent if lent[0].expired()]:
            lent[1][-1] = 0
            _lent.remove(lent)
        buffer = _attached[key]
        # Memory of its own for PyTorch, which knows when the last tensor that uses it is gone.
        images = torch.frombuffer(buffer.numpy(), dtype=torch.uint8, count=int(np.prod(shape))).view(shape)
        _lent.append((StorageWeakRef(images.untyped_storage()), buffer))
    others = {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in others.items()}
    return {"images": images.permute(0, 3, 1, 2), **others}
