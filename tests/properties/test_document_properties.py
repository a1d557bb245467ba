"""A text is read whole, in segments that end with a line, and only its end is held out."""

import codecs
import itertools
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from utils.language import documents
from utils.language.packing import TokenSettings

WIDE = ["ä", "€", "😀"]
LINES = ["one two", "three", " ", "\n", "\n\n", "line\n", *WIDE]
# So long that the held-out tenth has a whole character in its first half; some without any line.
# Repeated, because hypothesis would take minutes to shorten an example of a hundred pieces.
TEXTS = st.one_of(
    st.lists(st.sampled_from(pieces), min_size=1, max_size=6) for pieces in (LINES, WIDE)
).map(lambda pieces: "".join(pieces) * 40)


def read(path, **options):
    """The segments of each split of a file that is one document."""
    splits = documents.find_documents(str(path), TokenSettings(None, 8, **options)).splits
    assert all(len(rows) == 1 for rows in splits.values())
    return {split: list(next(iter(rows))["text"]) for split, rows in splits.items()}


@given(
    TEXTS,
    st.sampled_from([codecs.BOM_UTF8, b""]),
    st.integers(4, 300),
    st.floats(0.1, 0.9),
)
def test_a_text_is_read_whole_in_segments_and_only_its_end_is_held_out(
    text, mark, segment, fraction
):
    data = mark + text.encode()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(documents, "SEGMENT", segment):
        path = Path(folder) / "a.txt"
        path.write_bytes(data)
        whole, parts = read(path, val_fraction=0), read(path, val_fraction=fraction)
        assert "".join(documents.segments(text.encode())) == text
    assert whole.keys() == {"train"} and parts.keys() == {"train", "val"}
    assert "".join(whole["train"]) == text == "".join(parts["train"] + parts["val"])
    for segments in (whole["train"], parts["train"], parts["val"]):
        assert max(map(len, segments)) <= 2 * segment
        for one, following in itertools.pairwise(segments):
            assert one.endswith("\n") or "\n" not in one  # no line is cut that could end here
            assert one.endswith("\n") or following.startswith(" ") or " " not in one[1:]
    begins = len(data) - round(len(data) * fraction)
    held_out = len("".join(parts["val"]).encode())
    first_half = data[begins : begins + (len(data) - begins) // 2]
    if b"\n" in first_half:
        assert held_out == len(data) - begins - first_half.index(b"\n") - 1
    else:
        assert 0 <= len(data) - begins - held_out < 4
