"""What `utils.run.files` reads and writes."""

import os

import pytest

from utils.run import files
from utils.run.failures import UserError


def test_each_kind_of_path_that_is_no_file_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert files.regular_file(str(tmp_path / "link")) == tmp_path / "link"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    none = (tmp_path / name for name in ("dangling", "nothing", "loop", "file/a"))
    for path in (*none, "x" * 300, "nul\0"):
        with pytest.raises(FileNotFoundError):
            files.regular_file(path)
    for path, kind in ((tmp_path, "folder"), (tmp_path / "pipe", "device, a pipe or a socket")):
        with pytest.raises(UserError, match=f"^{path} is not a file, but a {kind}$"):
            files.regular_file(path)


def test_lines_are_read_up_to_the_one_that_was_being_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st\n{"step": 4}\n')
    assert list(files.json_lines(str(tmp_path / "a.jsonl"))) == [{"step": 1}, {"step": 2}]
    (tmp_path / "b.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\n')
    assert list(files.json_lines(tmp_path / "b.jsonl")) == [{"step": 1}]


def test_a_file_is_replaced_only_when_the_new_one_is_on_disk(tmp_path, monkeypatch):
    """And its name only counts once the folder is on disk, too."""
    path, calls = tmp_path / "a.json", []
    path.write_text("old")
    temporary = f"{tmp_path}/.a.json.{os.getpid()}.writing"
    replace = os.replace

    def fsync(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append((name, path.read_text()))
        if name == temporary:
            assert (tmp_path / os.path.basename(name)).read_text() == '{\n  "a": 1\n}\n'

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("replace") or replace(*paths))
    files.write_json(str(path), {"a": 1})
    assert calls == [(temporary, "old"), "replace", (str(tmp_path), '{\n  "a": 1\n}\n')]
    assert os.listdir(tmp_path) == ["a.json"]


def test_text_is_utf8_and_keeps_the_bytes_of_names(tmp_path):
    files.write_text(tmp_path / "a", "é \udce9")
    assert (tmp_path / "a").read_bytes() == b"\xc3\xa9 \xe9"
