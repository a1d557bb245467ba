"""What the tools print as a table, where they write, and what an extra that fails costs."""

import errno

import pytest

from utils.report import output
from utils.run.failures import UserError


def test_a_table_a_folder_that_cannot_be_written_and_an_extra_that_fails(tmp_path, capsys):
    assert output.columns([["a", "bb", ""], ["ccc", "d", "e"]]) == "a    bb\nccc  d   e"
    for _ in range(2):
        with output.writing_to(str(tmp_path / "a" / "b")) as folder:
            (folder / "file").write_text("kept")
    for error in (OSError(errno.EROFS, "Read-only file system"), OSError("Read-only file system")):
        line = f"^cannot write to {folder}: Read-only file system; give another --output_dir$"
        with pytest.raises(UserError, match=line), output.writing_to(folder):
            raise error
    for error, why in ((ZeroDivisionError(), "ZeroDivisionError"), (ValueError("a\nb "), "a\\nb")):
        with output.optional("the plot"):
            raise error
        line = f"warning: the plot is missing ({type(error).__name__}: {why})\n"
        assert capsys.readouterr().err == line
