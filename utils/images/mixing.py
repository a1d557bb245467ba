"""Mixup and CutMix of a global batch, however it is split over processes and micro-batches."""

import torch
from torch.nn.functional import one_hot
from torchvision.transforms import v2

from utils.data.permutation import sample_seed


class Mix:
    """Mixes each image with its partner in the global batch, where positions 2k and 2k + 1 pair up.

    The method, the share and the box are a deterministic function of the seed and the step, so they
    are the same for the whole global batch. A process has both images of a pair if it has an even
    number of consecutive images.
    """

    def __init__(self, mixup, cutmix, classes, seed):
        """
        Args:
            mixup (float): alpha of Mixup (arXiv:1710.09412); 0: without it.
            cutmix (float): alpha of CutMix (arXiv:1905.04899); 0: without it.
            classes (int): number of classes.
            seed (int): of the run.
        """
        pairs = ((v2.MixUp, mixup), (v2.CutMix, cutmix))
        methods = [method(alpha=alpha) for method, alpha in pairs if alpha]
        self._mix, self._classes, self._seed = v2.RandomChoice(methods), classes, seed

    def __call__(self, images, labels, step):
        """Mixes the images of a micro-batch.

        Args:
            images: float [batch, channels, height, width]; the batch is even.
            labels: int64 [batch].
            step (int): of the optimizer.

        Returns:
            tuple: images of the same shape; the share of each class, float32 [batch, classes].
        """
        labels = one_hot(labels, self._classes).float()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(sample_seed(self._seed, step, -2))
            # The library mixes a batch with itself shifted by one: of two items, each with the
            # other. So the first images of all pairs form one item, with the channels of all of
            # them, and the second images the other.
            images, labels = self._mix(_fold(images), _fold(labels))
        count = len(labels[0]) // self._classes
        images = _unfold(images.view(2, count, -1, *images.shape[2:]))
        images = images.contiguous(memory_format=torch.channels_last)
        return images, _unfold(labels.view(2, count, -1))


def _fold(x):
    """[2 n, size, ...] -> [2, n size, ...]"""
    return x.unflatten(0, (-1, 2)).transpose(0, 1).flatten(1, 2)


def _unfold(x):
    """[2, n, size, ...] -> [2 n, size, ...]"""
    return x.transpose(0, 1).flatten(0, 1)
