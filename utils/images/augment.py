"""Random crop, flip and cutout of a whole batch at once, on the device of its images.

The augmentation of a sample is a deterministic function of the seed, the epoch and the id of the
sample. So a sample looks the same in a given epoch on any number of processes, in any batch, before
and after a restart.
"""

import torch
import torch.nn.functional as F

from utils.run.draws import random_uint32


def augment(images, ids, epoch, seed, *, padding=2):
    """Shifts and flips a batch of images.

    The shift is a crop from the image padded by reflection. Whether a sample is flipped in the
    first epoch is random, and alternates from then on, so that two consecutive epochs show both
    versions (K. Jordan, arXiv:2404.00498).

    Args:
        images: uint8 [batch, channels, height, width].
        ids: int64 [batch], the samples' ids in the data set. The random numbers are drawn where
            they are: on the CPU, a GPU runs no kernels for them.
        padding (int): the largest shift in pixels.

    Returns:
        uint8 images of the same shape.
    """
    height, width = images.shape[-2:]
    down, across = (torch.arange(size, device=ids.device) for size in (height, width))
    top, left = (_random_shift(seed, epoch, ids, stream, padding) for stream in (0, 1))
    flipped = (random_uint32(seed, 0, ids, 2) + epoch) % 2 == 0
    rows = _reflect(down + top[:, None], height)
    mirrored = torch.where(flipped[:, None], across.flip(0), across)
    columns = _reflect(mirrored + left[:, None], width)
    # The flat index from which each pixel is copied: shift, reflection and flip are then a single
    # gather of bytes.
    rows, columns = to_device(torch.cat([rows * width, columns], 1), images.device).split(
        [height, width], 1
    )
    source = (rows[:, :, None] + columns[:, None, :]).flatten(1)
    source = source[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, source).view(images.shape)


def cut_out(images, ids, epoch, seed, side, color):
    """Paints a square in each image (T. DeVries, arXiv:1708.04552); its center is in the image.

    Args:
        images, ids: as for `augment`.
        side (int): of the square, in pixels.
        color: float32 [channels]; the mean of the data becomes 0 by `normalize`.

    Returns:
        uint8 images of the same shape.
    """
    inside = []  # per axis: whether a position is inside the square
    for stream, size in zip((3, 4), images.shape[-2:], strict=True):
        center = random_uint32(seed, epoch, ids, stream) % size
        offset = torch.arange(size, device=ids.device) - center[:, None] + side // 2
        inside.append(to_device((offset >= 0) & (offset < side), images.device))
    square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    return torch.where(square, color.round().to(torch.uint8).view(-1, 1, 1), images)


def normalize(images, mean, std, size=None):
    """Converts uint8 images [batch, 3, height, width] to zero mean and unit variance per channel.

    Args:
        mean, std: float32 [3], in units of the uint8 values.
        size (int | None): resize to this height and width, in pixels.

    Returns:
        float32 [batch, 3, size, size], in channels-last memory format.
    """
    # Broadcasting the three values of a pixel takes twice as long, where channels are last. `eps`
    # must be positive; this one changes nothing.
    images = F.batch_norm(images.float(), mean, std.square(), eps=1e-12)
    if size is not None and size != images.shape[-1]:
        images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    return images.contiguous(memory_format=torch.channels_last)


def _random_shift(seed, epoch, ids, stream, padding):
    """Random integers from -padding to padding, int64 [batch]."""
    return random_uint32(seed, epoch, ids, stream) % (2 * padding + 1) - padding


def _reflect(position, size):
    return (size - 1) - (size - 1 - position.abs()).abs()


def to_device(tensor, device):
    """Copies a tensor to a GPU from pinned memory: the host does not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
