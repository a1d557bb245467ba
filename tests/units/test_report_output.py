"""What the tools print as a table, where they write, and what an extra that fails costs."""

import errno

import pytest

from utils.report import output
from utils.report.extras import optional
from utils.run.failures import UserError


def test_columns_are_as_wide_as_their_longest_cell():
    assert output.columns([["a", "bb", ""], ["ccc", "d", "e"]]) == "a    bb\nccc  d   e"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    for _ in range(2):
        with output.writing_to(str(tmp_path / "a" / "b")) as folder:
            (folder / "file").write_text("kept")
    for error in (OSError(errno.EROFS, "Read-only file system"), OSError("Read-only file system")):
        line = f"^cannot write to {folder}: Read-only file system; give another --output_dir$"
        with pytest.raises(UserError, match=line), output.writing_to(folder):
            raise error


def test_an_extra_that_fails_without_a_text_is_named_by_its_type(capsys):
    with optional("the plot"):
        raise ZeroDivisionError
    line = "warning: the plot is missing (ZeroDivisionError: ZeroDivisionError)\n"
    assert capsys.readouterr().err == line
