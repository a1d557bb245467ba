"""Transforms of single images: for evaluation, and for training with random numbers of their own.

What happens to an image is a deterministic function of the seed, the epoch and its id.
"""

import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from utils.data.permutation import sample_seed
from utils.images.decoding import BadImage

REDUCTIONS = (8, 4, 2)  # by which the decoder of JPEG can divide the size, at less work
LONGEST = 32  # times the shorter side: scaling an image of 10,000 x 1 pixels would need gigabytes


def reduction_for(width, height, wanted_width, wanted_height):
    """How much smaller a part of an image can be decoded.

    Returns:
        int: the largest reduction with which a part of `width` x `height` pixels still has
        `wanted_width` x `wanted_height`.
    """
    for reduction in REDUCTIONS:
        if width >= reduction * wanted_width and height >= reduction * wanted_height:
            return reduction
    return 1


def shrink(image, side, interpolation="bilinear"):
    """Scales an image so that its shorter side has `side` pixels.

    A JPEG is decoded to twice that size or more, which changes what is left after scaling by less
    than a level on average.

    Args:
        image (Encoded | Scaled): see `images` and `image_cache`.

    Returns:
        uint8 [3, height, width], in channels-last memory format.

    Raises:
        BadImage: the data is damaged, or the longer side is more than `LONGEST` times the shorter.
    """
    if max(image.width, image.height) > LONGEST * min(image.width, image.height):
        raise BadImage(f"it is {image.width} x {image.height} pixels, too long: cut it")
    pixels = image.pixels(reduction_for(image.width, image.height, 2 * side, 2 * side))
    if min(pixels.shape[1:]) == side:
        return pixels
    return F.resize(pixels, [side], InterpolationMode(interpolation), antialias=True)


class EvalTransform:
    """Scales the shorter side to `resize` pixels and crops the center to `crop` x `crop`."""

    def __init__(self, preprocess):
        """
        Args:
            preprocess (dict): `resize`, `crop` and `interpolation`, as `pretrained.preprocessing`
                returns them.
        """
        self.size, self._resize = preprocess["crop"], preprocess["resize"]
        self._interpolation = preprocess["interpolation"]

    def __call__(self, image, epoch=0, index=0):
        """Returns uint8 [3, crop, crop]; not random."""
        pixels = shrink(image, self._resize, self._interpolation)
        return F.center_crop(pixels, [self.size, self.size])


class TrainTransform:
    """A random part of the image, scaled; flipped, changed in color and shape, and partly erased.

    Args:
        seed (int): of the run.
        preprocess (dict): `crop`, height and width of the result in pixels; `interpolation`; and
            `mean`, which becomes the color of erased pixels.
        min_scale (float): the smallest part, as a share of the area.
        flip, random_erasing (float): probabilities.
        auto_augment (str): `trivial` (TrivialAugmentWide, arXiv:2103.10158), `rand` (RandAugment,
            arXiv:1909.13719) or `none`.
    """

    def __init__(
        self,
        seed,
        preprocess,
        *,
        min_scale=0.08,
        flip=0.5,
        auto_augment="none",
        random_erasing=0.0,
    ):
        self.size, self._seed, self._flip = preprocess["crop"], seed, flip
        self._interpolation = InterpolationMode(preprocess["interpolation"])
        self._crop = v2.RandomResizedCrop(self.size, scale=(min_scale, 1.0))
        choices = {"trivial": v2.TrivialAugmentWide, "rand": v2.RandAugment, "none": None}
        choice = choices[auto_augment]
        self._augment = choice(interpolation=self._interpolation) if choice else None
        color = [round(255 * value) for value in preprocess["mean"]]
        self._erase = v2.RandomErasing(random_erasing, value=color) if random_erasing else None

    def __call__(self, image, epoch, index):
        """Transforms an image.

        Seeds torch's generator: all random numbers are a deterministic function of the seed,
        `epoch` and `index`.

        Args:
            image (Encoded | Scaled): see `images` and `image_cache`.
            epoch, index (int): of the sample.

        Returns:
            uint8 [3, size, size].

        Raises:
            BadImage: the data is damaged.
        """
        torch.default_generator.manual_seed(sample_seed(self._seed, epoch, index))
        # The library draws the part before the image is decoded: it needs no more than the size.
        whole = torch.empty(3, image.height, image.width, device="meta")
        part = self._crop.make_params([whole])
        reduction = reduction_for(part["width"], part["height"], self.size, self.size)
        pixels = _cut_out(image.pixels(reduction), part, image)
        pixels = F.resize(pixels, [self.size, self.size], self._interpolation, antialias=True)
        if torch.rand(()) < self._flip:
            pixels = F.horizontal_flip(pixels)
        if self._augment is not None:
            # As a Pillow image: rotations and shears then take a third of the time.
            pixels = F.pil_to_tensor(self._augment(F.to_pil_image(pixels)))
        return self._erase(pixels) if self._erase is not None else pixels


def _cut_out(pixels, part, image):
    """Cuts a part of `image` out of its decoded pixels, which may be fewer."""
    height, width = pixels.shape[1:]
    vertical, horizontal = height / image.height, width / image.width
    top, left = int(part["top"] * vertical), int(part["left"] * horizontal)
    rows = max(1, round(part["height"] * vertical))
    columns = max(1, round(part["width"] * horizontal))
    pixels = pixels[:, top : top + rows, left : left + columns]
    # A view of the whole would be scaled on the slow path, to another memory format.
    return pixels.permute(1, 2, 0).contiguous().permute(2, 0, 1)
