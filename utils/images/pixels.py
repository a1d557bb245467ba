"""Pixel values of more than 8 bits and floats become 0 to 255, in one way for a whole data set.

A 16-bit file may have values up to 4095 or to 65535, and a float up to 1 or to 255. What is black
and what is white is decided once, by what the files say or by the values of a sample. It is called
the scaling of a data set: a dict with `integer`, `float` or both, each [black, white].
"""

import contextlib
import struct
import zlib

import numpy as np
from PIL import Image

from utils.run.failures import UserError

SAMPLE = 64  # images of which the values are read
SAMPLED_VALUES = 20_000  # of each
OUTLIERS = (1e-4, 1 - 1e-4)  # quantiles
PNG = b"\x89PNG\r\n\x1a\n"
# For an image that is not like those of the sample.
DEFAULTS = {"integer": [0, 65535], "float": [0, 1]}
TIFF_BITS = 258  # for each channel
TIFF_RANGES = ((340, 341), (280, 281))  # smallest and largest value: of each sample, of all
PNG_COLORS = (2, 4, 6)  # color types with several values per pixel


def kind_of(image, data):
    """`integer` or `float` for values that are not 8 bits; else None.

    Args:
        image (PIL.Image.Image): of which only the header has been read.
        data (bytes): its file.
    """
    if image.mode.startswith("F"):
        return "float"
    return "integer" if image.mode.startswith("I") or _is_deep_color(data) else None


def to_8_bits(image, data, scaling):
    """Scales the values of an image; one with 8 bits is returned as it is.

    Args:
        image, data: as for `kind_of`.
        scaling (dict): of the data set.

    Returns:
        PIL.Image.Image: of mode L, RGB or RGBA if the values were scaled.
    """
    kind = kind_of(image, data)
    if kind is None:
        return image
    values, alpha = _values(image, data)
    black, white = scaling.get(kind) or DEFAULTS[kind]
    with np.errstate(invalid="ignore"):
        scaled = (values.astype(np.float64) - black) * (255 / (white - black))
    levels = np.nan_to_num(scaled, posinf=255).clip(0, 255).round().astype(np.uint8)
    if alpha is not None:
        levels = np.dstack([levels] * (3 if levels.ndim == 2 else 1) + [alpha // 257])
        levels = levels.astype(np.uint8)
    return Image.fromarray(levels)


def find_scaling(name, opened):
    """Decides what is black and what is white in a data set.

    Args:
        name (str): the data set, for messages.
        opened: yields (PIL.Image.Image, bytes) of a sample of its images.

    Returns:
        tuple[dict, list[str]]: the scaling, {} if all images have 8 bits; a line about each kind.

    Raises:
        UserError: the values cannot be read.
    """
    found, said, upper = {}, {}, []
    for image, data in opened:
        kind = kind_of(image, data)
        if _is_deep_tiff(image):
            with contextlib.suppress(Exception):  # as below
                upper.append(np.asarray(image).max())
        if kind is None:
            continue
        with contextlib.suppress(Exception):  # whatever the decoders of damaged data stumble over
            values = _values(image, data)[0].ravel()
            values = values[np.isfinite(values)]
            if len(values):
                distance = max(1, len(values) // SAMPLED_VALUES)
                found.setdefault(kind, []).append(values[::distance])
                said.setdefault(kind, set()).add(_said_range(image))
    if upper and max(upper) < 128:
        raise UserError(
            f"--dataset {name}: of its TIFF images in color with 16 bits Pillow reads the upper 8 "
            "bits, and they use the lower ones, too: convert them to PNG"
        )
    scaling, lines = {}, []
    for kind, values in sorted(found.items()):
        # Without the few values of pixels that are broken or in a reflection.
        low, high = np.quantile(np.concatenate(values), OUTLIERS, method="nearest").tolist()
        choose = _integer_range if kind == "integer" else _float_range
        scaling[kind], origin = choose(low, high), f"values of a sample: {low:g} to {high:g}"
        declared = said[kind].pop() if len(said[kind]) == 1 else None
        if declared and _fits(low, high, *declared):
            scaling[kind], origin = list(declared), "as the files say"
        lines += describe(scaling, origin, kind)
    return scaling, lines


def describe(scaling, origin, *kinds):
    """A line about each kind of values.

    Args:
        scaling (dict): of a data set.
        origin (str): where it is from.
        kinds (str): only these; none: all.
    """
    names = {"integer": "images with more than 8 bits", "float": "images of floats"}
    return [
        f"{names[kind]}: {black:g} is black, {white:g} white ({origin})"
        for kind, (black, white) in scaling.items()
        if not kinds or kind in kinds
    ]


def without_damaged_metadata(data):
    """A PNG without the chunks that a viewer does not need and whose checksum is wrong."""
    if not data.startswith(PNG):
        return data
    kept, place = [PNG], len(PNG)
    while place + 12 <= len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        end = place + 12 + length
        name, body = data[place + 4 : place + 8], data[place + 4 : end - 4]
        is_needed = name[:1].isupper()
        if is_needed or struct.pack(">I", zlib.crc32(body)) == data[end - 4 : end]:
            kept.append(data[place:end])
        place = end
    return b"".join([*kept, data[place:]])


def _values(image, data):
    """The values [height, width] or [height, width, 3], and the 16-bit alpha channel or None."""
    if not _is_deep_color(data):
        return np.asarray(image), None
    import torch
    from torchvision.io import ImageReadMode, decode_png  # Pillow drops the lower 8 bits

    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    values = decode_png(encoded, ImageReadMode.UNCHANGED).permute(1, 2, 0).numpy()
    channels = values.shape[2]
    if channels % 2:
        return values, None
    colors = values[..., 0] if channels == 2 else values[..., :3]
    return colors, values[..., -1]


def _is_deep_color(data):
    return data[:8] == PNG and data[24] == 16 and data[25] in PNG_COLORS


def _is_deep_tiff(image):
    bits = getattr(image, "tag_v2", {}).get(TIFF_BITS, ())
    return image.mode[:1] not in "IF" and max(bits, default=8) > 8


def _said_range(image):
    """The range that a TIFF file declares, or None."""
    tags = getattr(image, "tag_v2", {})
    for low, high in TIFF_RANGES:
        if high in tags:
            values = np.ravel([tags.get(low, 0), tags[high]]).tolist()
            return values[0], values[-1]
    return None


def _fits(low, high, black, white):
    """Whether values are in a range, and take up a quarter of it or more."""
    return black <= low and high <= white and high - low >= (white - black) / 4


def _integer_range(low, high):
    """All values of as many bits as are used, unless the values take up only a small part."""
    limit = 2 ** max(8, int(high).bit_length()) - 1
    if low < 0 or 0 < high - low < limit / 4:
        return [low, max(high, low + 1)]
    return [0, limit]


def _float_range(low, high):
    """The usual range that the values fit into, unless they take up only a small part of it."""
    for black, white in ((0, 1), (-1, 1), (0, 255), (0, 65535)):
        if _fits(low, high, black, white):
            return [black, white]
    return [low, high if high > low else low + 1]
