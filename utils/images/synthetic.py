"""Draws images of patterns, for runs without a data set."""

import math

import numpy as np
import torch

from utils.images.decoding import Images
from utils.images.storage import Pixels

SIZE = 32  # pixels, square
# Arguments: offset (a, b) of a pixel from the center (right, down), angular frequency p, phase q,
# radius r, line width w.
CLASSES = {
    "rows": lambda a, b, p, q, r, w: torch.sin(b * p + q).expand(-1, -1, SIZE),
    "columns": lambda a, b, p, q, r, w: torch.sin(a * p + q).expand(-1, SIZE, -1),
    "checks": lambda a, b, p, q, r, w: torch.sin(a * p + q) * torch.sin(b * p + q),
    "rings": lambda a, b, p, q, r, w: torch.sin((a * a + b * b).sqrt() * p + q),
    "squares": lambda a, b, p, q, r, w: torch.sin(_square(a, b) * p + q),
    "diamonds": lambda a, b, p, q, r, w: torch.sin((a.abs() + b.abs()) * p / 2**0.5 + q),
    "disk": lambda a, b, p, q, r, w: r - (a * a + b * b).sqrt(),
    "block": lambda a, b, p, q, r, w: r * 0.9 - _square(a, b),
    "plus": lambda a, b, p, q, r, w: w - torch.minimum(a.abs(), b.abs()) - 4 * (_square(a, b) > r),
    "cross": lambda a, b, p, q, r, w: (
        w - ((a - b).abs().minimum((a + b).abs())) / 2**0.5 - 4 * (_square(a, b) > r)
    ),
}


def _square(a, b):
    """The distance from the center for which all points at the same distance form a square."""
    return torch.maximum(a.abs(), b.abs())


def draw_patterns(seed, count):
    """Draws ten kinds of patterns with random position, scale, phase and two colors, with noise.

    Because of the random phases and colors, a linear model has a low accuracy; a small
    convolutional network learns all ten classes. The same seed gives the same images on every
    machine, all different.

    Returns:
        tuple: images, uint8 [count, 3, 32, 32]; labels, int64 [count], in the order of `CLASSES`.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return torch.rand(count, *shape, generator=generator) * (high - low) + low

    labels = torch.randint(10, (count,), generator=generator)
    coordinate = torch.arange(SIZE, dtype=torch.float32)
    u = coordinate.view(1, 1, -1) - uniform(11, 21, 1, 1)
    v = coordinate.view(1, -1, 1) - uniform(11, 21, 1, 1)
    frequency = uniform(2 * math.pi / 10, 2 * math.pi / 6, 1, 1)
    phase = uniform(0, 2 * math.pi, 1, 1)
    radius, width = uniform(5, 10, 1, 1), uniform(1.2, 2.4, 1, 1)
    pattern = torch.empty(count, SIZE, SIZE)
    for label, draw in enumerate(CLASSES.values()):
        chosen = labels == label
        values = (u, v, frequency, phase, radius, width)
        pattern[chosen] = draw(*(value[chosen] for value in values))
    blend = torch.sigmoid(3 * pattern)[:, None]
    background = uniform(20, 235, 3, 1, 1)
    # Brighter or darker than the background by 60 to 120 levels, and then changed by up to 30 in
    # each channel.
    direction = torch.where(background.mean(1, keepdim=True) > 127, -1, 1)
    foreground = background + direction * uniform(60, 120, 1, 1, 1) + uniform(-30, 30, 3, 1, 1)
    images = (foreground.clamp(0, 255) - background) * blend
    images += background
    images += torch.randn(images.shape, generator=generator).mul_(18)
    return images.clamp_(0, 255).to(torch.uint8), labels


def draw_splits(seed, **counts):
    """Patterns for splits of so many images: the splits (dict of `Images`), and class names."""
    drawn, labels = draw_patterns(seed, sum(counts.values()))
    pixels, labels, splits = drawn.permute(0, 2, 3, 1).contiguous().numpy(), labels.numpy(), {}
    for split, count in counts.items():
        source = Pixels(pixels[:count], f"synthetic, {split} split", f"{seed} {counts}")
        splits[split] = Images(source, np.arange(count), labels[:count])
        pixels, labels = pixels[count:], labels[count:]
    return splits, list(CLASSES)


# The names of data sets -> how many images their splits have.
COUNTS = {
    "synthetic": {"train": 1000, "val": 200},
    "synthetic in memory": {"train": 5000, "test": 1000},
}
