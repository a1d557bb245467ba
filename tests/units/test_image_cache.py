"""The cache of decoded images is complete or absent, and a bad image is named by all processes."""

import os
import platform

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
def val(tmp_path):
    return find_images(str(make_photos(tmp_path / "photos"))).splits["val"]


def test_a_cache_is_made_once_and_again_if_a_file_changes(val, tmp_path, capsys):
    cache = tmp_path / "cache"
    cached = image_cache.cached(accelerator(), val, "val", 36, cache)
    (file,) = cache.iterdir()
    assert f"cached 24 val images in {file}: 0.00 GiB" in capsys.readouterr().out
    assert cached.open(3).height == 36 and min(cached.open(0).pixels().shape[1:]) == 36
    before = file.stat().st_mtime_ns
    image_cache.cached(accelerator(), val, "val", 36, cache)
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [before]
    assert image_cache.cache_file(val, 36, cache, "bilinear") == file
    others = [image_cache.cache_file(val, 40, cache, "bilinear")]
    others.append(image_cache.cache_file(val, 36, cache, "bicubic"))
    os.utime(val.name(0), (1, 1))
    others.append(image_cache.cache_file(val, 36, cache, "bilinear"))
    assert len({file, *others}) == 4


def test_what_could_not_be_read_says_so_until_it_is_repaired(val, tmp_path):
    good, path = (tmp_path / "photos/val/cat/0.jpg").read_bytes(), tmp_path / "photos/val/cat/1.jpg"
    path.write_bytes(b"no image")
    cached = image_cache.cached(accelerator(), val, "val", 36, tmp_path / "cache")
    with pytest.raises(BadImage, match="not an image"):
        cached.open(1)
    path.write_bytes(good)
    assert torch.equal(cached.open(1).pixels(), val.open(0).pixels())
    assert min(cached.open(2).pixels().shape[1:]) == 36


def test_an_interrupted_cache_is_absent(val, tmp_path, monkeypatch):
    cache, partly = tmp_path / "cache", []
    (cache / "old").mkdir(parents=True)
    monkeypatch.setattr(image_cache, "CHUNK", 5)
    file = image_cache.cache_file(val, 36, cache, "bilinear")

    def interrupt(index):
        if index == 17:
            partly.extend(cache.glob("*.writing.*"))
            raise KeyboardInterrupt
        return type(val).open(val, index)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(val, "open", interrupt)
        image_cache.cached(accelerator(), val, "val", 36, cache)
    assert partly and [path.name for path in cache.iterdir()] == ["old"]
    # As of a process that was killed, here and on another machine that shares the disk.
    for machine in (platform.node(), "elsewhere"):
        (cache / f"{file.stem}.writing.{machine}.999999999").write_bytes(b"half")
    threads = torch.get_num_threads()
    assert len(image_cache.cached(accelerator(), val, "val", 36, cache)) == 24
    assert torch.get_num_threads() == threads
    others = {"old", f"{file.stem}.writing.elsewhere.999999999"}
    assert {path.name for path in cache.iterdir()} == {file.name} | others
    with file.open("r+b") as opened:
        for size in (file.stat().st_size - 100, 100, 4, 0):
            opened.truncate(size)
            with pytest.raises(UserError, match="is damaged: delete it"):
                image_cache.cached(accelerator(), val, "val", 36, cache)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_bad_images_of_all_processes_are_named(processes, val, tmp_path, monkeypatch, capsys):
    """Each decodes its share, and says what is true of all of them."""
    for kind, count in (("cat", 8), ("yak", 3)):
        for i in range(count):
            (tmp_path / "photos" / "val" / kind / f"{i}.jpg").write_bytes(b"no image")
    shares = []

    def check(rank, on_bad, gather):
        monkeypatch.setattr(image_cache, "gather", gather)
        monkeypatch.setattr(image_cache, "run_on_all", lambda _, function: function())
        image_cache.check(accelerator(processes, rank), val, "val", on_bad)

    for rank in range(processes):
        check(rank, "stop", lambda _, own: shares.append(own) or [[]])
    assert sum(map(len, shares)) == 11 == len(set().union(*shares))
    assert max(map(len, shares)) < 11 or processes == 1
    assert capsys.readouterr().out == "val: all 24 images can be read\n"
    says = r"11 of 24 images of the val split cannot be read: .*cat/0.jpg \(it is not an image\), "
    with pytest.raises(UserError, match=says + r".*yak/1.jpg \(.*\) and 1 more; replace") as error:
        check(processes - 1, "stop", lambda *_: shares)
    assert str(error.value).count(".jpg") == 10
    for rank in range(processes):
        check(rank, "skip", lambda *_: shares)
    assert capsys.readouterr().out.count("warning: left out: 11 of 24 images of the val") == 1
    with pytest.raises(UserError, match=r"yak/1.jpg \(it is not an image\); replace"):
        check(0, "stop", lambda *_: [sorted(set().union(*shares))[:10]])
