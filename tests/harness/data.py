"""Small data that the tests make themselves."""

import io
import json
import os
import tempfile
from pathlib import Path
from uuid import uuid4

import numpy as np

# A data set with 600 images to train on and 100 to test with. All test processes share it.
SMALL_DATA = Path(tempfile.gettempdir(), os.environ.setdefault("SMALL_DATA", f"{uuid4().hex}.npz"))


def write_small_data():
    """Writes `SMALL_DATA`: noise, whose brightness depends on the class."""
    generator, arrays = np.random.default_rng(0), {}
    for split, count in (("train", 600), ("test", 100)):
        labels = generator.integers(0, 10, count)
        noise = generator.integers(0, 100, (count, 32, 32, 3))
        images = (noise + 15 * labels[:, None, None, None]).astype(np.uint8)
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
    np.savez(SMALL_DATA, **arrays)


class Loader(list):
    """Batches with the data set that they are from."""

    def __init__(self, batches, samples):
        super().__init__(batches)
        self.dataset = samples


def noise(seed, size=(32, 32)):
    """An image of random pixels."""
    from PIL import Image  # here, because most tests need no images

    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image, kind="PNG", **options):
    """The bytes of a file with this image."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_images(root, *paths, count=3):
    """Writes small images, all different; of a path that ends in /, several. Returns the folder."""
    for path in paths:
        names = [f"{path}{i}.png" for i in range(count)] if path.endswith("/") else [path]
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(encoded(noise([*name.encode()], (8, 8))))
    return str(root)


def sizes(data):
    """How many samples each split has."""
    return {split: len(images) for split, images in data.splits.items()}


def left_out(data):
    """What the report about a data set says of what was left out."""
    return [line.removeprefix("left out: ") for line in data.details if "left out" in line]


def make_photos(folder, per_class=8, splits=("train", "val"), classes=("cat", "dog", "yak")):
    """Writes JPEGs of several sizes; with the split "", the class folders are at the top.

    Returns `folder`.
    """
    for place, split in enumerate(splits):
        for label, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for i in range(per_class):
                photo = noise(1000 * place + 100 * label + i, (4, 3))
                photo = photo.resize((50 + 3 * i, 60 - 2 * i))  # smooth
                (folder / split / name / f"{i}.jpg").write_bytes(encoded(photo, "JPEG"))
    return folder


def made_run(folder, seconds=(0.5, 0.25), **arguments):
    """Writes the files of a run with two log lines, ten steps apart, and three evaluations.

    The best score has neither the highest nor the lowest loss.
    """
    folder.mkdir(parents=True)
    topology = {"processes": arguments.pop("processes", 1), "mixed_precision": "no"}
    arguments = {"batch_size": 20, "lr": 0.1, "log_every": 10, **arguments}
    (folder / "args.json").write_text(json.dumps({"arguments": arguments, "topology": topology}))
    lines = [
        {"split": "train", "step": 10 * (i + 1), "loss": 2.0 - i, "step_seconds": step_seconds}
        for i, step_seconds in enumerate(seconds)
    ]
    for step, loss, score in ((5, 1.9, 0.25), (10, 1.5, 0.75), (20, 1.2, 0.5)):
        lines.append(
            {"split": "val", "step": step, "loss": loss, "accuracy": score, "score": score}
        )
    cut_off = '{"split": "train", "step": 30, "loss": 2.'  # it was killed while it wrote
    text = "".join(f"{json.dumps(line)}\n" for line in lines) + cut_off
    (folder / "metrics.jsonl").write_text(text)
    return folder


def global_batches(readers, name, count):
    """What the parts of a stream, one of each process, yield together.

    Args:
        readers (list): iterators over batches.
        name (str): of the rows in a batch.

    Returns:
        tuple: the sorted rows of `count` global batches; the position after them, as a checkpoint
        stores it.
    """
    rows, position = [], None
    for _ in range(count):
        parts = [next(reader) for reader in readers]
        position = {lane: place for part in parts for lane, place in part["position"].items()}
        rows.append(sorted(row for part in parts for row in part[name].tolist()))
    return rows, json.loads(json.dumps(position))
