"""Mixup and CutMix of a global batch, whatever the processes and micro-batches over which it is split."""

import torch
from torch.nn.functional import one_hot
from torchvision.transforms import v2

from utils.image_files import sample_seed


class Mix:
    """Mixes each picture with its partner: of the global batch, the pictures at positions 2k and 2k + 1 are partners.

    Which of the two methods, the share and the box follow from the seed and the step, so they are the same for the whole
    global batch. A process has both of a pair if it has an even number of consecutive pictures.
    """

    def __init__(self, mixup, cutmix, classes, seed):
        """Args: mixup, cutmix (float): alpha of Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899); 0: without it."""
        methods = [method(alpha=alpha) for method, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix)) if alpha]
        self._mix, self._classes, self._seed = v2.RandomChoice(methods), classes, seed

    def __call__(self, images, labels, step):
        """Mixes the pictures of a micro-batch.

        Args:
            images: float [batch, channels, height, width]; the batch is even.
            labels: int64 [batch].

        Returns:
            tuple: images of the same shape; the share of each class, float32 [batch, classes].
        """
        labels = one_hot(labels, self._classes).float()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(sample_seed(self._seed, step, -2))
            # The library mixes a batch with itself shifted by one: of two, each with the other. So the first pictures of all
            # pairs form one item, with the channels of all of them, and the second ones the other.
            images, labels = self._mix(_fold(images), _fold(labels))
        count = len(labels[0]) // self._classes
        images = _unfold(images.view(2, count, -1, *images.shape[2:])).contiguous(memory_format=torch.channels_last)
        return images, _unfold(labels.view(2, count, -1))


def _fold(x):
    """[2 n, size, ...] -> [2, n size, ...]"""
    return x.unflatten(0, (-1, 2)).transpose(0, 1).flatten(1, 2)


def _unfold(x):
    """[2, n, size, ...] -> [2 n, size, ...]"""
    return x.transpose(0, 1).flatten(0, 1)
