"""A file of text is read whole, in segments that end with a line."""

import codecs
import itertools
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from utils.language import documents

WIDE = ["ä", "€", "😀"]
LINES = ["one two", "three", " ", "\n", "\n\n", "line\n", *WIDE]
# Repeated, because hypothesis would take minutes to shorten an example of a hundred pieces.
TEXTS = st.one_of(st.lists(st.sampled_from(pieces), max_size=6) for pieces in (LINES, WIDE)).map(
    lambda pieces: "".join(pieces) * 40
)


@given(TEXTS, st.sampled_from([codecs.BOM_UTF8, b""]), st.integers(4, 300), st.booleans())
def test_a_text_is_read_whole_in_segments(text, mark, size, is_large):
    """Of a large file, of at most `SEGMENT` bytes; of a smaller one, about a hundred of them."""
    name = "SEGMENT" if is_large else "SHORTEST"
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(documents, name, size):
        path = Path(folder) / "a.txt"
        path.write_bytes(mark + text.encode())
        segments = list(documents.read_segments(path))
    assert "".join(segments) == text == "".join(documents.segments(text.encode(), size))
    assert max(map(len, segments), default=0) <= 2 * size
    for one, following in itertools.pairwise(segments):
        assert one.endswith("\n") or "\n" not in one  # no line is cut that could end here
        assert one.endswith("\n") or following.startswith(" ") or " " not in one[1:]


def test_a_file_has_about_a_hundred_segments(tmp_path):
    (tmp_path / "a.txt").write_text("a line of a text\n" * 20_000)
    assert 95 <= len(list(documents.read_segments(tmp_path / "a.txt"))) <= 101
