"""Names of files and classes come from outside: whatever they hold is shown in one line."""

import unicodedata
import warnings

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from utils.images import classifier_plots
from utils.report import model_card, plots
from utils.run import failures, output

NAMES = [
    "$\\frac{1}{$",
    "back`tick` *bold* <b>",
    "\x1b[31mred\nnext",
    "\u202egpj.exe",
    "pipe | [link](x) # head",
    "\udce9t\udce9",
]


# Controls, halves of letters, ends of lines, and changes of the direction of writing.
OBEYED = {"Cc", "Cs", "Zl", "Zp", "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@given(st.text() | st.sampled_from(NAMES))
@example("a\tb\x1b\x85é 中")
def test_a_name_is_one_line_wherever_it_is_shown(name):
    for escape in (output.one_line, model_card.for_markdown, plots.for_plot):
        escaped = escape(name)
        assert escaped.encode() is not None
        for fact in (unicodedata.category, unicodedata.bidirectional):
            assert not set(map(fact, escaped)) & OBEYED
    if name.isprintable():
        assert output.one_line(name) == name
    assert str(failures.UserError(f"class {name}")) == f"class {output.one_line(name)}"


def test_escapes_show_what_was_there():
    assert output.one_line("a\tb\x1b\x85é 中") == r"a\tb\x1b\x85é 中"
    assert model_card.for_markdown("a_b|c`d`<e>") == r"a\_b\|c\`d\`&lt;e&gt;"
    assert plots.for_plot("$x$") == r"\$x\$"


@pytest.mark.slow
def test_plots_draw_any_name(tmp_path):
    """`$` would start a formula, and each letter that a font lacks would be a warning."""
    names = [*NAMES, "猫", "कुत्ता"]
    images = torch.zeros(len(names), 3, 8, 8, dtype=torch.uint8)
    labels = torch.arange(len(names))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert classifier_plots.image_grid(
            tmp_path / "a.png", images, labels, labels.roll(1), names, "a title"
        )
        assert classifier_plots.confusion_matrix(
            tmp_path / "b.png", torch.eye(len(names)).long(), names
        )
    assert (tmp_path / "a.png").exists() and (tmp_path / "b.png").exists()
