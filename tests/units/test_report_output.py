"""What the tools print as a table, and where they write."""

import errno

import pytest

from utils.report import output
from utils.run.failures import UserError


def test_columns_are_as_wide_as_their_longest_cell():
    assert output.columns([["a", "bb", ""], ["ccc", "d", "e"]]) == "a    bb\nccc  d   e"
    assert output.columns([["a"]]) == "a"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    with output.writing_to(str(tmp_path / "a" / "b")) as folder:
        (folder / "file").write_text("kept")
    with output.writing_to(folder) as again:
        assert again == tmp_path / "a" / "b" and (again / "file").read_text() == "kept"
    for error in (OSError(errno.EROFS, "Read-only file system"), OSError("Read-only file system")):
        with pytest.raises(UserError) as caught, output.writing_to(folder):
            raise error
        line = f"cannot write to {folder}: Read-only file system; give another --output_dir"
        assert str(caught.value) == line
    with pytest.raises(UserError, match="file: File exists"), output.writing_to(folder / "file"):
        pass
