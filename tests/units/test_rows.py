"""The checksum of texts."""

import hashlib

from utils.language import rows


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
