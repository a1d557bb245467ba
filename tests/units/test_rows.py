"""How rows are told from those of before: the checksum of texts, and that of a stream."""

import hashlib

import pytest

from utils.language import rows
from utils.run.failures import UserError


def test_a_checksum_is_of_every_byte_or_of_a_long_text_of_its_size_and_parts(monkeypatch):
    for name, value in {"SHORT": 40, "SAMPLED_BYTES": 8, "SAMPLED_PARTS": 4}.items():
        monkeypatch.setattr(rows, name, value)
    assert rows.checksum(b"ab") == hashlib.sha256(b"\2" + bytes(7) + b"ab").hexdigest()[:12]
    assert rows.checksum(b"a", b"bc") != rows.checksum(b"ab", b"c")
    for size, parts in ((40, range(0, 40, 8)), (83, (0, 20, 40, 60, 80))):
        text, noticed = bytes(size), []
        for place in range(size):
            other = text[:place] + b"!" + text[place + 1 :]
            noticed += [place] if rows.checksum(other) != rows.checksum(text) else []
        assert noticed == [n for n in range(size) if any(part <= n < part + 8 for part in parts)]


def test_a_stream_knows_its_files_by_names_sizes_and_first_bytes(tmp_path):
    def fingerprint(name, text):
        (tmp_path / name).write_text(text)
        table = rows.open_rows(str(tmp_path), {"text": ("text",)}, "", streaming=True)
        (tmp_path / name).unlink()
        return table.splits["train"].fingerprint

    row = '{"text": "abc"}\n'
    first = fingerprint("a.jsonl", row)
    assert first == fingerprint("a.jsonl", row) != ""
    others = ("b.jsonl", row), ("a.jsonl", row * 2), ("a.jsonl", row.replace("abc", "abd"))
    assert len({first, *(fingerprint(*other) for other in others)}) == 4
    with pytest.raises(
        UserError, match=r"holds no file that ends in \.txt, \.parquet, .*; use a H"
    ):
        fingerprint("a.md", row)
    lines = "\ufeff" + row + " \t\r\n\n" + row  # as Windows writes them
    (tmp_path / "c.jsonl").write_text(lines, newline="")
    opened = rows.open_rows(str(tmp_path / "c.jsonl"), {"text": ("text",)}, "")
    assert list(opened.splits["train"]) == [{"text": "abc"}] * 2
    assert opened.details == ["train: 4 rows"]
