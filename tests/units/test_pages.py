"""What the pages and the scripts say alike: the table of figures, and what a probability is."""

import sys

import pytest
from harness.launches import load_script

from utils.run.failures import UserError


@pytest.mark.parametrize(
    ("script", "flag", "bad"),
    [
        ("train_cifar", "--label_smoothing", "2"),
        ("train_cifar", "--val_fraction", "-0.1"),
        ("train_images", "--flip", "2"),
        ("train_gpt", "--dropout", "2"),
        ("train_gpt", "--dropout", "nan"),
    ],
)
def test_a_probability_that_cannot_be_is_one_line(script, flag, bad, monkeypatch):
    """Alike in all scripts, and not an error of torch after the data was loaded."""
    words = [f"{script}.py", "--dataset", "synthetic", flag, bad]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(UserError, match=f"{flag}: must be"):
        load_script(script).parse_args()
