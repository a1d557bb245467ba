"""How processes share a data set, and the files that one of them makes."""

import errno
import os
import platform
from types import SimpleNamespace

import pytest
import torch
from harness.fakes import accelerator

from utils.data import sharing
from utils.run.failures import UserError


def test_a_data_set_must_be_the_same_on_every_process(monkeypatch, capsys):
    data = SimpleNamespace(description="8 images", details=["cat 4", "dog 4"])
    monkeypatch.setattr(sharing, "gather", lambda _, own: [own, "8 images"])
    for rank in (0, 1):
        assert sharing.agree(accelerator(2, rank), "photos", data) == "8 images"
    assert capsys.readouterr().out == "data: 8 images\n  cat 4\n  dog 4\n"
    monkeypatch.setattr(sharing, "gather", lambda _, own: [own, "7 images"])
    says = "--dataset photos differs between machines: 7 images against 8 images"
    with pytest.raises(UserError, match=says):
        sharing.agree(accelerator(2, 0), "photos", data)


@pytest.mark.parametrize("given", [True, False])
def test_a_cached_file_is_in_the_folder_of_the_datasets_library(given, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setattr(sharing, "HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "datasets"
    if given:
        folder = tmp_path / "given"
        monkeypatch.setenv("HF_DATASETS_CACHE", str(folder))
    for parts in ([b"ab", b"c"], []):  # the second time nothing is asked for
        assert bytes(sharing.cached("tokens of texts", iter(parts), 1).numpy()) == b"abc"
    (file,) = folder.rglob("*.bin")
    assert file.parent == folder / "tokens_of_texts"
    empty = sharing.cached("tokens of texts", [], 2)
    assert empty.numel() == 0 and empty.dtype == torch.uint8
    assert len(list(folder.rglob("*.bin"))) == 2


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Where the text of version 1 is kept; its folder is not there yet."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    return sharing.path_in_cache("text", 1)


def write(parts):
    return bytes(sharing.cached("text", parts, 1).numpy())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_file_that_cannot_be_written_is_one_line_and_frees_a_full_disk(number, file):
    def parts():
        yield b"a" * 100_000
        raise OSError(number, "no more")

    with pytest.raises(UserError) as error:
        write(parts())
    assert str(error.value).startswith(f"cannot write the text to {file.parent} (set HF_DATASETS")
    assert str(error.value).endswith("another folder) (no more)")
    assert len(os.listdir(file.parent)) == (number == errno.EIO)


def test_several_runs_may_write_the_same_file_at_once(file):
    """Of one machine, which write the same bytes to the same place; or of several."""

    def parts(before):
        yield b"te"
        before()
        yield b"xt"

    assert write(parts(lambda: write([b"text"]))) == b"text"
    assert os.listdir(file.parent) == [file.name]
    file.unlink()
    assert write(parts(lambda: file.write_bytes(b"first"))) == b"first"
    assert os.listdir(file.parent) == [file.name]


def test_what_a_killed_writer_has_left_is_written_over(file):
    file.parent.mkdir()
    (file.parent / f"{file.stem}.writing.{platform.node()}").write_bytes(b"longer than the text")
    assert write([b"text"]) == b"text" and os.listdir(file.parent) == [file.name]
