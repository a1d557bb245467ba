"""Encoded images: what is no image, and when a checksum of many differs."""

import numpy as np
import pytest
from harness.data import encoded, noise

from utils.images import decoding as images_module
from utils.images.decoding import BadImage, Encoded, Images
from utils.images.storage import Rows

LARGE = noise(0, (4, 3)).resize((400, 300))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"this is a thesis", "not an image"),
        (encoded(LARGE, "JPEG")[:-800], "truncated"),
        (encoded(LARGE)[:900], "truncated"),
        (b"", "not an image"),
        (encoded(noise(0), "EPS"), "not an image"),  # for which Pillow would start Ghostscript
    ],
)
def test_a_broken_image_is_recognized(data, says):
    with pytest.raises(BadImage, match=says):
        Encoded(data).pixels()


def test_a_fingerprint_knows_names_labels_sizes_and_sampled_data(monkeypatch):
    monkeypatch.setattr(images_module, "SAMPLED", 2)
    monkeypatch.setattr(images_module, "SAMPLED_BYTES", 4)
    data = [b"aaaa1", b"bbbb", b"cccc"]

    def of(data=data, labels=(0, 1, 0), rows=(0, 1, 2), version="1", **options):
        source = Rows(list(data), "a table", version)
        images = Images(source, np.array(rows), np.array(labels), options.pop("scaling", {}))
        return images.fingerprint(**options)

    assert of() == of(version="2", scaling={"integer": [0, 1]})
    assert of() == of([b"aaaa1", b"xxxx", b"cccc"])  # not in the sample, of the same size
    others = [of(labels=(0, 1, 1)), of(rows=(0, 2, 1)), of([b"aaaa1", b"bbbb", b"cccx"])]
    others.append(of([b"aaaa1", b"bbbbb", b"cccc"]))
    # On one machine the version of the source counts instead, and the scaling.
    stamped = [of(stamps=True), of(stamps=True, version="2")]
    stamped.append(of(stamps=True, scaling={"integer": [0, 1]}))
    assert of([b"x"] * 3, stamps=True) == stamped[0]
    assert len({of(), *others, *stamped}) == 8
