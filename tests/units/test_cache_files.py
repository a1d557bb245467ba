"""Files that one process of a machine makes."""

import errno
import fcntl
import os
import platform
import re
import shutil

import pytest

from utils.data import cache_files
from utils.run.failures import UserError


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


@pytest.mark.parametrize(
    ("number", "size", "needed"),
    [(errno.ENOSPC, None, "more space"), (errno.EDQUOT, 3 << 29, "1.5 GiB")],
)
def test_a_full_disk_is_told_with_what_is_needed(number, size, needed, tmp_path, monkeypatch):
    def parts():
        yield b"a"
        raise OSError(number, "full")

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    says = (
        rf"cannot write the tokens to {tmp_path}/tokens \(set .* folder\) \(full; (.*) GiB free, "
    )
    with pytest.raises(UserError) as error:
        cache_files.cached("tokens", parts(), 1, size)
    said = re.fullmatch(rf"{says}and it needs {needed}\)", str(error.value))
    assert float(said[1]) == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, abs=1)
    assert os.listdir(tmp_path / "tokens") == []


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Where the text of version 1 is kept."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "text").mkdir()
    return cache_files.path_in_cache("text", 1)


def write(parts):
    return bytes(cache_files.cached("text", parts, 1).numpy())


def test_what_another_process_has_finished_stays(file):
    def parts():
        file.write_bytes(b"first")
        yield b"second"

    assert write(parts()) == b"first" and os.listdir(file.parent) == [file.name]
    (file.parent / "empty").touch()
    assert cache_files.map_bytes(file.parent / "empty").numel() == 0


def test_left_overs_of_killed_writers_are_removed(file):
    """Not those of others that write, nor of another machine."""
    mine, elsewhere = (f"{file.stem}.writing.{name}." for name in (platform.node(), "elsewhere"))
    for name in (f"{mine}9", f"{elsewhere}9"):
        (file.parent / name).write_bytes(b"half")

    def parts():
        (own,) = set(os.listdir(file.parent)) - {f"{elsewhere}9"}
        assert write([b"other"]) == b"other"
        assert set(os.listdir(file.parent)) == {own, file.name, f"{elsewhere}9"}
        yield b"own"

    write(parts())
    assert set(os.listdir(file.parent)) == {file.name, f"{elsewhere}9"}


def test_without_locks_nothing_is_removed(file, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (file.parent / f"{file.stem}.writing.{platform.node()}.9").touch()
    write([b"text"])
    assert len(os.listdir(file.parent)) == 2
