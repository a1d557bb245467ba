"""From encoded images to whole batches.

What happens to an image is a deterministic function of the seed, the epoch and its id.
"""

import sys

import torch
from torch.utils.data import Dataset, get_worker_info
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from utils.data.loaders import sample_seed
from utils.images.decoding import BadImage
from utils.run.failures import UserError

REDUCTIONS = (8, 4, 2)  # by which the decoder of JPEG can divide the size, at less work
LONGEST = 32  # times the shorter side: scaling an image of 10,000 x 1 pixels would need gigabytes


def reduction_for(width, height, wanted_width, wanted_height):
    """How much smaller a part of an image can be decoded: it keeps the wanted size or more."""
    for reduction in REDUCTIONS:
        if width >= reduction * wanted_width and height >= reduction * wanted_height:
            return reduction
    return 1


class EvalTransform:
    """Scales the shorter side to `resize` pixels and crops the center to `crop` x `crop`."""

    def __init__(self, preprocess):
        """Args: preprocess (dict): as `pretrained.preprocessing` returns it."""
        self.size, self._resize = preprocess["crop"], preprocess["resize"]
        self._interpolation = InterpolationMode(preprocess["interpolation"])

    def __call__(self, image, epoch=0, index=0):
        """Returns uint8 [3, crop, crop]; not random.

        A JPEG is decoded to twice the size or more, which changes what is left after scaling by
        less than a level on average. Raises BadImage if the data is damaged, or if the longer side
        is more than `LONGEST` times the shorter.
        """
        if max(image.width, image.height) > LONGEST * min(image.width, image.height):
            raise BadImage(f"it is {image.width} x {image.height} pixels, too long: cut it")
        minimum = 2 * self._resize
        pixels = image.pixels(reduction_for(image.width, image.height, minimum, minimum))
        if min(pixels.shape[1:]) != self._resize:
            pixels = F.resize(pixels, [self._resize], self._interpolation)
        return F.center_crop(pixels, [self.size, self.size])


class TrainTransform:
    """A random part of the image, scaled; flipped, and changed in color and shape.

    Args:
        seed (int): of the run.
        preprocess (dict): `crop`, height and width of the result in pixels; `interpolation`.
        min_scale (float): the smallest part, as a share of the area.
        flip (float): probability.
        auto_augment (str): `trivial` (TrivialAugmentWide, arXiv:2103.10158), `rand` (RandAugment,
            arXiv:1909.13719) or `none`.
    """

    def __init__(self, seed, preprocess, *, min_scale=0.08, flip=0.5, auto_augment="none"):
        self.size, self._seed, self._flip = preprocess["crop"], seed, flip
        self._interpolation = InterpolationMode(preprocess["interpolation"])
        self._crop = v2.RandomResizedCrop(self.size, scale=(min_scale, 1.0))
        choices = {"trivial": v2.TrivialAugmentWide, "rand": v2.RandAugment, "none": None}
        choice = choices[auto_augment]
        self._augment = choice(interpolation=self._interpolation) if choice else None

    def __call__(self, image, epoch, index):
        """Transforms an image (Encoded) to uint8 [3, size, size].

        Seeds torch's generator: all random numbers are a deterministic function of the seed,
        `epoch` and `index`. Raises BadImage if the data is damaged.
        """
        torch.default_generator.manual_seed(sample_seed(self._seed, epoch, index))
        # The library draws the part before the image is decoded: it needs no more than the size.
        whole = torch.empty(3, image.height, image.width, device="meta")
        part = self._crop.make_params([whole])
        reduction = reduction_for(part["width"], part["height"], self.size, self.size)
        pixels = _cut_out(image.pixels(reduction), part, image)
        pixels = F.resize(pixels, [self.size, self.size], self._interpolation)
        if torch.rand(()) < self._flip:
            pixels = F.horizontal_flip(pixels)
        if self._augment is not None:
            # As a Pillow image: rotations and shears then take a third of the time.
            pixels = F.pil_to_tensor(self._augment(F.to_pil_image(pixels)))
        return pixels


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


class ImageBatches(Dataset):
    """Returns whole batches to a `DataLoader`, for a list of ids or of (epoch, id).

    A batch is a dict: `images`, uint8 [batch, 3, size, size] in channels-last memory format;
    `labels` and `ids`, int64 [batch].
    """

    def __init__(self, images, transform, on_bad="stop", replace=False):
        """
        Args:
            images (Images): a split.
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
