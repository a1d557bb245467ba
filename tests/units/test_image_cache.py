"""The cache of decoded images changes nothing, and a bad image is named by all processes."""

import os

import pytest
import torch
from harness.data import make_photos
from harness.fakes import accelerator

from utils.images import image_cache
from utils.images.decoding import BadImage
from utils.images.sources import find_images
from utils.run.failures import UserError

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")


@pytest.fixture
def val(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return find_images(str(make_photos(tmp_path / "photos"))).splits["val"]


def cached(images, *how):
    return image_cache.cache_images(accelerator(), images, "val", *how)


def test_a_cache_is_made_once_and_again_if_a_file_changes(val, tmp_path, capsys, monkeypatch):
    counts = []
    with monkeypatch.context() as patched:
        patched.setattr(torch, "set_num_threads", counts.append)
        images = cached(val, 36)
    # Each thread computes with one; this one then as before.
    assert len(images) == 24 and set(counts[:-1]) == {1} and counts[-1] == torch.get_num_threads()
    (file,) = (tmp_path / "cache").rglob("*.bin")
    assert capsys.readouterr().out == "scaling 24 val images for the cache\n"
    assert images.open(3).height == 36 and min(images.open(0).pixels().shape[1:]) == 36
    cached(val, 36)
    assert capsys.readouterr().out == ""
    for how in ((40,), (36, "bicubic")):
        cached(val, *how)
    os.utime(val.name(0), (1, 1))
    val = find_images(str(tmp_path / "photos")).splits["val"]
    cached(val, 36)
    assert capsys.readouterr().out.count("scaling") == 3
    whole, newest = file.stat().st_size, max(file.parent.iterdir(), key=os.path.getmtime)
    for size in (whole - 100, 100, 4, 0):
        os.truncate(newest, size)
        with pytest.raises(UserError, match=f"{newest} is damaged: delete it"):
            cached(val, 36)


def test_what_could_not_be_read_says_so_until_it_is_repaired(val, tmp_path, monkeypatch):
    monkeypatch.setattr(image_cache, "CHUNK", 5)
    good, path = (tmp_path / "photos/val/cat/0.jpg").read_bytes(), tmp_path / "photos/val/cat/1.jpg"
    path.write_bytes(b"no image")
    images = cached(val, 36)
    with pytest.raises(BadImage, match="not an image"):
        images.open(1)
    path.write_bytes(good)
    assert torch.equal(images.open(1).pixels(), val.open(0).pixels())
    assert min(images.open(2).pixels().shape[1:]) == 36
