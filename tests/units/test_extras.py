"""An extra that cannot be written costs a warning."""

from utils.report.extras import optional


def test_an_extra_that_fails_without_a_text_is_named_by_its_type(capsys):
    with optional("the plot"):
        raise ZeroDivisionError
    line = "warning: the plot is missing (ZeroDivisionError: ZeroDivisionError)\n"
    assert capsys.readouterr().err == line
