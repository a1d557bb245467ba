"""Files that one process of a machine makes."""

import errno
import os

import pytest

from utils.data import cache_files


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
