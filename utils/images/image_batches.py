"""A data set that decodes and transforms images and returns whole batches."""

import sys

import torch
from torch.utils.data import Dataset, get_worker_info

from utils.images.decoding import BadImage
from utils.run.failures import UserError


class ImageBatches(Dataset):
    """Returns whole batches to a `DataLoader`, for a list of ids or of (epoch, id).

    A batch is a dict: `images`, uint8 [batch, 3, size, size] in channels-last memory format;
    `labels` and `ids`, int64 [batch].
    """

    def __init__(self, images, transform, on_bad="stop", replace=False):
        """
        Args:
            images (Images | CachedImages): a split.
            transform (EvalTransform | TrainTransform): what each image goes through.
            on_bad (str): `stop`: an image that cannot be read is an error; `skip`: it is left out,
                with a warning.
            replace (bool): the next image that can be read takes its place; otherwise, its pixels
                are 0 and its label is -1.
        """
        self.images, self.size, self._transform = images, transform.size, transform
        self._skip, self._replace, self._warned = on_bad == "skip", replace, set()

    def __len__(self):
        return len(self.images)

    def name(self, index):
        """The path of an image, or the row in which it is."""
        return self.images.name(index)

    def __getitems__(self, keys):
        """Returns a batch. Raises UserError, on this process only, for an image that is refused."""
        keys = [key if isinstance(key, tuple) else (0, key) for key in keys]
        with torch.random.fork_rng(devices=[]):  # the transforms seed the global generator
            pixels, labels = zip(*(self._transformed(*key) for key in keys), strict=True)
        ids = torch.tensor([index for _, index in keys])
        images = torch.stack(pixels).permute(0, 3, 1, 2)
        return {"images": images, "labels": torch.tensor(labels), "ids": ids}

    def _transformed(self, epoch, index):
        """An image, uint8 [size, size, 3], and its label."""
        count = len(self)
        for candidate in range(index, index + count if self._replace else index + 1):
            candidate %= count
            try:
                pixels = self._transform(self.images.open(candidate), epoch, candidate)
            except BadImage as error:
                self._refuse(candidate, error)
            else:
                return pixels.permute(1, 2, 0), int(self.images.labels[candidate])
        if self._replace:
            raise UserError("none of the training images can be read", None)
        return torch.zeros(self.size, self.size, 3, dtype=torch.uint8), -1

    def _refuse(self, index, error):
        """Warns of an image that cannot be read, once, or raises UserError."""
        line = f"cannot read {self.name(index)}: {error}"
        if not self._skip:
            # Only this process knows: it prints.
            raise UserError(
                f"{line}; replace or remove it, or leave it out with --on_bad_image skip", None
            )
        if index not in self._warned:
            self._warned.add(index)
            worker = f" (worker {get_worker_info().id})" if get_worker_info() else ""
            print(f"warning{worker}: left out: {line}", file=sys.stderr, flush=True)
