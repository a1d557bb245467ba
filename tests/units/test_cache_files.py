"""Files that one process of a machine makes."""

import errno
import os

import pytest

from utils.data import cache_files
from utils.run.failures import UserError


@pytest.mark.parametrize("links", [True, False])
def test_what_is_published_is_complete_and_stays(links, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    for text in ("first", "second"):
        own = tmp_path / text
        own.write_text(text)
        cache_files.publish(own, tmp_path / "target")
        own.unlink(missing_ok=True)
    assert (tmp_path / "target").read_text() == "first" and os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("given", [True, False])
def test_a_cached_file_is_in_the_folder_of_the_datasets_library(given, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setattr(cache_files, "HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "datasets"
    if given:
        folder = tmp_path / "given"
        monkeypatch.setenv("HF_DATASETS_CACHE", str(folder))
    for parts in ([b"ab", b"c"], []):  # the second time nothing is asked for
        assert bytes(cache_files.cached("tokens of texts", iter(parts), 1, 3).numpy()) == b"abc"
    (file,) = folder.rglob("*.bin")
    assert file.parent == folder / "tokens_of_texts"
    other = cache_files.cached("tokens of texts", [b"d"], 2)
    assert bytes(other.numpy()) == b"d" and len(list(folder.rglob("*.bin"))) == 2
    file.write_bytes(b"ab")
    with pytest.raises(UserError, match=f"^{file} is damaged: delete it"):
        cache_files.cached("tokens of texts", [], 1, 3)


@pytest.mark.parametrize(("size", "needed"), [(None, "space"), (3 << 29, "1.5 GiB")])
def test_a_full_disk_is_told_with_what_is_needed(size, needed, tmp_path, monkeypatch):
    def parts():
        yield b"a"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    says = rf"^cannot write the tokens to {tmp_path}/tokens \(set .* free\): it needs {needed}$"
    with pytest.raises(UserError, match=says):
        cache_files.cached("tokens", parts(), 1, size)
    assert os.listdir(tmp_path / "tokens") == []
